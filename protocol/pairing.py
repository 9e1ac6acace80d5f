"""Decide whether blocks can travel from one node to another, by what both have published.

A pair with a node that does not publish how its pool can be read may try.
"""

from baton.protocol.messages import NodeInfo


def pair_problem(prefill: NodeInfo, decode: NodeInfo) -> str | None:
    """Return a phrase that says why `decode` can never read from `prefill`; None if it may try."""
    return tp_size_problem(prefill, decode) or transport_problem(prefill, decode)


def tp_size_problem(prefill: NodeInfo, decode: NodeInfo) -> str | None:
    """Return why the ranks of `decode` cannot divide the blocks of `prefill` among themselves."""
    num_prefill = len(prefill.ranks)
    num_decode = len(decode.ranks)
    if problem := degrees_problem(num_prefill, num_decode):
        return problem
    kv_heads = prefill.layout.kv_heads
    for node in (prefill, decode):
        if num_prefill != num_decode and not _can_share(node, kv_heads):
            return (
                f"{node.node_id} publishes {node.layout.kv_heads} KV heads for its ranks, so reads "
                "of part of its blocks cannot be named; give both nodes the same "
                "tensor_parallel_size"
            )
    ours = prefill.layout.block_bytes
    theirs = decode.layout.block_bytes
    heads = kv_heads or num_prefill
    if ours * min(num_prefill, heads) != theirs * min(num_decode, heads):
        return (
            f"blocks of {prefill.node_id} have {ours} bytes on each of {num_prefill} ranks, blocks "
            f"of {decode.node_id} {theirs} on each of {num_decode}: they hold different heads"
        )
    return None


def degrees_problem(num_prefill: int, num_decode: int) -> str | None:
    """Return why these numbers of ranks do not fit, before more is known about the nodes."""
    fewer, more = sorted((num_prefill, num_decode))
    if fewer == more or (fewer and more % fewer == 0):
        return None
    return (
        f"prefill with {num_prefill} ranks cannot feed decode with {num_decode}: choose values of "
        "tensor_parallel_size of which one divides the other"
    )


def transport_problem(prefill: NodeInfo, decode: NodeInfo) -> str | None:
    if (
        not prefill.reaches
        or not decode.reaches
        or {*prefill.reaches} & {*decode.reaches}
    ):
        return None
    return (
        f"no common transport: {prefill.node_id} has {', '.join(prefill.reaches)}, "
        f"{decode.node_id} has {', '.join(decode.reaches)}; nodes on different hosts need NIXL: "
        "pip install -e '.[nixl]' on both"
    )


def _can_share(node: NodeInfo, kv_heads: int) -> bool:
    """Return whether the node publishes that many KV heads and its ranks can divide them."""
    num_ranks = len(node.ranks)
    if node.layout.kv_heads != kv_heads or not kv_heads:
        return False  # the node does not say
    return kv_heads % num_ranks == 0 or num_ranks % kv_heads == 0
