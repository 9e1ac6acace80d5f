"""Every family computes what transformers computes, whole or split over ranks."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from baton.engine.compute.rank import plan_rank
from baton.engine.compute.runner import Runner
from baton.engine.compute.tensor_parallel import SharedMemoryRanks
from baton.protocol.errors import ConfigError
from tests.support.checkpoints import FAMILIES, Shape, model_folder
from tests.support.compute import (
    Text,
    chunked_logits,
    compute_config,
    loaded,
    logits,
    random_tokens,
)
from tests.support.thread_ranks import on_all, thread_ranks

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 10000.0,
}
# As in the folders of Qwen 3 and DeepSeek; the second writes all that may be left out.
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
WHOLE_YARN = YARN | {
    "beta_fast": 16, "beta_slow": 2, "mscale": 0.7, "mscale_all_dim": 1.1, "truncate": False,
}  # fmt: skip
TURNS = {"layer_types": ["sliding_attention", "full_attention"]}
MINISTRAL = {"architectures": ["MinistralForCausalLM"], "model_type": "ministral"}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}


def reference(folder: Path, tokens: list[int], dtype: torch.dtype = torch.float32) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    with torch.inference_mode():
        out: Tensor = model(torch.tensor([tokens])).logits[0].float()
    return out


def whole(runner: Runner, tokens: list[int]) -> Tensor:
    return logits(runner, Text("r", tokens, range(3, 40)).chunk(0, len(tokens)))[0]


def assert_close(ours: Tensor, theirs: Tensor, tolerance: float) -> None:
    worst = (ours - theirs).abs().max() / theirs.abs().max()
    assert worst < tolerance, f"relative error {worst:.2e}"


@pytest.mark.parametrize("family", FAMILIES)
def test_fp32_logits_equal_those_of_transformers(family: str) -> None:
    folder, tokens = model_folder(family), random_tokens(200)
    with loaded(compute_config(folder)) as runner:
        assert_close(whole(runner, tokens), reference(folder, tokens), 2e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_logits_are_near_those_of_transformers_in_fp32(family: str) -> None:
    """As near as transformers' own bf16 logits are, within a factor."""
    folder, tokens = model_folder(family, num_layers=2), random_tokens(150)
    exact = reference(folder, tokens)
    allowed = 1.5 * (reference(folder, tokens, torch.bfloat16) - exact).abs().mean()
    with loaded(compute_config(folder, dtype="bfloat16")) as runner:
        assert (whole(runner, tokens) - exact).abs().mean() < allowed


VARIANTS: dict[str, tuple[str, Shape]] = {
    "llama3 rope": ("llama", {"extra": json.dumps({"rope_parameters": LLAMA3})}),
    "dynamic rope": ("llama", {"extra": json.dumps({"rope_parameters": DYNAMIC})}),
    "linear rope": ("llama", {"extra": json.dumps({"rope_scaling": LINEAR})}),
    "yarn": ("qwen3", {"extra": json.dumps({"rope_scaling": YARN})}),
    "yarn with all fields": ("qwen3", {"extra": json.dumps({"rope_scaling": WHOLE_YARN})}),
    "yarn with a factor": (
        "llama",
        {"extra": json.dumps({"rope_parameters": YARN | {"attention_factor": 0.9}})},
    ),
    "qwen3 with biases": ("qwen3", {"attention_bias": True}),
    "tied embeddings": ("qwen2", {"tie": True}),
    "a sliding window": ("mistral", {"sliding_window": 50}),
    "a window in the upper layer": (
        "qwen2",
        {"sliding_window": 50, "extra": json.dumps({"max_window_layers": 1})},
    ),
    "a window in one layer": ("qwen3", {"sliding_window": 50, "extra": json.dumps(TURNS)}),
    "mistral with kinds of layers": (
        "mistral",
        {"sliding_window": 50, "extra": json.dumps(TURNS)},
    ),
    "ministral": (
        "mistral",
        {"sliding_window": 50, "extra": json.dumps(MINISTRAL | TURNS)},
    ),
    "ministral with windows": ("mistral", {"sliding_window": 50, "extra": json.dumps(MINISTRAL)}),
    "yarn beyond a window": (
        "qwen3",
        {
            "sliding_window": 64,
            "max_position_embeddings": 64,
            "extra": json.dumps({"max_window_layers": 1, "rope_scaling": YARN}),
        },
    ),
    "a head size of its own": ("qwen3", {"head_dim": 64}),
    "no grouped queries": ("llama", {"num_kv_heads": 4}),
    "one KV head": ("llama", {"num_kv_heads": 1}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_equal_transformers_too(variant: str) -> None:
    family, shape = VARIANTS[variant]
    folder, tokens = model_folder(family, num_layers=2, **shape), random_tokens(160)
    with loaded(compute_config(folder)) as runner:
        assert_close(whole(runner, tokens), reference(folder, tokens), 2e-5)


@pytest.mark.release
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_prompts_beyond_the_window_of_qwen_equal_transformers_too(family: str) -> None:
    """Where config.json says nothing, the window has 4,096 tokens."""
    extra = json.dumps({"max_window_layers": 1})
    folder = model_folder(family, num_layers=2, sliding_window=4096, extra=extra)
    text = Text("r", random_tokens(4_100), range(260))
    with loaded(compute_config(folder, num_blocks=260)) as runner:
        assert_close(chunked_logits(runner, text, [512]), reference(folder, text.tokens), 2e-5)


@pytest.mark.parametrize(
    ("family", "size", "shape"),
    [
        ("qwen3", 2, {}),
        ("llama", 2, {"attention_bias": True, "mlp_bias": True, "tie": True}),
        ("qwen2", 4, {"vocab_size": 1023}),
    ],
)
def test_ranks_together_compute_what_one_computes(family: str, size: int, shape: Shape) -> None:
    """The last case has fewer KV heads than ranks and a vocabulary that they cannot share."""
    folder, tokens = model_folder(family, num_layers=2, **shape), random_tokens(100)
    config = compute_config(folder)
    with loaded(config) as runner:
        alone = whole(runner, tokens)

    def compute(rank: SharedMemoryRanks) -> Tensor:
        with loaded(config, rank) as runner:
            return whole(runner, tokens)

    with thread_ranks(size) as members:
        shares = on_all(members, compute)
    assert_close(shares[0], alone, 2e-5)
    assert all(torch.equal(share, shares[0]) for share in shares)


def test_ranks_that_cannot_share_the_heads_are_refused() -> None:
    with pytest.raises(ConfigError, match="3 does not divide the heads"):
        plan_rank(compute_config(model_folder("llama")), 3)
