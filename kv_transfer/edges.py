"""Which rank reads which attention heads from which rank: a pure function of two degrees.

Called by the connector when it meets a peer, and by tests. Heads are numbered over the whole model.
A rank holds a contiguous range of them; where a degree exceeds the number of heads, several ranks
hold the same head, and the lowest of them serves all readers.
"""

import msgspec

from baton.protocol.errors import TransferError


class Edge(msgspec.Struct, frozen=True, order=True):
    """`target_rank` reads heads [first_head, first_head + num_heads) from `source_rank`."""

    source_rank: int
    target_rank: int
    first_head: int
    num_heads: int


def edges(source_tp: int, target_tp: int, num_kv_heads: int) -> tuple[Edge, ...]:
    """All reads that fill every target rank once, by target rank and head.

    Raises `TransferError` for degrees of which neither divides the other, and for a degree that
    does not share `num_kv_heads` evenly.
    """
    _check_degrees(source_tp, target_tp)
    found: list[Edge] = []
    for target in range(target_tp):
        first, end = heads_of(target, target_tp, num_kv_heads)
        while first < end:
            source = _lowest_holder(first, source_tp, num_kv_heads)
            stop = min(end, heads_of(source, source_tp, num_kv_heads)[1])
            found.append(Edge(source, target, first, stop - first))
            first = stop
    return tuple(found)


def heads_of(rank: int, tp: int, num_kv_heads: int) -> tuple[int, int]:
    """The heads [first, end) that `rank` of `tp` ranks holds."""
    if tp <= num_kv_heads and num_kv_heads % tp == 0:
        per_rank = num_kv_heads // tp
        return rank * per_rank, (rank + 1) * per_rank
    if tp % num_kv_heads == 0:
        head = rank // (tp // num_kv_heads)
        return head, head + 1
    raise TransferError(f"{tp} ranks cannot share {num_kv_heads} KV heads evenly")


def source_ranks(source_tp: int, target_tp: int) -> tuple[int, ...]:
    """For each target rank the one rank from which it reads whole blocks.

    Today's reads name whole blocks, so the degrees must be equal. Raises `TransferError`.
    """
    _check_degrees(source_tp, target_tp)
    if source_tp != target_tp:
        raise TransferError(
            f"prefill with {source_tp} ranks cannot feed decode with {target_tp}: reads of part of "
            "a block are not supported yet; give both nodes the same tensor_parallel",
            code="peer_mismatch",
        )
    return tuple(range(target_tp))


def _check_degrees(source_tp: int, target_tp: int) -> None:
    if min(source_tp, target_tp) < 1 or max(source_tp, target_tp) % min(source_tp, target_tp) != 0:
        raise TransferError(
            f"tensor-parallel degrees must divide one another, {source_tp} and {target_tp} do not",
            code="peer_mismatch",
        )


def _lowest_holder(head: int, tp: int, num_kv_heads: int) -> int:
    if tp <= num_kv_heads:
        return head // (num_kv_heads // tp)
    return head * (tp // num_kv_heads)
