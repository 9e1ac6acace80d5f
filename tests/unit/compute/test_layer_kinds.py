"""Fields of Gemma and gpt-oss; `test_families` has what all families share."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from baton.engine.compute.tensor_parallel import SharedMemoryRanks
from baton.protocol.config import ClusterConfig
from baton.protocol.errors import ConfigError
from tests.support.compute import Text, compute_config, loaded, logits
from tests.support.foreign_checkpoints import LENGTH, assert_close, changed, reference, whole
from tests.support.oracle import prompt
from tests.support.thread_ranks import on_all, thread_ranks

LINEAR = {"rope_type": "linear", "factor": 8.0}
OLD_FIELDS = {"rope_theta": 5e4, "rope_local_base_freq": 2e3, "rope_scaling": LINEAR}


def first_logits(config: ClusterConfig, rank: SharedMemoryRanks | None = None) -> Tensor:
    with loaded(config, rank) as runner:
        return logits(runner, Text("a", prompt(LENGTH), range(10)).chunk(0, 100))[0]


def test_a_folder_with_the_old_fields_of_gemma3_is_read(tmp_path):
    absent = ("rope_parameters", "layer_types")
    folder = changed(tmp_path, "gemma3_text", absent, sliding_window_pattern=3, **OLD_FIELDS)
    assert_close(whole(folder), reference(folder))


def test_experts_in_mxfp4_have_the_bits_of_their_numbers(tmp_path):
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
def test_a_folder_that_means_something_else_is_refused(kind, fields, reason, tmp_path):
    folder = changed(tmp_path, kind, **fields)
    with pytest.raises(ConfigError, match=reason), loaded(compute_config(folder)):
        pass
