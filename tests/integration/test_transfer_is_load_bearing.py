"""Wrong bytes give wrong tokens: what decode says comes from the blocks that were moved."""

from pathlib import Path

import pytest

from baton.async_llm import AsyncLLM
from baton.protocol.config import CacheConfig, ClusterConfig, EngineConfig, ModelConfig
from baton.protocol.sampling import SamplingParams
from tests.support.checkpoints import FAMILIES, model_folder
from tests.support.damage import (
    BlockOfAnother,
    Hurt,
    damaged,
    nothing,
    shift_by_one,
    swap_two,
    zero_one,
)
from tests.support.node_threads import NodeThreads, never_local

PROMPT = [10 + (i * i + 7 * i) % 241 for i in range(6 * 16 + 5)]
OTHER_PROMPT = [10 + (i * i + 5 * i) % 239 for i in range(40)]
PARAMS = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, output_kind="final")
HURTS: dict[str, Hurt] = {
    "zero": zero_one,
    "swap": swap_two,
    "shift": shift_by_one,
}


async def answer(llm: AsyncLLM) -> list[int]:
    """To PROMPT, after somebody else was answered."""
    for prompt in (OTHER_PROMPT, PROMPT):
        async for output in llm.generate(prompt, PARAMS):
            last = output
    return last.outputs[0].token_ids


def answer_with(hurt: Hurt, family: str, folder: Path) -> list[int]:
    config = ClusterConfig(
        model=ModelConfig(path=str(model_folder(family))),
        cache=CacheConfig(num_blocks=64),
        engine=EngineConfig(chunk_tokens=512),
    )
    folder.mkdir()
    return NodeThreads(folder, never_local(config), damaged(hurt)).run(answer)


@pytest.mark.parametrize("family", FAMILIES)
def test_damaged_blocks_change_the_answer(family: str, tmp_path: Path) -> None:
    whole = answer_with(nothing, family, tmp_path / "whole")
    assert answer_with(nothing, family, tmp_path / "again") == whole
    for name, hurt in {**HURTS, "another": BlockOfAnother()}.items():
        assert answer_with(hurt, family, tmp_path / name) != whole, name
