"""What a head drafts is what plain torch drafts, however its rows came to be computed."""

import math
from pathlib import Path

import msgspec
import pytest

from baton.model.runner.rank_plan import plan_rank
from baton.protocol.config import EngineConfig
from baton.protocol.errors import ConfigError
from baton.protocol.sampling import Sampling
from tests.support.checkpoints import model_folder
from tests.support.compute import compute_config, loaded
from tests.support.draft_heads import (
    EagleReference,
    NextnReference,
    eagle_folder,
    eagle_model,
    knowing_folder,
    nextn_folder,
)
from tests.support.foreign_checkpoints import foreign_folder
from tests.support.oracle import prompt
from tests.support.served_drafts import LIMITS, NUM_DRAFTS, Served, drafting, sampling

STATES = ("qwen3_5_text", "qwen3_next")
SPARSE = ("deepseek_v32", "glm_moe_dsa")
KINDS = ("glm4_moe", "deepseek_v3", "glm4_moe_lite", *STATES, *SPARSE)


def without_head(folder: Path, text: list[int], how: Sampling) -> list[int]:
    with loaded(compute_config(folder)) as runner:
        limits = msgspec.structs.replace(LIMITS, engine=EngineConfig())
        served = Served(runner, limits)
        served.add("r", text, how)
        served.run()
    return served.texts["r"]


@pytest.mark.parametrize("kind", [*KINDS, "eagle3", "eagle3 of some tokens"])
def test_drafts_are_those_of_plain_torch_whole_chunked_and_cached(kind):
    """The third prompt begins with blocks of the first one, and is longer than a chunk."""
    reference: NextnReference | EagleReference
    if kind in KINDS:
        reference = NextnReference(kind)
        config = drafting(nextn_folder(kind))
    else:
        every = 3 if kind.endswith("tokens") else 1
        reference = EagleReference(every=every)
        config = drafting(eagle_model(), eagle_folder(every=every))
    with loaded(config) as runner:
        served = Served(runner)
        for name, length in (("whole", 20), ("chunked", 75), ("cached", 90)):
            served.add(name, prompt(length), sampling(12))
            served.run()
    assert served.pool.counts.prefix_hit_tokens > 0
    assert {name for name, _, _ in served.drafts} == {"whole", "chunked", "cached"}
    for name, end, drafts in served.drafts:
        expected = reference.drafts(served.texts[name][:end], NUM_DRAFTS)
        assert list(drafts) == expected[: len(drafts)], (name, end)


@pytest.mark.parametrize(
    ("kind", "temperature", "depth"),
    [
        ("glm4_moe", 0.0, 2),
        ("glm4_moe", 0.8, 1),
        ("deepseek_v3", 0.8, 2),
        ("glm_moe_dsa", 0.8, 1),
        ("qwen3_next", 0.0, 2),
        ("qwen3_5_text", 0.8, 1),
        ("eagle3", 0.8, 1),
    ],
)
def test_tokens_do_not_depend_on_drafts(kind, temperature, depth):
    how = sampling(40, temperature)
    text = prompt(37)
    folder = eagle_model() if kind == "eagle3" else nextn_folder(kind)
    with loaded(
        drafting(folder, eagle_folder() if kind == "eagle3" else None)
    ) as runner:
        served = Served(runner)
        served.add("r", text, how)
        served.add("other", prompt(21, salt=1), how)
        served.run(depth)
    assert served.texts["r"] == without_head(folder, text, how)
    assert served.pool.counts.spec_decode_draft_tokens > 0
    assert served.pool.num_owned == 0


@pytest.mark.parametrize("kind", ["glm4_moe", "deepseek_v32", *STATES])
def test_a_head_that_is_always_right_saves_most_steps(kind):
    with loaded(drafting(knowing_folder(kind))) as runner:
        served = Served(runner)
        served.add("r", prompt(20), sampling(41))
        served.run()
    counts = served.pool.counts
    assert counts.spec_decode_accepted_tokens == counts.spec_decode_draft_tokens
    # The prompt gives a token, and the first step after it one more.
    assert served.num_steps == 2 + math.ceil(39 / (1 + NUM_DRAFTS))


@pytest.mark.parametrize("num_blocks", [128, 13])
def test_blocks_for_drafts_are_taken_while_there_are_enough(num_blocks):
    """With few blocks, texts are preempted, and what they have is a beginning."""
    folder = knowing_folder("glm4_moe")
    with loaded(drafting(folder)) as runner:
        served = Served(runner, num_blocks=num_blocks)
        for number in range(4):
            served.add(f"r{number}", prompt(20 + number, number), sampling(60))
        served.run()
    for number in range(4):
        text = prompt(20 + number, number)
        whole = without_head(folder, text, sampling(60))
        ours = served.texts[f"r{number}"]
        assert ours == whole[: len(ours)]
    lengths = [len(served.texts[f"r{number}"]) for number in range(4)]
    assert (lengths == [80, 81, 82, 83]) == (num_blocks == 128)
    assert max(lengths) >= 80
    assert served.pool.num_owned == 0


def test_a_draft_that_does_not_fit_is_refused(tmp_path):
    several_heads = model_folder("qwen3", num_kv_heads=4)
    fewer_tokens = model_folder("qwen3", vocab_size=900)
    cases = (
        (eagle_model(), tmp_path / "none", "is not a folder"),
        (
            model_folder("qwen3", num_layers=3),
            eagle_folder(),
            "the model has no layers",
        ),
        (several_heads, eagle_folder(), "num_kv_heads must be those of the model"),
        (fewer_tokens, eagle_folder(), "the model has 900 tokens"),
        (nextn_folder("deepseek_v3"), eagle_folder(), "no draft can share the blocks"),
        (eagle_model(), model_folder("llama", num_layers=1), "has no tensor fc.weight"),
    )
    for folder, draft, reason in cases:
        with pytest.raises(
            ConfigError, match=rf"engine\.speculative_model: .*{reason}"
        ):
            plan_rank(drafting(folder, draft), 1)


def test_a_head_is_asked_for_where_there_is_none():
    cases = {
        "qwen3": (
            model_folder("qwen3"),
            r"Qwen3 \(dense\) has no layer that baton can draft with",
        ),
        "deepseek": (foreign_folder("deepseek_v3"), "has no tensors model.layers.3."),
        "index": (foreign_folder("deepseek_v32"), "has no tensors model.layers.3."),
    }
    for folder, reason in cases.values():
        with pytest.raises(
            ConfigError, match=rf"engine\.speculative_method: .*{reason}"
        ):
            plan_rank(drafting(folder), 1)
