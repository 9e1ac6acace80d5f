"""Judge by the time of a read between two GPUs whether it took a fast lane.

UCX takes the fastest lane that it can use and does not report which one. If it can use neither
NVLink nor PCIe peer access, it copies GPU memory through the host or sends it by TCP: everything
works, but many times more slowly. `nixl` times one read of each pair of GPUs and calls this file,
which is pure.
"""

import msgspec

TIMED_BYTES = 64 << 20
LEAST_BYTES = 4 << 20  # of a pool; reading less would mostly measure how long a read takes to start
LEAST_BYTES_PER_S = 10e9  # PCIe 4.0 reaches 20, NVLink hundreds, and TCP on one host 1 to 3


class TimedRead(msgspec.Struct, frozen=True):
    """A read that has begun: its two devices and its size."""

    owner: str
    reader: str
    is_one_host: bool
    num_bytes: int
    begun_s: float


def complaint(read: TimedRead, seconds: float) -> str:
    """Return a warning about a read that took `seconds`; empty if nothing looks wrong.

    Reads between hosts are not judged, because the speed of the network is unknown.
    """
    if not read.is_one_host or read.num_bytes < LEAST_BYTES:
        return ""
    rate = read.num_bytes / max(seconds, 1e-9)
    if rate >= LEAST_BYTES_PER_S:
        return ""
    least = LEAST_BYTES_PER_S / 1e9
    return (
        f"nixl reads {read.owner} of its peer into {read.reader} at {rate / 1e9:.2g} GB/s, where "
        f"GPUs of one host should reach {least:.0f}: UCX went through host "
        "memory or TCP and not over NVLink or PCIe; leave UCX_TLS unset, let containers share the "
        "host's ipc and pid namespaces, and see the lane with UCX_PROTO_INFO=y"
    )
