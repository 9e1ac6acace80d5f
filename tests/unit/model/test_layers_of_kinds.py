"""Models whose layers attend in several ways: the tokens of transformers, and what is refused."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.model.config.decoder_config import read_decoder_config
from baton.model.runner import rank_plan
from baton.model.runner.rank_plan import lacking_on_gpus, plan_rank
from baton.protocol.errors import ConfigError
from baton.runtime.fields import with_values
from tests.support.compute import Text, compute_config, greedy, loaded, logits
from tests.support.foreign_checkpoints import changed, foreign_folder, whole
from tests.support.oracle import Oracle, count_ties, prompt

KINDS = ("llama4_text", "gemma4_text", "gemma4_unified_text")


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_that_transformers_generates(kind):
    folder = foreign_folder(kind)
    expected = Oracle(folder).greedy(prompt(70), 40)
    with loaded(compute_config(folder)) as runner:
        text = Text("a", prompt(70), range(8))
        logits(runner, text.chunk(0, 41))
        logits(runner, text.chunk(41, 69))
        tokens = greedy(runner, text, 40)
    assert count_ties(expected, tokens) == 0


@pytest.mark.parametrize(
    ("fields", "block_size", "text"),
    [
        ({"global_head_dim": 1024}, 16, "heads of 1024 have no CUDA kernel"),
        ({"global_head_dim": 512}, 4, "cache.block_size: pieces of 2 tokens"),
        (
            {"num_attention_heads": 132, "num_global_key_value_heads": 2},
            16,
            "66 query heads share a KV head",
        ),
    ],
)
def test_gpus_refuse_wide_heads_that_their_kernels_lack(fields, block_size, text):
    folder = foreign_folder("gemma4_text", **fields)
    config = compute_config(folder, block_size=block_size)
    reason = lacking_on_gpus(config, read_decoder_config(folder), 1, torch.bfloat16)
    assert reason.startswith(text)


@pytest.mark.parametrize(("num_tokens", "most"), [(33, 512), (64, 341), (512, 60)])
def test_a_gpu_takes_as_many_sequences_as_have_tables_of_their_chunks(
    num_tokens, most, monkeypatch
):
    """Tokens of a sequence that lie in three chunks of 32 are three sequences to the kernels."""
    monkeypatch.setattr(rank_plan, "_device", lambda *_: torch.device("cuda", 0))
    config = with_values(
        compute_config(foreign_folder("llama4_text"), num_blocks=8),
        {"engine.max_num_batched_tokens": num_tokens, "engine.max_num_seqs": most},
    )
    assert plan_rank(config, 1).max_num_seqs == most
    config = with_values(config, {"engine.max_num_seqs": most + 1})
    with pytest.raises(ConfigError, match=r"engine\.max_num_seqs"):
        plan_rank(config, 1)


def test_chunks_must_begin_with_a_block():
    config = with_values(
        compute_config(foreign_folder("llama4_text")), {"cache.block_size": 64}
    )
    with pytest.raises(
        ConfigError, match="64 must divide attention_chunk_size, which is 32"
    ):
        plan_rank(config, 1)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"cache.block_size": 3}, r"cache\.block_size"),
        ({"engine.kv_cache_dtype": "fp8"}, r"engine\.kv_cache_dtype"),
        (
            {"engine.tensor_parallel_size": 4},
            r"engine\.tensor_parallel_size",
        ),
    ],
)
def test_what_heads_of_two_sizes_do_not_allow_is_refused_at_start(settings, text):
    config = with_values(compute_config(foreign_folder("gemma4_text")), settings)
    with pytest.raises(ConfigError, match=text):
        plan_rank(config, config.engine.tensor_parallel_size)


def test_layers_have_as_much_of_a_block_as_they_store():
    folder = foreign_folder("gemma4_text", num_kv_shared_layers=0)
    config = read_decoder_config(folder)
    assert [config.heads_of(layer) for layer in (0, 2)] == [(4, 16), (2, 32)]
    assert config.num_kv_layers == 4 + 3
    shared = read_decoder_config(foreign_folder("gemma4_text"))
    assert [shared.stored_number(layer) for layer in range(7)] == [0, 1, 0, 2, 3, 0, 0]
    assert shared.num_kv_layers == 4 + 1


def test_the_heads_of_layers_are_read_from_both_kinds_of_fields(tmp_path):
    folder = changed(
        tmp_path,
        "gemma4_text",
        ("per_layer_config",),
        global_head_dim=32,
        num_global_key_value_heads=2,
    )
    assert read_decoder_config(folder) == read_decoder_config(
        foreign_folder("gemma4_text")
    )


def test_keys_that_shared_layers_have_in_files_are_not_read(tmp_path):
    folder = changed(tmp_path, "gemma4_text")
    file = folder / "model.safetensors"
    name = "model.layers.6.self_attn.k_proj.weight"
    save_file({**load_file(file), name: torch.zeros(4, 8)}, file)
    assert torch.equal(whole(folder), whole(foreign_folder("gemma4_text")))


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (
            {"per_layer_config": {"1": {"head_dim": 32}}},
            "per_layer_config",
        ),
        (
            {"per_layer_config": {"2": {"head_dim": 8}, "5": {}, "6": {}}},
            "head_dim",
        ),
        ({"num_kv_shared_layers": 5}, "num_kv_shared_layers"),
        ({"vocab_size_per_layer_input": 100}, "less than vocab_size"),
        ({"enable_moe_block": True}, "num_experts, moe_intermediate_size"),
        (
            {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2},
            "moe_intermediate_size",
        ),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
        ({"num_key_value_heads": 1}, "must divide"),
    ],
)
def test_heads_that_are_not_computed_are_refused(fields, text, tmp_path):
    with pytest.raises(ConfigError, match=text):
        read_decoder_config(changed(tmp_path, "gemma4_text", **fields))


def test_experts_that_a_tool_has_written_apart_compute_the_same(tmp_path):
    folder = changed(tmp_path, "llama4_text")
    file = folder / "model.safetensors"
    tensors = {}
    for name, tensor in load_file(file).items():
        block, is_stacked, role = name.partition("experts.")
        if not is_stacked:
            tensors[name] = tensor
            continue
        for number, expert in enumerate(tensor):
            parts = {"down_proj": expert}
            if role == "gate_up_proj":
                parts = dict(
                    zip(("gate_proj", "up_proj"), expert.chunk(2, dim=1), strict=True)
                )
            for part, weight in parts.items():
                tensors[f"{block}experts.{number}.{part}.weight"] = (
                    weight.T.contiguous()
                )
    save_file(tensors, file)
    assert torch.equal(whole(folder), whole(foreign_folder("llama4_text")))


def test_the_first_folders_have_a_number_instead_of_a_switch(tmp_path):
    expected = read_decoder_config(foreign_folder("llama4_text"))
    assert (
        read_decoder_config(changed(tmp_path, "llama4_text", attn_temperature_tuning=4))
        == expected
    )


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (
            {"layer_types": ["sliding_attention"] * 5},
            "chunked_attention",
        ),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"no_rope_layers": [1, 0]}, "no_rope_layers"),
        ({"attention_chunk_size": None}, "needs an attention_chunk_size"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok"),
        ({"intermediate_size_mlp": 0}, "intermediate_size_mlp must be"),
    ],
)
def test_chunks_that_are_not_computed_are_refused(fields, text, tmp_path):
    with pytest.raises(ConfigError, match=text):
        read_decoder_config(changed(tmp_path, "llama4_text", **fields))
