"""Weights of eight bits compute what their numbers stand for, or are refused by name."""

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.kernels.cpu.library import has_bf16_products, has_bf16_tiles
from baton.kernels.proofs import NarrowExperts
from baton.kernels.reference import NarrowWeight, grouped_product
from baton.model.checkpoint.weight_files import check_tensors
from baton.model.config.decoder_config import read_decoder_config
from baton.model.layers.mlp import GroupedProduct
from baton.model.loading import decoder_loading as loading
from baton.model.loading.weights import Checkpoint
from baton.model.runner.compute_digest import compute_path, is_batch_invariant
from baton.model.runner.device_kernels import narrow_codes, narrow_experts
from baton.model.runner.rank_plan import plan_rank
from baton.model.tensor_parallel import SharedMemoryRanks, SingleRank
from baton.protocol.errors import ConfigError
from tests.support.adapters import write_adapter
from tests.support.checkpoints import model_folder, scratch_folder
from tests.support.compute import (
    Text,
    chunked_logits,
    compute_config,
    loaded,
    logits,
    model_fingerprint,
    no_progress,
    random_tokens,
)
from tests.support.foreign_checkpoints import foreign_folder
from tests.support.quantized import (
    AWQ,
    CONFIGS,
    FINE_GRAINED,
    FORMATS,
    GPTQ,
    change_config,
    compressed,
    experts_in_mxfp4,
    quantized,
)
from tests.support.thread_ranks import on_all, thread_ranks

# As ModelOpt writes it, with groups that name no strategy.
MODELOPT: dict[str, object] = {
    "quant_method": "modelopt",
    "quant_algo": "FP8",
    "producer": {"name": "modelopt"},
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "weights": {"dynamic": False, "num_bits": 8, "type": "float"},
            "input_activations": {"dynamic": False, "num_bits": 8, "type": "float"},
            "targets": ["Linear"],
        }
    },
}
LAYERS_KV = [(number, one) for number in range(2) for one in "kv"]
TOKENS = random_tokens(40, vocab=60)
UP = "model.layers.1.mlp.up_proj"
GROUPS = f"{UP}.g_idx"
SCALES = f"{UP}.weight_scale"


def model() -> Path:
    return model_folder("qwen3", num_layers=2)


