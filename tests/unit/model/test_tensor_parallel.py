"""Ranks that share memory get the same bits, independently of the rest of the tensor."""

import gc
import json
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from baton.model.tensor_parallel import SLOT_BYTES, GroupRanks, SharedMemoryRanks, join
from baton.protocol.errors import NodeError
from tests.support import group_rank
from tests.support.sources import REPOSITORY
from tests.support.thread_ranks import on_all, thread_ranks

SIZES = (2, 3, 4)


def parts_of(size: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(size, *shape, generator=torch.Generator().manual_seed(size)).to(
        dtype
    )


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_ranks_get_the_sum_in_rank_order(size, dtype):
    parts = parts_of(size, 5, 64, dtype=dtype)
    total = torch.zeros(5, 64)
    for part in parts:
        total += part.float()
    with thread_ranks(size) as members:
        sums = on_all(
            members, lambda member: member.all_reduce(parts[member.rank].clone())
        )
    assert all(torch.equal(one, total.to(dtype)) for one in sums)


@pytest.mark.parametrize("size", SIZES)
def test_a_row_is_summed_to_the_same_bits_alone_and_in_a_batch(size):
    parts = parts_of(size, 33, 48)
    with thread_ranks(size) as members:
        batch = on_all(
            members, lambda member: member.all_reduce(parts[member.rank].clone())
        )[0]
        for row in range(33):
            alone = on_all(
                members,
                lambda member, row=row: member.all_reduce(
                    parts[member.rank, row].clone()
                ),
            )
            assert torch.equal(alone[0], batch[row])


def test_a_tensor_larger_than_a_slot_goes_in_pieces():
    count = SLOT_BYTES // 4 + 1000
    parts = parts_of(2, count)
    with thread_ranks(2) as members:
        sums = on_all(
            members, lambda member: member.all_reduce(parts[member.rank].clone())
        )
        assert torch.equal(sums[0], parts[0] + parts[1])
        wide = parts.view(2, 8, -1)
        gathered = on_all(members, lambda member: member.all_gather(wide[member.rank]))
        assert torch.equal(gathered[1], torch.cat((wide[0], wide[1]), dim=-1))


@pytest.mark.parametrize("size", SIZES)
def test_many_exchanges_in_a_row_never_mix(size):
    """No barrier follows an exchange: a fast rank may be one ahead."""

    def run(member: SharedMemoryRanks) -> Tensor:
        seen = []
        for turn in range(300):
            given = torch.full((3, 7), float(turn * (member.rank + 1)))
            seen.append(member.all_reduce(given)[0, 0])
        return torch.stack(seen)

    with thread_ranks(size) as members:
        seen = on_all(members, run)
    factor = size * (size + 1) / 2
    assert torch.equal(seen, (torch.arange(300) * factor).expand(size, -1))


def test_a_rank_that_is_gone_is_a_node_error():
    with thread_ranks(2) as members:
        members[1]._peers[0].close()
        with pytest.raises(NodeError, match="another rank"):
            members[0].all_reduce(torch.zeros(3))


def test_collectives_of_a_group_stay_on_the_stream_of_the_caller():
    given = []

    class Group:
        def rank(self) -> int:
            return 0

        def size(self) -> int:
            return 1

        def allreduce(self, tensors: list[Tensor], options: Any) -> Any:
            given.append(options.asyncOp)
            return SimpleNamespace(wait=lambda: None)

        def _allgather_base(self, parts: Tensor, tensor: Tensor, options: Any) -> Any:
            parts.copy_(tensor)
            return self.allreduce([parts], options)

    for is_ordered in (False, True):
        ranks = GroupRanks(Group(), is_ordered=is_ordered)
        assert ranks.all_reduce(torch.ones(2, 3)).sum() == 6
        assert ranks.all_gather(torch.ones(2, 3)).shape == (2, 3)
    assert given == [False] * 4


@pytest.mark.release
def test_a_process_group_sums_alike_and_replays_the_same_collectives_on_every_rank():
    memory = os.memfd_create("group")
    try:
        children = [
            subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    group_rank.__name__,
                    str(rank),
                    "2",
                    str(memory),
                ],
                cwd=REPOSITORY,
                pass_fds=(memory,),
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        said = [child.communicate(timeout=300)[0] for child in children]
    finally:
        os.close(memory)
    shown = [json.loads(one) for one in said]
    for way in ("any", "ordered"):
        assert (
            shown[0][way]
            == shown[1][way]
            == {
                "sum": [[10, 12, 14], [16, 18, 20]],
                "gathered": [[0, 1, 2, 10, 11, 12], [3, 4, 5, 13, 14, 15]],
                "none": [0, 6],
                "least": 6,
                "is_batch_invariant": way == "ordered",
            }
        )
    assert shown[0]["calls"] == shown[1]["calls"] != []
    tokens, num_replays = group_rank.said()
    assert num_replays == group_rank.NUM_STEPS
    for one in shown:
        assert one["num_replays"] == num_replays
        assert one["said"] == json.loads(json.dumps(tokens))


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_ranks_that_do_not_meet_are_one_line(backend):
    if backend == "nccl" and torch.distributed.is_nccl_available():
        pytest.skip("this torch has NCCL, which would look for a GPU")
    device = torch.device("cuda" if backend == "nccl" else "cpu")
    memory = os.memfd_create("group")
    other = os.memfd_create("other")
    try:
        with pytest.raises(
            NodeError, match=f"rank 0 of 2 could not meet .* over {backend}"
        ) as one:
            join(device, (0, 2), memory, 1.0, is_ordered=False)
        assert "\n" not in one.value.message
        # The error keeps torch's store alive, which writes again as it ends.
        os.dup2(other, memory)
        del one
        gc.collect()
        assert os.fstat(other).st_size == 0, (
            "the store wrote to what had the number later"
        )
    finally:
        os.close(memory)
        os.close(other)
