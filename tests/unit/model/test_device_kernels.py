"""Which kernels a rank on a GPU takes, and when its sums have one order."""

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from baton.kernels.proofs import ONE_ORDER, PREFILL, PRODUCTS, Candidate, Proof
from baton.model.config.decoder_config import read_decoder_config
from baton.model.layers import decoder
from baton.model.layers.linear import Linear
from baton.model.runner.compute_digest import digest_of, is_batch_invariant, own_sources
from baton.model.runner.device_kernels import (
    ONE_ORDER_NEEDS,
    UNPROVEN,
    agreed,
    chosen,
    shapes_of,
)
from baton.model.tensor_parallel import SingleRank
from tests.support.checkpoints import model_folder

ALL = {PRODUCTS: True, PREFILL: True, ONE_ORDER: True}


@pytest.mark.parametrize("missing", [None, PRODUCTS, PREFILL, ONE_ORDER])
def test_by_default_sums_have_one_order_where_all_that_it_needs_is_proven(missing):
    proven = ALL | ({missing: False} if missing else {})
    by_default = chosen("auto", proven, 1)
    assert by_default.is_ordered == (missing not in ONE_ORDER_NEEDS)
    assert by_default.proven == {
        name for name, is_proven in proven.items() if is_proven
    }
    assert not chosen("auto", proven, 2).is_ordered
    assert chosen("true", proven, 2).is_ordered
    assert not chosen("false", proven, 1).is_ordered
    if missing:
        assert f"unproven-{missing}" in by_default.features


def test_latent_attention_sums_in_one_order_without_kernels_of_its_own():
    assert chosen("auto", {PRODUCTS: True}, 1, is_latent=True).is_ordered
    assert not chosen("auto", {PRODUCTS: False}, 1, is_latent=True).is_ordered
    assert not chosen("auto", {PRODUCTS: True}, 2, is_latent=True).is_ordered
    assert not chosen("auto", {PRODUCTS: True}, 1).is_ordered


def test_a_gpu_without_candidates_computes_as_before():
    assert chosen("auto", {}, 1) == UNPROVEN
    assert chosen("true", {}, 1).is_ordered


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("is_ordered", [False, True])
def test_adapters_change_no_promise_of_bits(device, is_ordered):
    ordered = torch.nn.functional.linear if is_ordered else None
    plain = Linear(torch.zeros(1, 1), ordered=ordered)
    adapted = replace(plain, adapt=lambda y, _x, _rows: y)
    for linear in (plain, adapted):
        decoder = SimpleNamespace(
            is_batch_invariant=linear.is_batch_invariant, ranks=SingleRank()
        )
        runner = SimpleNamespace(
            decoder=decoder,
            device=torch.device(device),
            backend=SimpleNamespace(is_batch_invariant=True),
        )
        assert is_batch_invariant(runner) == is_ordered


class SecondRankFailed(SingleRank):
    """Two ranks, of which the other has proven nothing."""

    size = 2

    def all_gather(self, tensor):
        return torch.cat((tensor, torch.zeros_like(tensor)))


def test_ranks_use_what_all_of_them_have_proven():
    candidates = (Candidate(PRODUCTS, "some.module"), Candidate(PREFILL, "another"))
    proofs = (Proof(PRODUCTS), Proof(PREFILL, "a row differs"))
    cpu = torch.device("cpu")
    own = agreed(proofs, candidates, cpu, SingleRank())
    assert own == {PRODUCTS: True, PREFILL: False}
    both = agreed(proofs, candidates, cpu, SecondRankFailed())
    assert both == {PRODUCTS: False, PREFILL: False}


def test_a_proof_is_asked_for_a_ranks_own_sizes():
    config = read_decoder_config(model_folder("qwen3"))
    sizes = (16, (torch.bfloat16, torch.uint8), 100)
    whole, half = (shapes_of(config, num_ranks, *sizes) for num_ranks in (1, 2))
    assert (whole.dtype, whole.pool_dtype) == ("bfloat16", "uint8")
    assert whole.num_heads == 2 * half.num_heads
    qkv, output, gate_up, down, head = whole.linears
    assert qkv[1] == gate_up[1] == head[1] == output[0] == down[0] == config.hidden_size
    assert gate_up[0] == 2 * down[1] == 2 * config.intermediate_size
    assert half.linears[3] == (config.hidden_size, down[1] // 2)


def test_a_changed_kernel_is_another_order_of_sums(tmp_path):
    folder = Path(decoder.__file__).parent
    copied = tmp_path / "layers"
    shutil.copytree(folder, copied)
    assert digest_of([copied]) == digest_of([folder])
    (copied / "decoder.py").write_text("")
    assert digest_of([copied]) != digest_of([folder])
    assert own_sources() not in {digest_of([folder]), digest_of([copied])}