def add_tensors(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    file = folder / "model.safetensors"
    save_file(load_file(file) | tensors, file, {"format": "pt"})


def computed(folder: Path, ranks: SharedMemoryRanks | None = None) -> torch.Tensor:
    with loaded(compute_config(folder), ranks) as runner:
        return logits(runner, Text("a", TOKENS, range(3)).chunk(0, len(TOKENS)))[0]


@pytest.mark.parametrize("name", [*CONFIGS, *FORMATS])
def test_quantized_weights_have_the_bits_of_their_numbers(name):
    ours, plain = quantized(model(), name)
    check_tensors(ours, plan_rank(compute_config(ours), 1).decoder)  # type: ignore[arg-type]
    expected = computed(plain)
    assert torch.equal(computed(ours), expected)
    assert not torch.equal(expected, computed(model()))
    assert model_fingerprint(ours) != model_fingerprint(plain)
    if name not in CONFIGS and name not in ("gptq", "bnb nf4 nested"):
        return
    with thread_ranks(2) as members:
        found = [
            on_all(members, lambda member, of=of: computed(of, member))
            for of in (ours, plain)
        ]
    assert torch.equal(*found)


@pytest.mark.parametrize("kind", ["qwen3", "glm4_moe"])
def test_a_cpu_that_multiplies_bytes_rounds_inputs_where_the_folder_says_so(kind):
    folder = (
        model() if kind == "qwen3" else foreign_folder(kind, first_k_dense_replace=3)
    )
    ours, plain = quantized(folder, "int8 by channel")
    change_config(plain, dtype="bfloat16")
    change_config(ours, dtype="bfloat16")
    adapter = write_adapter(folder, ("q_proj", "k_proj", "v_proj", "o_proj"))
    text = Text("a", TOKENS, range(3))
    found = []
    paths = []
    for folder in (plain, ours):
        config = compute_config(folder, lora_modules=(f"mine={adapter}",))
        with loaded(config) as runner:
            whole = logits(runner, text.chunk(0, len(TOKENS)))[0]
            if is_batch_invariant(runner):
                assert torch.equal(chunked_logits(runner, text, [1, 7, 16]), whole)
            adapted = Text("b", TOKENS, range(3, 6), "mine")
            found.append((whole, logits(runner, adapted.chunk(0, len(TOKENS)))[0]))
            paths.append(compute_path(runner))
    ours_in_bytes = has_bf16_products() and not has_bf16_tiles()
    assert (paths[0] != paths[1]) == ours_in_bytes
    for expected, got in zip(*found, strict=True):
        assert torch.equal(expected, got) != ours_in_bytes
        assert (expected - got).norm() < 0.1 * expected.norm()
    with thread_ranks(2) as members:
        split = on_all(members, lambda member: computed(ours, member))
    assert (split - found[1][0]).norm() < 0.1 * split.norm()
    weights_only = compressed("int", "channel")
    weights_only["config_groups"]["group_0"]["input_activations"] = None  # type: ignore[index]
    change_config(ours, quantization_config=weights_only)
    assert torch.equal(computed(ours), found[0][0])


@pytest.mark.parametrize(
    "name", ["awq", "awq of qwen3_moe", "awq of glm4_moe", "packed with zeros", "gptq"]
)
def test_four_bits_are_kept_where_the_kernels_read_them(name):
    """Groups that are not neighbours, as of GPTQ with `desc_act`, are widened."""
    name, _, kind = name.partition(" of ")
    folders = quantized(foreign_folder(kind) if kind else model(), name)
    keeps = has_bf16_products() and not has_bf16_tiles() and name != "gptq"
    found = []
    paths = []
    text = Text("a", TOKENS, range(3))
    for folder in folders:
        change_config(folder, dtype="bfloat16")
        with loaded(compute_config(folder)) as runner:
            found.append(logits(runner, text.chunk(0, len(TOKENS)))[0])
            if is_batch_invariant(runner):
                assert torch.equal(chunked_logits(runner, text, [1, 7, 16]), found[-1])
            paths.append(compute_path(runner))
    assert (paths[0] != paths[1]) == keeps
    assert torch.equal(*found) != keeps
    assert (found[0] - found[1]).norm() < 0.05 * found[1].norm()
    with thread_ranks(2) as members:
        split = on_all(members, lambda member: computed(folders[0], member))
    assert (split - found[0]).norm() < 0.05 * split.norm()


NARROW = ("awq", "fp8 by channel", "int8 by channel", "packed by channel", "mxfp4")


@pytest.mark.parametrize("is_read", [True, False])
@pytest.mark.parametrize(
    ("name", "is_moe"), [("awq", True), *((name, False) for name in NARROW)]
)
def test_a_gpu_gets_narrow_weights_of_dense_layers(name, is_moe, is_read, monkeypatch):
    """Those that its kernels do not read are widened."""
    asked: list[torch.Size] = []

    class Widened:
        trial = b"widened"

        def __call__(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.linear(x, weight)

    def widened(
        weight: NarrowWeight, _: torch.device
    ) -> tuple[torch.Tensor, Widened] | None:
        asked.append(weight.codes.shape)
        return (weight.values(), Widened()) if is_read else None

    monkeypatch.setattr(loading, "linears_for", lambda *_: None)  # as on a GPU
    place = loading.RankDevice(
        torch.float32, torch.device("cpu"), grouped=grouped_product, narrow=widened
    )
    found = []
    for folder in quantized(foreign_folder("qwen3_moe") if is_moe else model(), name):
        config = read_decoder_config(folder)
        checkpoint = Checkpoint(folder)
        decoder = loading.load_decoder(
            config, checkpoint, SingleRank(), place, no_progress
        )
        found.append([linear.weight for linear in decoder.linears()])
    assert len(asked) == len(decoder.layers) * (2 if is_moe else 4)
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("is_read", [True, False])
@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_a_gpu_gets_narrow_weights_of_experts(kind, is_read, monkeypatch, tmp_path):
    """Those that its kernels do not read are widened; halves are those of two ranks."""
    if kind == "gpt_oss":
        ours, plain = experts_in_mxfp4(tmp_path)
    else:
        ours, plain = quantized(foreign_folder(kind), "awq")
    asked: list[int] = []

    def widened(
        weights: Sequence[NarrowWeight], _: torch.device, biases: torch.Tensor | None
    ) -> tuple[torch.Tensor, GroupedProduct] | None:
        asked.append(len(weights))
        assert biases is None or kind == "gpt_oss"
        values = torch.stack([weight.values() for weight in weights])
        return (values, grouped_product) if is_read else None

    monkeypatch.setattr(loading, "linears_for", lambda *_: None)  # as on a GPU
    cpu = torch.float32, torch.device("cpu")
    place = loading.RankDevice(*cpu, grouped=grouped_product, narrow_experts=widened)
    wide = loading.RankDevice(*cpu, grouped=grouped_product)
    for rank in (SingleRank(), SecondOfTwo()):
        found = []
        for folder, where in ((ours, place), (plain, wide)):
            config = read_decoder_config(folder)
            decoder = loading.load_decoder(
                config, Checkpoint(folder), rank, where, no_progress
            )
            mlps = [layer.mlp for layer in decoder.layers]
            found.append([part.weight for m in mlps for part in (m.gate_up, m.down)])
        assert all(map(torch.equal, *found))
    assert asked == [config.experts.num_experts] * 4 * len(decoder.layers)


class SecondOfTwo(SingleRank):
    rank = 1
    size = 2


def test_experts_of_a_rank_are_proven_at_their_sizes(tmp_path):
    ours, _ = quantized(foreign_folder("qwen3_moe"), "awq")
    config = read_decoder_config(ours)
    width = config.experts.moe_intermediate_size
    hidden = config.hidden_size
    linears = (width, hidden), (hidden, width // 2)
    experts = NarrowExperts(config.experts.num_experts, linears, "int4", 32)
    assert narrow_experts(config, 2) == experts
    of_gpt_oss, plain = map(read_decoder_config, experts_in_mxfp4(tmp_path))
    found = narrow_experts(of_gpt_oss, 1)
    assert (found.codes, found.group) == ("fp4", 32)
    assert narrow_codes(of_gpt_oss) == ("", 0)
    assert narrow_experts(plain, 1) is None


@pytest.mark.parametrize(
    ("name", "codes"),
    [
        ("awq", ("int4", 32)),
        ("fp8 by channel", ("fp8", 0)),
        ("fp8 by block", ("fp8", 48)),
        ("int8 by channel", ("int8", 0)),
        ("gptq v2 in eight bits", ("int8", 32)),
        ("mxfp4", ("fp4", 32)),
        ("nvfp4", ("", 0)),
        ("bnb nf4", ("", 0)),
    ],
)
def test_a_gpu_is_told_which_weights_it_may_keep_narrow(name, codes):
    ours, plain = quantized(model(), name)
    assert narrow_codes(read_decoder_config(ours)) == codes
    assert narrow_codes(read_decoder_config(plain)) == ("", 0)


def test_eight_bits_without_a_common_zero_are_widened(monkeypatch):
    ours, _ = quantized(model(), "gptq v2 in eight bits")
    monkeypatch.setattr(loading, "linears_for", lambda *_: None)
    place = loading.RankDevice(
        torch.float32, torch.device("cpu"), narrow=lambda *_: pytest.fail("it is asked")
    )
    config = read_decoder_config(ours)
    loading.load_decoder(config, Checkpoint(ours), SingleRank(), place, no_progress)


@pytest.mark.parametrize(
    "kind", ["qwen3_moe", "deepseek_v3", "glm_moe_dsa", "minimax_m2", "phi3"]
)
def test_experts_latent_attention_and_joined_layers_may_be_quantized_too(kind):
    ours, plain = quantized(foreign_folder(kind), "fp8 by block")
    assert torch.equal(computed(ours), computed(plain))


@pytest.mark.parametrize(
    "names",
    [
        "self_attn.{0}_scale",
        "self_attn.{0}_proj.{0}_scale",
        "self_attn.{0}_proj.output_scale",
        "self_attn.attn.{0}_scale",
    ],
)
def test_scales_of_keys_and_values_are_not_needed(names):
    """Blocks keep the type of activations."""
    ours, plain = quantized(model(), "fp8 by tensor")
    scales = {
        f"model.layers.{n}.{names.format(one)}": torch.tensor(0.5)
        for n, one in LAYERS_KV
    }
    add_tensors(ours, scales)
    for config in (MODELOPT, MODELOPT | {"kv_cache_scheme": {"num_bits": 8}}):
        change_config(ours, quantization_config=config)
        check_tensors(ours, plan_rank(compute_config(ours), 1).decoder)  # type: ignore[arg-type]
        assert torch.equal(computed(ours), computed(plain))


MODELOPT_FILE = {
    "producer": {"name": "modelopt", "version": "0.29.0"},
    "quantization": {
        "quant_algo": "FP8",
        "kv_cache_quant_algo": "FP8",
        "exclude_modules": ["lm_head"],
    },
}


@pytest.mark.parametrize(
    ("name", "file", "fields"),
    [
        ("fp8 by tensor", "hf_quant_config.json", MODELOPT_FILE),
        (
            "awq",
            "quant_config.json",
            {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"},
        ),
        (
            "gptq",
            "quantize_config.json",
            {
                "bits": 4,
                "group_size": 32,
                "desc_act": True,
                "sym": False,
                "true_sequential": True,
                "model_file_base_name": "model",
                "damp_percent": 0.01,
                "static_groups": False,
            },
        ),
    ],
)
def test_the_file_of_the_tool_says_how_weights_are_quantized_where_config_json_does_not(
    name, file, fields
):
    ours, plain = quantized(model(), name)
    change_config(ours, quantization_config=None)
    (ours / file).write_text(json.dumps(fields))
    check_tensors(ours, plan_rank(compute_config(ours), 1).decoder)  # type: ignore[arg-type]
    assert torch.equal(computed(ours), computed(plain))
    (ours / file).write_text("[]")
    with pytest.raises(ConfigError, match=f"{file}: ") as error:
        plan_rank(compute_config(ours), 1)
    assert "\n" not in str(error.value)


def test_a_file_of_a_tool_that_quantizes_no_weights_changes_nothing():
    folder = scratch_folder("plain")
    shutil.copytree(model(), folder, dirs_exist_ok=True)
    cache_alone = {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}
    (folder / "hf_quant_config.json").write_text(json.dumps(cache_alone))
    assert torch.equal(computed(folder), computed(model()))


def test_scales_that_are_powers_of_2_may_have_a_type_of_their_own():
    ours, plain = quantized(model(), "mxfp8")
    tensors = load_file(ours / "model.safetensors")
    for name in [name for name in tensors if name.endswith("weight_scale")]:
        tensors[name] = tensors[name].view(torch.float8_e8m0fnu)
    save_file(tensors, ours / "model.safetensors", {"format": "pt"})
    check_tensors(ours, plan_rank(compute_config(ours), 1).decoder)  # type: ignore[arg-type]
    assert torch.equal(computed(ours), computed(plain))


def test_biases_of_zero_beside_packed_weights_add_nothing():
    """AutoGPTQ wrote them for layers that have none."""
    ours, plain = quantized(model(), "gptq")
    bias = torch.zeros(128, dtype=torch.float16)
    add_tensors(ours, {"model.layers.0.self_attn.o_proj.bias": bias})
    check_tensors(ours, plan_rank(compute_config(ours), 1).decoder)  # type: ignore[arg-type]
    assert torch.equal(computed(ours), computed(plain))
    bias[3] = 0.5
    add_tensors(ours, {"model.layers.0.self_attn.o_proj.bias": bias})
    with pytest.raises(ConfigError, match=r"o_proj\.bias"):
        check_tensors(ours, plan_rank(compute_config(ours), 1).decoder)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "names", [{"pack_dtype": "int32"}, {"checkpoint_format": None, "format": "gptq"}]
)
def test_gptq_names_its_format_in_several_ways(names):
    ours, plain = quantized(model(), "gptq")
    config = {
        name: value for name, value in (GPTQ | names).items() if value is not None
    }
    change_config(ours, quantization_config=config | {"sym": False})
    assert torch.equal(computed(ours), computed(plain))


@pytest.mark.parametrize("layers", [".self_attn.", "_proj."])
def test_scales_of_inputs_are_not_needed(layers):
    """As in folders of ModelOpt and AutoFP8; activations are not quantized."""
    ours, plain = quantized(model(), "fp8 by tensor")
    tensors = load_file(ours / "model.safetensors")
    for name in [
        name for name in tensors if name.endswith("weight_scale") and layers in name
    ]:
        tensors[name.replace("weight_scale", "input_scale")] = torch.tensor(0.5)
    save_file(tensors, ours / "model.safetensors", {"format": "pt"})
    expected = computed(plain)
    for config in (
        MODELOPT,
        {
            "quant_method": "fp8",
            "activation_scheme": "static",
            "ignored_layers": ["lm_head"],
        },
    ):
        change_config(ours, quantization_config=config)
        check_tensors(ours, plan_rank(compute_config(ours), 1).decoder)  # type: ignore[arg-type]
        assert torch.equal(computed(ours), expected)


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        (
            "bnb nf4",
            {"quant_state.bitsandbytes__nf4": None},
            "no tensor .*bitsandbytes__nf4",
        ),
        ("bnb nf4", {"quant_state.bitsandbytes__nf4": b"{}"}, "quant_type"),
        (
            "bnb nf4",
            {
                "quant_state.bitsandbytes__nf4": b'{"quant_type":"nf4","blocksize":128,"shape":[1]}'
            },
            r"says \('nf4', 128, \(1,\), 256\) of type",
        ),
        ("bnb nf4", {"absmax": torch.zeros(7)}, "absmax"),
        (
            "bnb nf4 nested",
            {"nested_absmax": torch.full((2,), torch.nan)},
            "nested_absmax",
        ),
        (
            "bnb nf4 nested",
            {"nested_quant_map": None},
            "nested_quant_map",
        ),
        ("bnb int8", {"SCB": None}, r"up_proj\.SCB"),
        (
            "bnb int8",
            {"weight_format": torch.tensor(1).byte()},
            r"config\.json",
        ),
    ],
)
def test_weights_of_bitsandbytes_that_do_not_fit_are_refused(name, changes, reason):
    folder, _ = quantized(model(), name)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for end, value in changes.items():
        key = f"{UP}.{end}" if end in ("SCB", "weight_format") else f"{UP}.weight.{end}"
        del tensors[key]
        if isinstance(value, bytes):
            tensors[key] = torch.tensor(list(value), dtype=torch.uint8)
        elif value is not None:
            tensors[key] = value
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ConfigError, match=reason) as error:
        check_tensors(folder, read_decoder_config(folder))
    assert "\n" not in str(error.value)


