"""Mixtures of experts in the own decoder; `test_families` has what all families share."""

import pytest

from baton.engine.compute.rank import plan_rank
from baton.protocol.errors import ConfigError
from tests.support.compute import compute_config, loaded
from tests.support.foreign_checkpoints import (
    assert_close,
    changed,
    foreign_folder,
    reference,
    whole,
)


def test_fields_that_config_leaves_out_have_transformers_values(tmp_path):
    absent = (
        "rms_norm_eps", "rope_parameters", "num_experts_per_tok", "num_local_experts", "head_dim",
        "sliding_window", "hidden_act",
    )  # fmt: skip
    folder = changed(tmp_path, "mixtral", absent)
    assert_close(whole(folder), reference(folder))


def test_ranks_that_cannot_share_an_expert_are_refused():
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
def test_experts_that_do_not_fit_are_refused(fields, reason, tmp_path):
    folder = changed(tmp_path, "qwen3_moe", **fields)
    with pytest.raises(ConfigError, match=reason), loaded(compute_config(folder)):
        pass


@pytest.mark.parametrize("fields", [{}, {"max_window_layers": 1}])
def test_windows_in_turns_equal_those_of_transformers(fields, tmp_path):
    folder = changed(
        tmp_path, "qwen2_moe", ("layer_types",), use_sliding_window=True, sliding_window=24,
        **fields,
    )  # fmt: skip
    assert_close(whole(folder), reference(folder))
