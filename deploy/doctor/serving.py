"""Ask a router about its nodes and their transfers, without moving any block."""

from urllib.parse import urlsplit

from baton.deploy.doctor.findings import Finding, fault, ok, warning
from baton.deploy.health import HealthReply, NodeReply, PairReply, TransferReply, ask_health


def check_router(url: str) -> list[Finding]:
    """Return a finding for each node, and for each pair of nodes that has exchanged blocks."""
    health = ask_health(url if urlsplit(url).scheme else f"http://{url}")
    if health is None:
        return [
            fault("router", f"no answer from {url}: see that it runs, and that its port is open")
        ]
    return serving_findings(health)


def serving_findings(health: HealthReply) -> list[Finding]:
    avoided = {(one.prefill_node, one.decode_node): one for one in health.pairs}
    findings = [_node(node) for node in health.nodes]
    findings += [
        fault(f"node {one.node_id}", f"lost {one.lost_s:.0f} s ago: read its log and start it")
        for one in health.lost
    ]
    for one in health.transfers:
        pair = avoided.pop((one.prefill_node, one.decode_node), None)
        findings.append(_pair(one, pair))
    findings += [_pair(TransferReply(*names), pair) for names, pair in avoided.items()]
    if not health.nodes:
        findings.append(fault("nodes", "no node has joined: start some, and see their logs"))
    return findings


def _node(node: NodeReply) -> Finding:
    check = f"node {node.node_id}"
    if node.state == "ready":
        said = ", ".join(filter(None, (node.role, node.device, node.dtype, node.transports)))
        return ok(check, said)
    bad = warning if node.state in ("starting", "draining") else fault
    return bad(check, f"{node.doing}{f': {node.reason}' if node.reason else ''}")


def _pair(one: TransferReply, avoided: PairReply | None) -> Finding:
    check = f"{one.decode_node} reads {one.prefill_node}"
    if avoided is not None:
        return fault(check, f"avoided: {avoided.reason}; check the network between the two hosts")
    rate = f"{one.num_bytes / one.transfer_s / 1e9:.2f} GB/s" if one.transfer_s else "no bytes"
    said = f"{one.num_handoffs} handoffs, {one.num_failures} failed, {rate} when blocks move"
    return (warning if one.num_failures else ok)(check, said)
