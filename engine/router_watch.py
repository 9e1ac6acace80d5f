"""Log, at long intervals, which routers a node cannot find, and why.

The beat thread calls it, because that thread runs from the start of a node to its end. Names are
looked up in a separate thread, because a slow name server must not delay the beats.
"""

import socket
import threading
from dataclasses import dataclass
from typing import Protocol

from baton.protocol.errors import ConfigError
from baton.runtime.channels.endpoint import bindable
from baton.runtime.log import logger

FIRST_S = 5.0
LONGEST_S = 600.0

log = logger("node")


class RouterLink(Protocol):
    """The part of a dialer that `RouterWatch` needs."""

    endpoint: str
    connected: bool
    refusals: int


@dataclass(slots=True)
class _Absence:
    """Since when a router has been missing, and when that is logged (again)."""

    tell_at_s: float
    wait_s: float = FIRST_S
    was_told: bool = False


class RouterWatch:
    def __init__(self) -> None:
        self._absences: dict[str, _Absence] = {}

    def look(self, now_s: float, router: RouterLink) -> None:
        """Note whether a router answers. Log its absence after 5 s, then at growing intervals."""
        absence = self._absences.get(router.endpoint)
        if router.connected:
            if absence is not None:
                del self._absences[router.endpoint]
                if absence.was_told:
                    log.info("found the router", router=router.endpoint)
            return
        if absence is None:
            self._absences[router.endpoint] = _Absence(now_s + FIRST_S)
            return
        if now_s < absence.tell_at_s or router.refusals:  # the node's channel reports refusals
            return
        absence.was_told = True
        absence.wait_s = min(absence.wait_s * 4, LONGEST_S)
        absence.tell_at_s = now_s + absence.wait_s
        threading.Thread(target=tell, args=(router.endpoint,), name="lookup", daemon=True).start()


def tell(endpoint: str) -> None:
    """Log that a router does not answer, and why, if this host can find out."""
    reason = "nothing answers there"
    try:
        address = bindable(endpoint)
        if address.host:
            socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except ConfigError as error:
        reason = error.message
    except OSError:
        reason = "name does not resolve"
    log.warning(f"waiting for router {endpoint}: {reason}")