def test_an_adapter_adds_to_quantized_weights():
    adapter = write_adapter(model())
    found = []
    for folder in quantized(model(), "int8 by channel"):
        with loaded(
            compute_config(folder, lora_modules=(f"mine={adapter}",))
        ) as runner:
            text = Text("a", TOKENS, range(3), "mine")
            found.append(logits(runner, text.chunk(0, len(TOKENS)))[0])
    assert torch.equal(*found)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"quant_method": "quanto"}, "quanto"),
        (
            {"quant_method": "bitsandbytes"},
            "only load_in_8bit, and load_in_4bit with nf4",
        ),
        (
            FORMATS["bnb nf4"] | {"bnb_4bit_quant_type": "nf3"},
            "load_in_4bit with nf4 or fp4",
        ),
        (
            FORMATS["bnb nf4"] | {"bnb_4bit_quant_storage": "bfloat16"},
            "quant_storage 'bfloat16'",
        ),
        (FORMATS["auto-round"] | {"bits": 2}, "gptq of 2 bits"),
        (
            FORMATS["auto-round"] | {"packing_format": "auto_round:fp8"},
            "'auto_round:fp8' with",
        ),
        (
            FORMATS["auto-round"] | {"data_type": "mx_fp"},
            "data_type 'mx_fp'",
        ),
        (
            FORMATS["auto-round"]
            | {"extra_config": {"model.layers.0.mlp.up_proj": {"bits": 4}}},
            "model.layers.0.mlp.up_proj",
        ),
        (GPTQ | {"bits": 3}, "gptq of 3 bits"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format gptq or gptq_v2"),
        (GPTQ | {"format": "gptq_v2"}, "checkpoint_format gptq or gptq_v2"),
        (GPTQ | {"pack_dtype": "int16"}, "pack_dtype 'int16'"),
        (GPTQ | {"dynamic": {"-:.*down.*": {}}}, "dynamic"),
        (GPTQ | {"lm_head": True}, "lm_head"),
        (GPTQ | {"group_size": 0}, "group_size 0"),
        (AWQ | {"version": "gemv"}, "version gemm"),
        (AWQ | {"zero_point": False}, "zero_point"),
        (
            FORMATS["packed"] | {"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"},
            "W4A8_AWQ",
        ),
        ({}, "unnamed method"),
        (FINE_GRAINED | {"weight_block_size": [0, 128]}, "weight_block_size"),
        (FINE_GRAINED | {"a_field_of_tomorrow": 1}, "a_field_of_tomorrow"),
        (compressed("int", "group", num_bits=4), "weights of 4 bits"),
        (compressed("int", "channel", symmetric=False), "symmetric"),
        (
            compressed("int", "channel") | {"format": "marlin-24"},
            "marlin-24",
        ),
        (
            compressed("int", "group") | {"format": "pack-quantized"},
            "packed weights",
        ),
        (
            compressed("int", "channel") | {"sparsity_config": {"format": "2:4"}},
            "sparsity",
        ),
        (compressed("int", "channel") | {"config_groups": {}}, "config_groups"),
        (compressed("int", "channel") | {"config_groups": {"a": {}}}, "weights"),
        (
            compressed("int", "channel")
            | {
                "config_groups": {
                    "a": {
                        "weights": {"num_bits": 8, "type": "int"},
                        "targets": ["re:("],
                    }
                }
            },
            "valid pattern",
        ),
    ],
)
def test_other_ways_are_refused_by_name(config, reason):
    folder, _ = quantized(model(), "int8 by channel")
    change_config(folder, quantization_config=config)
    with pytest.raises(ConfigError, match=f"quantization_config: .*{reason}") as error:
        plan_rank(compute_config(folder), 1)
    assert "\n" not in str(error.value)


