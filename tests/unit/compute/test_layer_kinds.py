"""Gates, norms, caps and sinks of other families in baton's own decoder: right, in any batch."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from baton.engine.compute.decoder import Decoder
from baton.engine.compute.rank import is_batch_invariant
from baton.engine.compute.tensor_parallel import SharedMemoryRanks
from baton.protocol.config import ClusterConfig
from baton.protocol.errors import ConfigError
from baton.runtime.fields import with_values
from tests.support.compute import Text, chunked_logits, compute_config, loaded, logits, needs_rules
from tests.support.foreign_checkpoints import changed, foreign_folder
from tests.support.oracle import prompt
from tests.support.thread_ranks import on_all, thread_ranks

LENGTH = 150
KINDS = ("gemma2", "gemma3_text", "gpt_oss")
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "factor": 8.0}
OLD_FIELDS = {"rope_theta": 5e4, "rope_local_base_freq": 2e3, "rope_scaling": LINEAR}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2": ("gemma2", {}),
    "gemma2 with low caps": (
        "gemma2", {"attn_logit_softcapping": 0.5, "final_logit_softcapping": 2.0},
    ),
    "gemma2 without caps": (
        "gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None},
    ),
    "gemma2 with biases and a head": (
        "gemma2", {"attention_bias": True, "tie_word_embeddings": False},
    ),
    "gemma2 with windows at the end": (
        "gemma2", {"layer_types": ("full_attention", "full_attention", "sliding_attention")},
    ),
    "gemma3": ("gemma3_text", {}),
    "gemma3 with angles of each kind": (
        "gemma3_text",
        {
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 2e3},
                "full_attention": LINEAR | {"rope_theta": 5e4},
            },
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3 with a window that is too wide": ("gemma3_text", {"sliding_window": 2000}),
    "gpt-oss": ("gpt_oss", {}),
    "gpt-oss with a low limit": ("gpt_oss", {"swiglu_limit": 0.7, "swiglu_alpha": 1.3}),
    "gpt-oss with other angles": ("gpt_oss", {"rope_parameters": YARN}),
    "gpt-oss without biases": ("gpt_oss", {"attention_bias": False}),
}  # fmt: skip


def reference(folder: Path, dtype: torch.dtype = torch.float32) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager"
    ).eval()
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


def first_logits(config: ClusterConfig, rank: SharedMemoryRanks | None = None) -> Tensor:
    with loaded(config, rank) as runner:
        return logits(runner, Text("a", prompt(LENGTH), range(10)).chunk(0, 100))[0]


@pytest.mark.parametrize("variant", VARIANTS)
def test_fp32_logits_equal_those_of_transformers(variant: str, tmp_path: Path) -> None:
    kind, fields = VARIANTS[variant]
    rope = {name: of for name, of in fields.items() if name == "rope_parameters"}
    folder = foreign_folder(kind, **{k: of for k, of in fields.items() if k not in rope})
    folder = changed(tmp_path, folder, **rope)
    assert_close(whole(folder), reference(folder))


def test_a_folder_with_the_old_fields_of_gemma3_is_read(tmp_path: Path) -> None:
    absent = ("rope_parameters", "layer_types")
    folder = changed(tmp_path, "gemma3_text", absent, sliding_window_pattern=3, **OLD_FIELDS)
    assert_close(whole(folder), reference(folder))


def test_experts_in_mxfp4_have_the_bits_of_their_numbers(tmp_path: Path) -> None:
    config = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    packed = changed(tmp_path, "gpt_oss", quantization_config=config)
    plain = changed(tmp_path / "plain", "gpt_oss")
    tensors = load_file(packed / "model.safetensors")
    stored, numbers = dict(tensors), dict(tensors)
    generator = torch.Generator().manual_seed(3)
    for name in tensors:
        if name.endswith("_proj"):
            experts, inputs, outputs = stored.pop(name).shape
            size = experts, outputs, inputs // 32
            blocks = torch.randint(256, (*size, 16), generator=generator).byte()
            scales = torch.randint(122, 126, size, generator=generator).byte()
            stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            numbers[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
            numbers[name] = numbers[name].contiguous()
    save_file(stored, packed / "model.safetensors")
    save_file(numbers, plain / "model.safetensors")
    expected = whole(plain)
    assert torch.equal(whole(packed), expected)
    config = compute_config(packed)
    with thread_ranks(2) as members:
        for share in on_all(members, lambda rank: first_logits(config, rank)):
            assert_close(share, expected[:100])
    name = "model.layers.1.mlp.experts.down_proj_blocks"
    save_file({**stored, name: stored[name][..., 1:].contiguous()}, packed / "model.safetensors")
    with pytest.raises(ConfigError, match="_blocks has the shape"), loaded(config):
        pass


@pytest.mark.parametrize("kind", KINDS)
def test_plain_torch_computes_the_same(kind: str) -> None:
    config = with_values(compute_config(foreign_folder(kind)), {"engine.kernels": "torch"})
    with loaded(config) as runner:
        found = chunked_logits(runner, Text("a", prompt(LENGTH), range(3, 20)), [64])
    assert_close(found, reference(foreign_folder(kind)))


@pytest.mark.parametrize("kind", KINDS)
def test_bf16_logits_are_as_near_to_fp32_as_those_of_transformers(kind: str) -> None:
    folder = foreign_folder(kind)
    exact = reference(folder)
    allowed = 1.5 * (reference(folder, torch.bfloat16) - exact).abs().mean()
    assert (whole(folder, "bfloat16") - exact).abs().mean() < allowed


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_has_the_same_bits_whole_in_chunks_and_in_a_crowd(kind: str, dtype: str) -> None:
    with loaded(compute_config(foreign_folder(kind), dtype)) as runner:
        needs_rules(runner)
        assert is_batch_invariant(runner)
        runner.cache.pool.fill_(float("nan"))
        text = Text("a", prompt(90), range(10))
        crowd = [Text(f"b{n}", prompt(30, n), range(20 + 2 * n, 22 + 2 * n)) for n in range(9)]
        (expected,) = logits(runner, text.chunk(0, 90))
        parts = [
            logits(runner, text.chunk(0, 33))[0],
            logits(runner, *(one.chunk(0, 29) for one in crowd), text.chunk(33, 89))[-1],
            logits(runner, text.chunk(89, 90), *(one.chunk(29, 30) for one in crowd))[0],
        ]
        assert torch.equal(torch.cat(parts), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_together_compute_what_one_computes(kind: str) -> None:
    config = compute_config(foreign_folder(kind))
    alone = first_logits(config)
    for size in (2, 4):  # of two KV heads
        with thread_ranks(size) as members:
            shares = on_all(members, lambda rank: first_logits(config, rank))
        assert_close(shares[0], alone)
        assert all(torch.equal(share, shares[0]) for share in shares)


@pytest.mark.parametrize(
    ("kind", "fields", "reason"),
    [
        ("gemma2", {"hidden_activation": "silu"}, "hidden_activation 'silu' is not supported"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma2", {"attn_logit_softcapping": 0}, "attn_logit_softcapping"),
        ("gemma3_text", {"attn_logit_softcapping": 5}, "attn_logit_softcapping is not supported"),
        ("gemma3_text", {"rope_parameters": {"rope_type": "default"}}, "by kind of layer"),
        ("gpt_oss", {"layer_types": ["full_attention"]}, "layer_types must name"),
        ("gpt_oss", {"swiglu_limit": 0}, "swiglu_limit"),
        ("gemma3_text", {"sliding_window": None}, "needs a sliding_window"),
    ],
)
def test_a_folder_that_means_something_else_is_refused(
    kind: str, fields: dict[str, object], reason: str, tmp_path: Path
) -> None:
    folder = changed(tmp_path, kind, **fields)
    with pytest.raises(ConfigError, match=reason), loaded(compute_config(folder)):
        pass
