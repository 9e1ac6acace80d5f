"""Whether two nodes can exchange KV blocks, by what they publish about themselves.

Pure. Nodes and routers call it, so that both come to the same answer.
"""

from baton.protocol.messages import NodeInfo


def pair_problem(prefill: NodeInfo, decode: NodeInfo) -> str | None:
    """Return why `decode` can never read the blocks of `prefill`; None if it may.

    A node that does not say how its pool can be reached is given the benefit of the doubt.
    """
    if len(prefill.ranks) != len(decode.ranks):
        return f"prefill has {len(prefill.ranks)} ranks, decode {len(decode.ranks)}"
    if prefill.reaches and decode.reaches and not set(prefill.reaches) & set(decode.reaches):
        ways = (", ".join(sorted(node.reaches)) for node in (prefill, decode))
        return "no common transport: prefill offers {}, decode {}".format(*ways)
    return None