INT8 = "int8 by channel"
NAN = torch.full((1,), torch.nan)
NONE_CALLS_FOR = "nothing in config.json calls for"


# Put in the place of a tensor, or into one from the sixth value on; None takes it out.
@pytest.mark.parametrize(
    ("kind", "name", "tensor", "reason"),
    [
        (INT8, SCALES, None, f"there is no {SCALES}"),
        (INT8, SCALES, NAN.expand(256, 1), "not above 0 and finite"),
        (INT8, SCALES, 0.0, "not above 0 and finite"),
        (INT8, SCALES, torch.ones(7, 1), r"the shape \[7, 1\]"),
        (INT8, SCALES, torch.ones(256, 1, dtype=torch.int8), "weight_scale"),
        (
            INT8,
            "model.norm.weight",
            torch.ones(128).to(torch.int8),
            "model.norm.weight is I8",
        ),
        (
            INT8,
            "lm_head.weight_scale",
            torch.ones(1024, 1),
            f"{NONE_CALLS_FOR} tensor lm_head",
        ),
        (INT8, f"{UP}.weight_zero_point", torch.zeros(256, 1), "weight_zero_point"),
        ("gptq", GROUPS, None, f"no tensor {GROUPS}"),
        ("gptq", GROUPS, 9, "g_idx"),
        ("gptq", GROUPS, -1, "names a group that is not there"),
        ("gptq", GROUPS, torch.zeros(128), f"{GROUPS} is F32"),
        ("gptq", GROUPS, torch.zeros(64, dtype=torch.int32), r"the shape \[64\]"),
        ("gptq", f"{UP}.scales", torch.nan, "not above 0 and finite"),
        (
            "packed in another order",
            f"{UP}.weight_g_idx",
            9,
            "names a group that is not there",
        ),
        ("mxfp4", SCALES, 255, "not above 0 and finite"),
        ("mxfp8", SCALES, 255, "not above 0 and finite"),
        ("nvfp4", SCALES, torch.nan, "not above 0 and finite"),
        ("nvfp4", f"{UP}.weight_global_scale", torch.ones(2), r"the shape \[2\]"),
        ("nvfp4", f"{UP}.weight_global_scale", -NAN, "not above 0 and finite"),
        ("gptq", f"{UP}.weight", torch.ones(1), NONE_CALLS_FOR),
    ],
)
def test_parts_that_do_not_fit_are_refused_before_a_process_starts(
    kind, name, tensor, reason
):
    folder, _ = quantized(model(), kind)
    tensors = load_file(folder / "model.safetensors")
    if tensor is None:
        del tensors[name]
    elif isinstance(tensor, torch.Tensor):
        tensors[name] = tensor.contiguous()
    else:
        tensors[name].view(-1)[5] = tensor
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=reason) as error:
        check_tensors(folder, plan_rank(compute_config(folder), 1).decoder)  # type: ignore[arg-type]
    assert "\n" not in str(error.value)


def test_a_folder_that_only_says_it_is_quantized_is_refused():
    _, plain = quantized(model(), "int8 by channel")
    change_config(plain, quantization_config=CONFIGS["int8 by channel"])
    decoder = plan_rank(compute_config(plain), 1).decoder
    with pytest.raises(ConfigError, match="said to be quantized, but none has scales"):
        check_tensors(plain, msgspec.structs.replace(decoder))  # type: ignore[arg-type, type-var]


def test_scales_of_all_float_types_are_read():
    folder, plain = quantized(model(), "fp8 by tensor")
    expected = computed(plain)
    tensors = load_file(folder / "model.safetensors")
    for name in tensors:
        if re.search("k_proj.weight_scale|v_proj.weight_scale", name):
            tensors[name] = tensors[name].to(
                torch.bfloat16 if "k_proj" in name else torch.float16
            )
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert (computed(folder) - expected).abs().max() < 0.1 * expected.abs().max()
