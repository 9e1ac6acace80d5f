"""Models whose layers keep a state: the same tokens however a sequence is computed."""

import pytest
import torch
from torch import Tensor

from baton.model.config.decoder_config import read_decoder_config
from baton.model.runner.compute_digest import is_batch_invariant
from baton.model.runner.kv_cache import kv_layout
from baton.model.runner.rank_plan import plan_rank
from baton.model.tensor_parallel import SharedMemoryRanks
from baton.protocol.config import CacheConfig
from baton.protocol.errors import ConfigError, InvariantBroken
from baton.runtime.fields import with_values
from tests.support.adapters import merged, write_adapter
from tests.support.compute import (
    Text,
    chunked_logits,
    compute_config,
    greedy,
    loaded,
    logits,
    needs_rules,
    state_of,
)
from tests.support.foreign_checkpoints import (
    LENGTH,
    assert_close,
    changed,
    foreign_folder,
    reference,
    whole,
)
from tests.support.oracle import Oracle, count_ties, prompt
from tests.support.thread_ranks import on_all, thread_ranks

STATES = (
    "qwen3_next",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "granitemoehybrid",
    "lfm2",
    "nemotron_h",
    "lfm2_moe",
    "kimi_linear",
)
CLOSE = 2e-4  # transformers' own error is about as large


@pytest.mark.parametrize("kind", STATES)
def test_tokens_are_those_that_transformers_generates(kind):
    folder = foreign_folder(kind)
    expected = Oracle(folder).greedy(prompt(70), 40)
    with loaded(compute_config(folder)) as runner:
        text = Text("a", prompt(70), range(8), state=state_of(runner))
        logits(runner, text.chunk(0, 64))
        logits(runner, text.chunk(64, 69))
        tokens = greedy(runner, text, 40)
    assert count_ties(expected, tokens) == 0


