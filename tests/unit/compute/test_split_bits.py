"""Decoding over blocks of another pool gives the bits of decoding where the prompt was computed."""

from pathlib import Path

import pytest
import torch

from baton.engine.compute.runner import Runner
from tests.support.checkpoints import FAMILIES, model_folder
from tests.support.compute import Text, compute_config, loaded, logits, needs_rules, random_tokens

PROMPT, OUTPUT, CHUNK = 45, 12, 17


def decoded(runner: Runner, text: Text) -> torch.Tensor:
    """Logits of the positions after the prompt, one step each."""
    steps = [text.chunk(at, at + 1) for at in range(PROMPT, PROMPT + OUTPUT)]
    return torch.cat([logits(runner, step)[0] for step in steps])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_split_and_aggregated_logits_are_the_same_bits(family: str, dtype: str) -> None:
    config = compute_config(Path(model_folder(family)), dtype)
    tokens = random_tokens(PROMPT + OUTPUT)
    here = Text("r", tokens, range(4))
    there = Text("r", tokens, (9, 3, 7, 1))  # other blocks of another pool
    with loaded(config) as prefill, loaded(config) as decode:
        needs_rules(prefill)
        for start in range(0, PROMPT, CHUNK):
            logits(prefill, here.chunk(start, min(start + CHUNK, PROMPT)))
        for source, target in zip(here.blocks[:3], there.blocks[:3], strict=True):
            decode.cache.pool[target] = prefill.cache.pool[source]
        split, aggregated = decoded(decode, there), decoded(prefill, here)
    assert torch.equal(split, aggregated)
