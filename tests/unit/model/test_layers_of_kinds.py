"""Models whose layers attend in several ways: the tokens of transformers, and what is refused."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.model.config.decoder_config import read_decoder_config
from baton.model.runner.rank import _lacking_on_gpus, plan_rank
from baton.protocol.errors import ConfigError
from baton.runtime.fields import with_values
from tests.support.compute import Text, compute_config, greedy, loaded, logits
from tests.support.foreign_checkpoints import changed, foreign_folder, whole
from tests.support.oracle import Oracle, count_ties, prompt

KINDS = ("llama4_text",)


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


@pytest.mark.parametrize("kind", KINDS)
def test_gpus_refuse_what_their_kernels_lack(kind):
    config = compute_config(foreign_folder(kind))
    reason = _lacking_on_gpus(config, read_decoder_config(foreign_folder(kind)), 1)
    assert reason.endswith("have no CUDA kernel yet")


def test_chunks_must_begin_with_a_block():
    config = with_values(compute_config(foreign_folder("llama4_text")), {"cache.block_size": 64})
    with pytest.raises(ConfigError, match="64 must divide attention_chunk_size, which is 32"):
        plan_rank(config, 1)


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
                parts = dict(zip(("gate_proj", "up_proj"), expert.chunk(2, dim=1), strict=True))
            for part, weight in parts.items():
                tensors[f"{block}experts.{number}.{part}.weight"] = weight.T.contiguous()
    save_file(tensors, file)
    assert torch.equal(whole(folder), whole(foreign_folder("llama4_text")))


def test_the_first_folders_have_a_number_instead_of_a_switch(tmp_path):
    expected = read_decoder_config(foreign_folder("llama4_text"))
    assert (
        read_decoder_config(changed(tmp_path, "llama4_text", attn_temperature_tuning=4)) == expected
    )


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"layer_types": ["sliding_attention"] * 5}, "must name one of chunked_attention"),
        ({"layer_types": ["full_attention"]}, "for each of 5 layers"),
        ({"no_rope_layers": [1, 0]}, "an entry for each of 5"),
        ({"attention_chunk_size": None}, "needs an attention_chunk_size"),
        ({"num_experts_per_tok": 5}, "at most the 4 experts"),
        ({"intermediate_size_mlp": 0}, "intermediate_size_mlp must be"),
    ],
)
def test_chunks_that_are_not_computed_are_refused(fields, text, tmp_path):
    with pytest.raises(ConfigError, match=text):
        read_decoder_config(changed(tmp_path, "llama4_text", **fields))