@pytest.mark.parametrize("kind", STATES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_has_the_same_bits_whole_in_chunks_and_in_a_crowd(kind, dtype):
    with loaded(compute_config(foreign_folder(kind), dtype, num_blocks=800)) as runner:
        needs_rules(runner)
        assert is_batch_invariant(runner)
        runner.cache.pool.fill_(float("nan"))
        text = Text("a", prompt(90), range(10), state=state_of(runner))
        crowd = [
            Text(
                f"b{n}",
                prompt(30, n),
                range(20 + 2 * n, 22 + 2 * n),
                state=state_of(runner, n),
            )
            for n in range(1, 9)
        ]
        (expected,) = logits(runner, text.chunk(0, 90))
        beside = [one.chunk(0, 29) for one in crowd]
        parts = [
            logits(runner, text.chunk(0, 33))[0],
            logits(runner, *beside, text.chunk(33, 89))[-1],
            logits(runner, text.chunk(89, 90), *(one.chunk(29, 30) for one in crowd))[
                0
            ],
        ]
        assert torch.equal(torch.cat(parts), expected)
        again = logits(runner, text.chunk(89, 90, num_held=1))[0]
        assert torch.equal(again, expected[89:])


@pytest.mark.parametrize("kernels", ["compiled", "torch"])
@pytest.mark.parametrize("kind", STATES)
def test_the_only_token_of_a_prompt_can_be_computed_again(kind, kernels):
    config = with_values(
        compute_config(foreign_folder(kind)), {"engine.kernels": kernels}
    )
    with loaded(config) as runner:
        runner.cache.pool.fill_(float("nan"))
        text = Text("a", prompt(2), range(3, 20), state=state_of(runner))
        expected = logits(runner, text.chunk(0, 1))[0]
        again = logits(runner, text.chunk(0, 1, num_held=1))[0]
        assert_close(again, expected, CLOSE)
        after = logits(runner, text.chunk(1, 2))[0]
        other = Text("b", prompt(2), range(20, 37), state=state_of(runner, 1))
        assert_close(after, logits(runner, other.chunk(0, 2))[0][1:], CLOSE)


@pytest.mark.parametrize("kind", STATES)
def test_bf16_logits_are_as_near_to_fp32_as_those_of_transformers(kind):
    """Without a choice of experts, because near ties differ in bf16."""
    folder = foreign_folder(kind)
    if kind == "kimi_linear":
        folder = foreign_folder(kind, mlp_layer_types=("dense",) * 4)
    if "moe" in kind.split("_") or kind == "qwen3_next":
        folder = foreign_folder(kind, num_experts_per_tok=8)
    exact = reference(folder)
    allowed = 1.5 * (reference(folder, dtype=torch.bfloat16) - exact).abs().mean()
    assert (whole(folder, "bfloat16") - exact).abs().mean() < allowed


@pytest.mark.parametrize(
    "kind", ["qwen3_next", "qwen3_5_text", "granitemoehybrid", "lfm2", "nemotron_h"]
)
def test_plain_torch_computes_the_same(kind):
    config = with_values(
        compute_config(foreign_folder(kind)), {"engine.kernels": "torch"}
    )
    with loaded(config) as runner:
        assert runner.backend.name == "torch"
        text = Text("a", prompt(LENGTH), range(3, 20), state=state_of(runner))
        found = chunked_logits(runner, text, [64, 1, 50])
        again = logits(runner, text.chunk(LENGTH - 1, LENGTH, num_held=1))[0]
    assert_close(found, reference(foreign_folder(kind)), CLOSE)
    assert_close(again, found[-1:])


@pytest.mark.parametrize("kind", [kind for kind in STATES if kind != "kimi_linear"])
def test_ranks_together_compute_what_one_computes(kind):
    config = compute_config(foreign_folder(kind))

    def compute(rank: SharedMemoryRanks | None) -> Tensor:
        with loaded(config, rank) as runner:
            text = Text("a", prompt(100), range(10), state=state_of(runner))
            return chunked_logits(runner, text, [60])

    alone = compute(None)
    with thread_ranks(2) as members:
        shares = on_all(members, compute)
    assert_close(shares[0], alone, CLOSE)
    assert torch.equal(shares[0], shares[1])


def test_an_adapter_changes_queries_that_bring_gates():
    folder = foreign_folder("qwen3_5_text")
    adapter = write_adapter(folder)
    with loaded(compute_config(folder, lora_modules=(f"mine={adapter}",))) as runner:
        text = Text(
            "a", prompt(LENGTH), range(3, 20), lora="mine", state=state_of(runner)
        )
        found = logits(runner, text.chunk(0, LENGTH))[0]
    assert_close(found, reference(merged(folder, adapter, 2.0)), CLOSE)


def test_ranks_have_their_parts_of_the_same_blocks():
    config = read_decoder_config(foreign_folder("qwen3_next"))
    cache = CacheConfig(num_blocks=8, block_size=16)
    one, two = (kv_layout(config, cache, size, torch.float32) for size in (1, 2))
    assert one.block_bytes == 2 * two.block_bytes
    assert (one.fingerprint, one.state_blocks) == (two.fingerprint, two.state_blocks)
    assert one.groups == two.groups


def test_nodes_with_other_states_do_not_exchange_blocks(tmp_path):
    cache = CacheConfig(num_blocks=8, block_size=16)
    first = foreign_folder("qwen3_5_text")
    other = changed(tmp_path, first, linear_conv_kernel_dim=3)
    prints = {
        kv_layout(read_decoder_config(folder), cache, 1, torch.float32).fingerprint
        for folder in (first, other)
    }
    assert len(prints) == 2


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"engine.kv_cache_dtype": "fp8"}, "keep a state"),
        ({"engine.tensor_parallel_size": 4}, r"engine\.tensor_parallel_size"),
        (
            {"cache.num_blocks": 10},
            "cache.num_blocks",
        ),
    ],
)
def test_what_states_do_not_allow_is_refused_at_start(settings, text):
    config = with_values(compute_config(foreign_folder("qwen3_next")), settings)
    with pytest.raises(ConfigError, match=text):
        plan_rank(config, config.engine.tensor_parallel_size)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"layer_types": ["full_attention"] * 4}, "layer_types"),
        ({"layer_types": ["linear_attention"] * 4}, "layer_types"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "each of 4 layers"),
        ({"layer_types": ["mamba", *["full_attention"] * 3]}, "layer_types"),
        ({"linear_num_key_heads": 3}, "must divide"),
        ({"attn_output_gate": False}, "attn_output_gate"),
    ],
)
def test_layers_that_are_not_computed_are_refused(fields, text, tmp_path):
    with pytest.raises(ConfigError, match=text):
        read_decoder_config(changed(tmp_path, "qwen3_5_text", **fields))


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"mamba_n_heads": 7}, "mamba_n_heads times mamba_d_head"),
        ({"mamba_n_groups": 3}, "must divide mamba_n_heads"),
        ({"mamba_proj_bias": True}, "mamba_proj_bias"),
        ({"time_step_limit": [0.0, {"__float__": "NaN"}]}, "time_step_limit"),
        ({"shared_intermediate_size": 0}, "shared_intermediate_size"),
    ],
)
def test_a_mamba_that_is_not_computed_is_refused(fields, text, tmp_path):
    with pytest.raises(ConfigError, match=text):
        read_decoder_config(changed(tmp_path, "granitemoehybrid", **fields))


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (
            {"layers_block_type": ["linear_attention", "moe", "mlp"]},
            "layer 2 is an MLP",
        ),
        (
            {"layers_block_type": ["mlp", "full_attention"]},
            "layer 0 is an MLP that follows",
        ),
        ({"layers_block_type": ["linear_attention", "moe"]}, "layer_types"),
        (
            {"layers_block_type": ["linear_attention", "full_attention", "conv"]},
            "layer_types",
        ),
        ({"mlp_hidden_act": "silu"}, "mlp_hidden_act 'silu'"),
        ({"mamba_hidden_act": "gelu"}, "mamba_hidden_act"),
        ({"n_shared_experts": 2}, "n_shared_experts must be 1"),
        ({"use_bias": True}, "use_bias"),
    ],
)
def test_blocks_that_are_not_computed_are_refused(fields, text, tmp_path):
    with pytest.raises(ConfigError, match=text):
        read_decoder_config(changed(tmp_path, "nemotron_h", **fields))


