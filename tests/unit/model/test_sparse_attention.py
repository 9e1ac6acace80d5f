"""Models whose layers choose the keys that a query sees: the same tokens in every way of computing.

`test_families` compares their logits and bits as those of all families.
"""

import json

import pytest
import torch
from transformers import AutoConfig

from baton.model.config.decoder_config import read_decoder_config
from baton.model.config.latent_config import IndexConfig
from baton.model.runner.kv_cache import kv_layout
from baton.model.runner.rank_plan import plan_rank
from baton.protocol.config import CacheConfig
from baton.protocol.errors import ConfigError
from baton.runtime.fields import with_values
from tests.support.compute import (
    Text,
    chunked_logits,
    compute_config,
    greedy,
    loaded,
    logits,
    needs_rules,
)
from tests.support.depth import nightly
from tests.support.foreign_checkpoints import (
    LENGTH,
    assert_close,
    changed,
    foreign_folder,
    whole,
)
from tests.support.oracle import Oracle, count_ties, prompt

KINDS = ("deepseek_v32", "glm_moe_dsa")
CACHE = CacheConfig(num_blocks=8, block_size=16)


# The index chooses 20 keys.
@pytest.mark.parametrize(
    ("kind", "length"),
    [
        *((KINDS[0], length) for length in (19, 20, 21)),
        (KINDS[1], 90),
        *(nightly(KINDS[0], length) for length in (5, 90)),
        *(nightly(KINDS[1], length) for length in (5, 19, 20, 21)),
    ],
)
def test_tokens_are_those_that_transformers_generates(kind, length):
    folder = foreign_folder(kind)
    expected = Oracle(folder).greedy(prompt(length), 40)
    with loaded(compute_config(folder)) as runner:
        text = Text("a", prompt(length), range(9, 0, -1))
        logits(runner, text.chunk(0, length // 2))
        logits(runner, text.chunk(length // 2, length - 1))
        tokens = greedy(runner, text, 40)
    assert count_ties(expected, tokens) == 0


def test_the_choice_changes_what_a_model_says():
    sparse, dense = (
        whole(foreign_folder("deepseek_v32", index_topk=count))
        for count in (20, 1 << 40)
    )
    assert_close(sparse[:20], dense[:20])
    assert ((sparse - dense).abs().amax(dim=1) > 0.01)[40:].all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_copied_block_has_the_keys_of_the_index(kind):
    """A choice goes on from copies, with the bits of the text that it was copied from."""
    with loaded(compute_config(foreign_folder(kind))) as runner:
        needs_rules(runner)
        text = Text("a", prompt(LENGTH), range(10))
        expected = chunked_logits(runner, text, [60])[100:]
        runner.cache.copy_blocks([(block, 40 + block) for block in range(10)])
        copy = Text("b", prompt(LENGTH), range(40, 50))
        assert torch.equal(logits(runner, copy.chunk(100, LENGTH))[0], expected)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_are_asked_for_alone_have_the_bits_of_all(kind):
    with loaded(compute_config(foreign_folder(kind))) as runner:
        needs_rules(runner)
        a = Text("a", prompt(90), range(6))
        b = Text("b", prompt(30, 1), range(6, 8))
        logits(runner, a.chunk(0, 60))
        slices = a.chunk(60, 90), b.chunk(0, 30)
        expected = torch.cat(logits(runner, *slices))
        batch = runner.pack(slices)
        for rows in ([29, 59], [0, 35, 49, 50, 51], [49], []):
            with torch.inference_mode():
                found = runner.decoder.forward(
                    batch, torch.tensor(rows).long(), runner.backend
                )
            assert torch.equal(found, expected[rows])


def test_the_keys_of_indexes_follow_the_rows_of_a_block():
    layouts = [
        kv_layout(read_decoder_config(foreign_folder(kind)), CACHE, 1, torch.float32)
        for kind in KINDS
    ]
    assert [
        [(one.kind, one.num_layers, one.width) for one in of.groups] for of in layouts
    ] == [
        [("latent", 3, 40), ("index", 3, 24)],
        [("latent", 5, 40), ("index", 2, 24)],
    ]
    assert [of.block_bytes for of in layouts] == [
        16 * 3 * 64 * 4,
        16 * (5 * 40 + 2 * 24) * 4,
    ]


def test_a_folder_of_glm_5_is_read(tmp_path):
    theirs = AutoConfig.for_model("glm_moe_dsa").to_dict()
    fields = {"architectures": ["GlmMoeDsaForCausalLM"], "torch_dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(theirs | fields))
    config = read_decoder_config(tmp_path)
    layout = kv_layout(config, CACHE, 1, torch.bfloat16)
    assert layout.block_bytes == 16 * 78 * (576 + 128) * 2
    assert config.index == IndexConfig(
        32, 128, 2048, is_interleaved=True, layers=tuple(range(78))
    )


@pytest.mark.parametrize("types", ["FFSSS", "FSSFS"])
def test_nodes_with_other_indexes_do_not_exchange_blocks(types, tmp_path):
    first = foreign_folder("glm_moe_dsa")
    other = changed(tmp_path, first, indexer_types=list(types))
    prints = {
        kv_layout(read_decoder_config(folder), CACHE, 1, torch.float32).fingerprint
        for folder in (first, other)
    }
    assert len(prints) == 2


def test_ranks_hold_the_keys_of_indexes_each():
    config = read_decoder_config(foreign_folder("deepseek_v32"))
    one, two = (kv_layout(config, CACHE, size, torch.float32) for size in (1, 2))
    assert one == two


@pytest.mark.parametrize(
    ("kind", "fields", "text"),
    [
        ("deepseek_v32", {"index_topk": 0}, "index_topk"),
        (
            "deepseek_v32",
            {"index_head_dim": 4},
            "index_head_dim",
        ),
        (
            "deepseek_v32",
            {"index_head_dim": 32},
            r"indexer\.wq_b\.weight",
        ),
        ("deepseek_v32", {"q_lora_rank": None}, "q_lora_rank is missing"),
        ("deepseek_v32", {"rope_interleave": False}, "rope_interleave is false"),
        (
            "deepseek_v32",
            {"indexer_rope_interleave": True},
            "indexer_rope_interleave",
        ),
        (
            "deepseek_v32",
            {"layer_types": ["full_attention"] * 3},
            "layer_types",
        ),
        (
            "deepseek_v32",
            {"indexer_types": ["full", "shared", "full"]},
            "indexer_types",
        ),
        (
            "glm_moe_dsa",
            {"indexer_types": ["shared"] * 5},
            "indexer_types",
        ),
        ("glm_moe_dsa", {"indexer_types": ["full"]}, "indexer_types"),
        (
            "glm_moe_dsa",
            {"indexer_types": ["none"] * 5},
            "indexer_types",
        ),
        (
            "glm_moe_dsa",
            {"indexer_types": ["full"] * 5},
            r"1\.self_attn\.indexer",
        ),
        (
            "glm_moe_dsa",
            {"indexer_rope_interleave": False},
            "indexer_rope_interleave",
        ),
    ],
)
def test_an_index_that_is_not_computed_is_refused(kind, fields, text, tmp_path):
    folder = changed(tmp_path, kind, **fields)
    with pytest.raises(ConfigError, match=text), loaded(compute_config(folder)):
        pass


def test_the_layers_with_an_index_are_those_of_the_period(tmp_path):
    fields = {"num_hidden_layers": 8, "index_topk_freq": 3, "index_skip_topk_offset": 1}
    absent = ("indexer_types", "layer_types", "mlp_layer_types")
    config = read_decoder_config(changed(tmp_path, "glm_moe_dsa", absent, **fields))
    assert config.index is not None
    assert config.index.layers == (0, 3, 6)


def test_fp8_blocks_are_refused():
    config = with_values(
        compute_config(foreign_folder("deepseek_v32")), {"engine.kv_cache_dtype": "fp8"}
    )
    with pytest.raises(ConfigError, match="latent rows"):
        plan_rank(config, 1)
