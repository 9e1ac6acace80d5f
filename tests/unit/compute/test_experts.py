"""Mixtures of experts in baton's own decoder: right, and with bits that no batch changes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from baton.engine.compute.decoder import Decoder
from baton.engine.compute.rank import plan_rank
from baton.engine.compute.row_rule import MIN_ROWS, num_threads
from baton.engine.compute.tensor_parallel import SharedMemoryRanks
from baton.protocol.errors import ConfigError
from tests.support.compute import (
    Text,
    chunked_logits,
    compute_config,
    loaded,
    logits,
    needs_rules,
)
from tests.support.foreign_checkpoints import changed, foreign_folder
from tests.support.oracle import prompt
from tests.support.thread_ranks import on_all, thread_ranks

LENGTH = 150
KINDS = ("qwen3_moe", "mixtral", "qwen2_moe")
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("qwen3_moe", {}),
    "mixtral": ("mixtral", {}),
    "qwen2_moe": ("qwen2_moe", {}),
    "a shared expert without biases": ("qwen2_moe", {"qkv_bias": False, "mlp_only_layers": (0,)}),
    "weights that sum to one": ("qwen3_moe", {"norm_topk_prob": True}),
    "a dense layer": ("qwen3_moe", {"mlp_only_layers": (1,)}),
    "every second layer": ("qwen3_moe", {"decoder_sparse_step": 2, "tie_word_embeddings": True}),
    "more experts": ("qwen3_moe", {"num_experts": 40, "num_experts_per_tok": 7}),
    "all experts": ("mixtral", {"num_local_experts": 3, "num_experts_per_tok": 3}),
    "biases and a window": (
        "qwen3_moe", {"attention_bias": True, "use_sliding_window": True, "sliding_window": 24},
    ),
    "a window": ("mixtral", {"sliding_window": 24}),
    "stacked qwen3_moe": ("qwen3_moe", {"save_original_format": False}),
    "stacked mixtral": ("mixtral", {"save_original_format": False}),
    "stacked qwen2_moe": ("qwen2_moe", {"save_original_format": False}),
}  # fmt: skip


def reference(folder: Path, dtype: torch.dtype = torch.float32) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    with torch.inference_mode():
        out: Tensor = model(torch.tensor([prompt(LENGTH)])).logits[0].float()
    return out


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    worst = (ours - theirs).abs().max() / theirs.abs().max()
    assert worst < 2e-5, f"relative error {worst:.2e}"


def whole(folder: Path, dtype: str = "auto") -> Tensor:
    with loaded(compute_config(folder, dtype)) as runner:
        assert isinstance(runner.decoder, Decoder)
        return logits(runner, Text("a", prompt(LENGTH), range(3, 20)).chunk(0, LENGTH))[0]


@pytest.mark.parametrize("variant", VARIANTS)
def test_fp32_logits_equal_those_of_transformers(variant: str) -> None:
    kind, fields = VARIANTS[variant]
    folder = foreign_folder(kind, **fields)
    assert_close(whole(folder), reference(folder))


@pytest.mark.parametrize("kind", KINDS)
def test_bf16_logits_are_as_near_to_fp32_as_those_of_transformers(kind: str) -> None:
    exact = reference(foreign_folder(kind))
    allowed = 1.5 * (reference(foreign_folder(kind), torch.bfloat16) - exact).abs().mean()
    assert (whole(foreign_folder(kind), "bfloat16") - exact).abs().mean() < allowed


def test_fields_that_config_leaves_out_have_transformers_values(tmp_path: Path) -> None:
    absent = (
        "rms_norm_eps", "rope_parameters", "num_experts_per_tok", "num_local_experts", "head_dim",
        "sliding_window", "hidden_act",
    )  # fmt: skip
    folder = changed(tmp_path, "mixtral", absent)
    assert_close(whole(folder), reference(folder))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_of_any_number_have_the_bits_of_a_row_alone(kind: str, dtype: str) -> None:
    """Vector code treats the last rows of many numbers in its own way."""
    with loaded(compute_config(foreign_folder(kind), dtype)) as runner, torch.inference_mode():
        needs_rules(runner)
        assert isinstance(runner.decoder, Decoder)
        mlp = runner.decoder.layers[0].mlp
        rows = torch.randn(59, 64, generator=torch.Generator().manual_seed(2))
        rows = rows.to(runner.cache.pool.dtype)
        alone = torch.cat([mlp(row[None], runner.backend) for row in rows])
        for count in range(2, 60):
            assert torch.equal(mlp(rows[:count], runner.backend), alone[:count])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_number_of_threads_leaves_no_trace(dtype: str) -> None:
    """Wide enough that threads share the experts of a decode step, too."""
    folder = foreign_folder("mixtral", hidden_size=256, intermediate_size=512)
    config = compute_config(folder, dtype)
    one = Text("one", prompt(2 * MIN_ROWS + 100), range(30))
    with loaded(config) as runner:
        needs_rules(runner)
        expected = chunked_logits(runner, one, [len(one.tokens)])
    with num_threads(2), loaded(config) as runner:
        found = chunked_logits(runner, one, [2 * MIN_ROWS + 3, 1, 9, 87])
    assert torch.equal(found, expected)


@pytest.mark.parametrize("variant", ["qwen3_moe", "stacked mixtral", "a dense layer", "qwen2_moe"])
def test_ranks_together_compute_what_one_computes(variant: str) -> None:
    kind, fields = VARIANTS[variant]
    folder = foreign_folder(kind, **fields)
    config, text = compute_config(folder), Text("a", prompt(100), range(10))

    def compute(rank: SharedMemoryRanks) -> Tensor:
        with loaded(config, rank) as runner:
            return logits(runner, text.chunk(0, 100))[0]

    with loaded(config) as runner:
        alone = logits(runner, text.chunk(0, 100))[0]
    with thread_ranks(2) as members:
        shares = on_all(members, compute)
    assert_close(shares[0], alone)
    assert torch.equal(*shares)


def test_ranks_that_cannot_share_an_expert_are_refused() -> None:
    folder = foreign_folder("qwen3_moe", moe_intermediate_size=33)
    with pytest.raises(ConfigError, match="2 does not divide the width of an expert, 33"):
        plan_rank(compute_config(folder), 2)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"num_experts": 9}, "num_experts and num_local_experts differ"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok must be at most the 8 experts, not 9"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step"),
        ({"num_local_experts": 9}, r"mlp\.gate\.weight has the shape \[8, 64\]"),
        ({"mlp_only_layers": [0, 1, 2]}, "has no tensor"),
        ({"use_sliding_window": True, "sliding_window": 0}, "sliding_window must be at least 1"),
        ({"moe_intermediate_size": 64}, r"implies \[64, 64\]"),
        ({"mlp_only_layers": [2]}, r"has no tensor model\.layers\.2\.mlp\.gate_proj"),
    ],
)
def test_experts_that_do_not_fit_are_refused(
    fields: dict[str, object], reason: str, tmp_path: Path
) -> None:
    folder = changed(tmp_path, "qwen3_moe", **fields)
    with pytest.raises(ConfigError, match=reason), loaded(compute_config(folder)):
        pass


@pytest.mark.parametrize("fields", [{}, {"max_window_layers": 1}])
def test_windows_in_turns_equal_those_of_transformers(
    fields: dict[str, object], tmp_path: Path
) -> None:
    folder = changed(
        tmp_path, "qwen2_moe", ("layer_types",), use_sliding_window=True, sliding_window=24,
        **fields,
    )  # fmt: skip
    assert_close(whole(folder), reference(folder))