def test_nemotron_is_read_by_the_pattern_of_its_first_folders(tmp_path):
    folder = changed(
        tmp_path,
        "nemotron_h",
        ("layers_block_type",),
        hybrid_override_pattern="ME*M-",
        num_hidden_layers=5,
    )
    config = read_decoder_config(folder)
    assert config == read_decoder_config(foreign_folder("nemotron_h"))
    assert config.blocks == ((0, 1), (2, None), (3, 4))


def test_experts_of_lfm2_without_biases_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="use_expert_bias is false"):
        read_decoder_config(changed(tmp_path, "lfm2_moe", use_expert_bias=False))


def test_kimi_linear_is_read_by_the_names_of_its_first_folders(tmp_path):
    of_layers = {
        "full_attn_layers": [2],
        "kda_layers": [1, 3, 4],
        "head_dim": 24,
        "num_heads": 4,
        "short_conv_kernel_size": 4,
    }
    absent = ("layer_types", "mlp_layer_types", "linear_head_dim", "linear_num_heads")
    folder = changed(
        tmp_path,
        "kimi_linear",
        absent,
        linear_attn_config=of_layers,
        first_k_dense_replace=1,
        moe_router_activation_func="sigmoid",
    )
    assert read_decoder_config(folder) == read_decoder_config(
        foreign_folder("kimi_linear")
    )
    of_layers["kda_layers"] = [1, 3]
    with pytest.raises(ConfigError, match="linear_attn_config"):
        read_decoder_config(
            changed(tmp_path / "2", folder, linear_attn_config=of_layers)
        )


def test_lfm2_is_read_by_the_names_of_its_first_folders(tmp_path):
    folder = changed(
        tmp_path,
        "lfm2",
        ("layer_types", "intermediate_size", "tie_word_embeddings"),
        full_attn_idxs=[1],
        block_ff_dim=128,
        tie_embedding=True,
    )
    assert read_decoder_config(folder) == read_decoder_config(foreign_folder("lfm2"))


@pytest.mark.parametrize(
    ("kind", "fields"),
    [("granitemoehybrid", {"mamba_n_groups": 1}), ("kimi_linear", {})],
)
def test_ranks_cannot_share_one_group_of_keys(kind, fields):
    config = compute_config(foreign_folder(kind, **fields))
    with pytest.raises(ConfigError, match="states of 1 groups"):
        plan_rank(config, 2)


def test_a_step_without_the_blocks_of_a_state_is_a_bug():
    text = Text("a", prompt(9), range(1))
    config = compute_config(foreign_folder("qwen3_5_text"))
    with (
        loaded(config) as runner,
        pytest.raises(InvariantBroken, match="blocks hold its state"),
    ):
        runner.pack((text.chunk(0, 9),))
