"""The owner's side of shm, which passes the pool's descriptor to readers that know its nonce.

Only `shm` uses it, on the agent's thread. Every process in this network namespace can connect to an
abstract socket, so a connection has to prove itself: its process must be this user's or root's, and
its first packet must be the nonce, which only travels over authenticated control channels. A
connection that proves nothing is closed soon, and cannot keep a reader out.
"""

import contextlib
import os
import secrets
import select
import socket
import struct

from baton.kv_transfer.host_pool import NONCE_BYTES, HostPool
from baton.runtime.channels.wire import Alarm
from baton.runtime.clock import monotonic

BACKLOG = 4096  # the kernel reduces it to its own limit
MAX_READERS = 1024  # connections that have the pool, one for each rank that reads it
MAX_UNPROVEN = 32  # the oldest makes room
PROVE_S = 5.0  # a reader sends the nonce when it connects
ACCEPTED_AT_ONCE = 64  # after this number, the agent's other work has its turn
PAUSE_S = 0.2  # while the process has no descriptors, a watched listener would spin
_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid


class PoolLender:
    """Lends one pool. Watch `fileno`, and call `service` whenever it is readable."""

    def __init__(self, pool: HostPool) -> None:
        self._pool = pool
        self.name = f"baton-{secrets.token_hex(8)}"
        self._readers: dict[int, socket.socket] = {}
        self._unproven: dict[int, tuple[socket.socket, float]] = {}  # the oldest first
        self._paused_until_s: float | None = None
        self._alarm = Alarm()
        self._poller = select.epoll()
        self._listener = unix_socket()
        self._listener.bind("\0" + self.name)
        self._listener.listen(BACKLOG)
        self._poller.register(self._listener, select.EPOLLIN)
        self._poller.register(self._alarm, select.EPOLLIN)

    def fileno(self) -> int:
        return self._poller.fileno()

    def service(self) -> None:
        """Accept connections, answer readers, and close connections that ended or stay silent."""
        now_s = monotonic()
        if self._paused_until_s is not None and self._paused_until_s <= now_s:
            self._paused_until_s = None
            self._poller.register(self._listener, select.EPOLLIN)
        for descriptor, _ in self._poller.poll(0):
            if descriptor == self._listener.fileno():
                self._accept_some()
            elif descriptor in self._unproven:
                self._prove(descriptor)
            elif descriptor in self._readers:
                self._drop(descriptor)  # a reader sends nothing more, so it has disconnected
        for descriptor, (_, since_s) in list(self._unproven.items()):
            if since_s + PROVE_S <= now_s:
                self._drop(descriptor)
        self._set_alarm(now_s)

    def close(self) -> None:
        for descriptor in [*self._unproven, *self._readers]:
            self._drop(descriptor)
        self._listener.close()
        self._alarm.close()
        self._poller.close()

    # --- inside --------------------------------------------------------------------------------

    def _accept_some(self) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                reader, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError:  # no descriptor is left, so a connection that proved nothing makes room
                if not self._unproven:
                    self._paused_until_s = monotonic() + PAUSE_S
                    self._poller.unregister(self._listener)
                    return
                self._drop(next(iter(self._unproven)))
                continue
            if not is_trusted(reader) or len(self._readers) >= MAX_READERS:
                reader.close()
                continue
            if len(self._unproven) >= MAX_UNPROVEN:
                self._drop(next(iter(self._unproven)))
            reader.setblocking(False)
            self._unproven[reader.fileno()] = (reader, monotonic())
            self._poller.register(reader, select.EPOLLIN)
            self._prove(reader.fileno())  # the nonce has usually arrived with the connection

    def _prove(self, descriptor: int) -> None:
        """Pass on the pool for the right nonce, and close the connection for anything else."""
        reader, _ = self._unproven[descriptor]
        with contextlib.suppress(OSError):
            try:
                said = reader.recv(NONCE_BYTES + 1)
            except BlockingIOError:
                return
            if secrets.compare_digest(said, self._pool.nonce):
                socket.send_fds(reader, [b"pool"], [self._pool.fileno()])
                self._readers[descriptor] = reader
                del self._unproven[descriptor]
                return
        self._drop(descriptor)

    def _drop(self, descriptor: int) -> None:
        reader = self._readers.pop(descriptor, None) or self._unproven.pop(descriptor)[0]
        self._poller.unregister(reader)
        reader.close()

    def _set_alarm(self, now_s: float) -> None:
        """Set the time to close the oldest connection without proof, or to end a pause."""
        times = [since_s + PROVE_S for _, since_s in self._unproven.values()][:1]
        if self._paused_until_s is not None:
            times.append(self._paused_until_s)
        self._alarm.set(min(times) - now_s if times else None)


def is_trusted(link: socket.socket) -> bool:
    """Return whether the process at the other end is one of this user's or root's."""
    data = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(data)
    return uid in (os.geteuid(), 0)


def unix_socket() -> socket.socket:
    return socket.socket(
        socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
    )
