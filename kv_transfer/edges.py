"""Decide which rank of a decode node reads which part of which prefill rank's blocks.

The peer table calls it once for each pair of processes. A block holds its KV heads one after
another, each with all of its layers, so the heads that two ranks share are one run of bytes in each
block. One degree divides the other (`protocol.pairs`), so this run has the same length for all
ranks. This file is pure.
"""

import msgspec

from baton.kv_transfer.interfaces import BlockPiece
from baton.protocol.messages import NodeInfo


class Edge(msgspec.Struct, frozen=True):
    """Rank `target` of decode reads `piece` of every block of rank `source` of prefill."""

    source: int
    target: int
    piece: BlockPiece
    num_pieces: int  # in a block of `source`

    @property
    def sums_row(self) -> int:
        """Return the row in which a span lists the checksums of this piece.

        Rows are ordered by rank of prefill, then by heads.
        """
        return self.source * self.num_pieces + self.piece.remote_offset // self.piece.num_bytes


def edges_between(prefill: NodeInfo, decode: NodeInfo) -> list[Edge]:
    """Return every read that one block needs, ordered by rank of decode and then by heads.

    `pairs.degree_problem` must have found no problem with the two nodes. Nodes of equal degree read
    rank by rank. If several ranks hold the same head, each serves its share of that head's readers.
    """
    num_sources, num_targets = len(prefill.ranks), len(decode.ranks)
    if num_sources == num_targets:
        whole = BlockPiece(0, 0, decode.layout.block_bytes)
        return [Edge(rank, rank, whole, 1) for rank in range(num_targets)]
    kv_heads = prefill.layout.kv_heads
    # The number of ranks that hold different heads. If there are more ranks, neighbours hold the
    # same heads.
    sources, targets = min(num_sources, kv_heads), min(num_targets, kv_heads)
    source_copies, target_copies = num_sources // sources, num_targets // targets
    num_reads, num_pieces = max(1, sources // targets), max(1, targets // sources)
    num_bytes = decode.layout.block_bytes // num_reads
    edges = []
    for target in range(num_targets):
        part, copy = divmod(target, target_copies)
        for number in range(num_reads):
            source = (part * sources // targets + number) * source_copies
            source += copy * source_copies // target_copies
            remote_offset = part % num_pieces * num_bytes
            piece = BlockPiece(remote_offset, number * num_bytes, num_bytes)
            edges.append(Edge(source, target, piece, num_pieces))
    return edges
