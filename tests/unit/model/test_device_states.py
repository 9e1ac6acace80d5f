"""Models whose layers keep a state on the CUDA backend; its kernels run interpreted here."""

import json
import sys
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch

from baton.kernels.constants import STATE_CHUNK
from baton.kernels.proofs import STATES
from baton.model.config.decoder_config import read_decoder_config
from baton.model.runner import rank, rank_plan
from baton.model.runner.device_kernels import DeviceKernels
from baton.model.runner.rank_plan import RankPlan, lacking_on_gpus, plan_rank
from baton.model.tensor_parallel import SingleRank
from baton.protocol.errors import ConfigError, NodeError
from tests.support.compute import compute_config, no_progress
from tests.support.foreign_checkpoints import foreign_folder
from tests.support.module_process import said_by

# Far more than it takes on a machine that others use.
pytestmark = pytest.mark.timeout(600)
TWO_LAYERS = {
    "num_hidden_layers": 2,
    "layer_types": ("linear_attention", "full_attention"),
}
DELTA = {
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 32,
    **TWO_LAYERS,
}
MODELS: dict[str, dict[str, Any]] = {
    "lfm2": {
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "layer_types": ("conv", "full_attention"),
    },
    "qwen3_5_text": DELTA,
    # All experts, because near ties differ in bf16.
    "qwen3_next": {**DELTA, "num_experts_per_tok": 8},
    # Rows so wide that a block holds a piece of a state.
    "kimi_linear": {
        "linear_head_dim": 32,
        "kv_lora_rank": 64,
        "num_experts_per_tok": 8,
        "topk_group": 2,
        **TWO_LAYERS,
    },
    "granitemoehybrid": {"num_attention_heads": 2, **TWO_LAYERS},
    "nemotron_h": {
        "head_dim": 32,
        "layers_block_type": ("linear_attention", "full_attention"),
    },
}


def said_of(kind: str, *words: str) -> dict[str, Any]:
    if sys.platform != "linux":
        pytest.skip("Triton runs on Linux only")
    folder = str(foreign_folder(kind, **MODELS[kind]))
    *_, line = said_by(
        "tests.support.interpret_states",
        folder,
        *words,
        env={"TRITON_INTERPRET": "1"},
    )
    said: dict[str, Any] = json.loads(line)
    return said


def test_a_captured_step_reads_states_where_its_inputs_say():
    assert said_of("lfm2", "captured") == {"captured": []}


@pytest.mark.release
@pytest.mark.parametrize("kind", MODELS)
def test_a_rank_computes_what_one_on_a_cpu_does_with_the_same_bits_in_any_slices(kind):
    """Chunks, steps, resumed and repeated tokens, guesses, checkpoints, and captured steps."""
    found = said_of(kind)
    # Of bf16: channels are rounded, and what comes of them.
    assert max(found["errors"].values()) < 2e-2, found["errors"]
    assert found["captured"] == []
    if not found["keeps_bits"]:
        pytest.skip("no row rule was found on this CPU")
    # These compute the tokens of prompts as those of responses.
    assert found["has_two_orders"] == (kind not in {"lfm2", "kimi_linear"})
    assert found["differing"] == []


@pytest.mark.parametrize(
    ("kind", "dtype", "block_size", "reason"),
    [
        ("qwen3_5_text", torch.float32, 64, "set model.dtype=bfloat16"),
        ("qwen3_5_text", torch.bfloat16, 16, "raise cache.block_size"),
    ],
)
def test_a_gpu_refuses_states_that_its_kernels_do_not_take(
    kind, dtype, block_size, reason
):
    folder = foreign_folder(kind, **MODELS.get(kind, {}))
    config = compute_config(folder, block_size=block_size)
    decoder = read_decoder_config(folder)
    assert reason in lacking_on_gpus(config, decoder, 1, dtype)


@pytest.mark.parametrize("num_tokens", [1, STATE_CHUNK])
def test_a_step_on_a_gpu_takes_more_than_a_chunk_of_a_state(monkeypatch, num_tokens):
    monkeypatch.setattr(rank_plan, "_device", lambda *_: torch.device("cuda", 0))
    config = compute_config(foreign_folder("lfm2", **MODELS["lfm2"]), "bfloat16")

    def planned(limit: int) -> RankPlan:
        engine = msgspec.structs.replace(config.engine, max_num_batched_tokens=limit)
        return plan_rank(msgspec.structs.replace(config, engine=engine), 1)

    assert planned(STATE_CHUNK + 1).max_num_batched_tokens == STATE_CHUNK + 1
    with pytest.raises(ConfigError, match=r"engine\.max_num_batched_tokens"):
        planned(num_tokens)


def test_a_gpu_that_does_not_prove_the_kernels_refuses_the_model(monkeypatch):
    config = compute_config(foreign_folder("lfm2", **MODELS["lfm2"]), "bfloat16")
    plan = replace(plan_rank(config, 1), device=torch.device("cuda", 0))
    failed = DeviceKernels(unproven=(STATES,))
    monkeypatch.setattr(rank, "kernels_of", lambda *_: failed)
    with pytest.raises(NodeError, match="not proven on this GPU"):
        rank._loaded(plan, config, SingleRank(), no_progress)
