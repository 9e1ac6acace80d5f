"""Whether blocks can travel from one node to another, as far as both have said. Pure.

Routers ask before they choose a pair, and nodes before they connect. An older node does not say in
which ways its pool can be read; then the two may try.
"""

from baton.protocol.messages import NodeInfo


def pair_problem(prefill: NodeInfo, decode: NodeInfo) -> str | None:
    """Return in a phrase why `decode` can never read from `prefill`; None if it may."""
    return degree_problem(prefill, decode) or transport_problem(prefill, decode)


def degree_problem(prefill: NodeInfo, decode: NodeInfo) -> str | None:
    return degrees_problem(len(prefill.ranks), len(decode.ranks))


def degrees_problem(num_prefill: int, num_decode: int) -> str | None:
    """Return why these numbers of ranks do not fit; a description of a cluster has no more."""
    if num_prefill == num_decode:
        return None
    return (
        f"prefill with {num_prefill} ranks cannot feed decode with {num_decode}: "
        "reads of part of a block are not supported yet; give both nodes the same tensor_parallel"
    )


def transport_problem(prefill: NodeInfo, decode: NodeInfo) -> str | None:
    if not prefill.reaches or not decode.reaches or {*prefill.reaches} & {*decode.reaches}:
        return None
    return (
        f"no common transport: {prefill.node_id} has {', '.join(prefill.reaches)}, "
        f"{decode.node_id} has {', '.join(decode.reaches)}; nodes on different hosts need NIXL: "
        "pip install -e '.[nixl]' on both"
    )
