"""Which rank reads which heads: every head once, from a rank that holds it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.kv_transfer.edges import Edge, edges, heads_of, source_ranks
from baton.protocol.errors import TransferError

POWERS = st.sampled_from([1, 2, 4, 8, 16])


@given(POWERS, POWERS, POWERS)
def test_every_target_rank_gets_each_of_its_heads_once(source: int, target: int, num: int) -> None:
    found = edges(source, target, num)
    assert list(found) == sorted(found, key=lambda edge: (edge.target_rank, edge.first_head))
    for rank in range(target):
        mine = [edge for edge in found if edge.target_rank == rank]
        heads = [h for e in mine for h in range(e.first_head, e.first_head + e.num_heads)]
        assert heads == list(range(*heads_of(rank, target, num)))


@given(POWERS, POWERS, POWERS)
def test_a_source_holds_what_is_read_from_it_and_no_lower_rank_does(
    source: int, target: int, num: int
) -> None:
    for edge in edges(source, target, num):
        holders = [
            rank
            for rank in range(source)
            if heads_of(rank, source, num)[0] <= edge.first_head < heads_of(rank, source, num)[1]
        ]
        assert edge.source_rank == holders[0]
        assert edge.first_head + edge.num_heads <= heads_of(edge.source_rank, source, num)[1]


def test_two_ranks_feed_one_and_one_feeds_two() -> None:
    assert edges(2, 1, 4) == (Edge(0, 0, 0, 2), Edge(1, 0, 2, 2))
    assert edges(1, 2, 4) == (Edge(0, 0, 0, 2), Edge(0, 1, 2, 2))


def test_of_replicated_heads_the_lowest_rank_serves() -> None:
    assert [edge.source_rank for edge in edges(4, 4, 2)] == [0, 0, 2, 2]


@pytest.mark.parametrize(("source", "target", "num"), [(2, 3, 6), (0, 1, 1), (4, 4, 6)])
def test_degrees_that_do_not_fit_are_refused(source: int, target: int, num: int) -> None:
    with pytest.raises(TransferError):
        edges(source, target, num)


def test_whole_blocks_are_read_from_the_same_rank_and_only_at_equal_degrees() -> None:
    assert source_ranks(4, 4) == (0, 1, 2, 3)
    with pytest.raises(TransferError, match="same tensor_parallel"):
        source_ranks(2, 4)
