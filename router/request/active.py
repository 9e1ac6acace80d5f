"""One request in the router's hands: its lifecycle and its caller's stream. Held by `core`."""

from dataclasses import dataclass

from baton.protocol.ids import RequestId
from baton.router.request.lifecycle import Lifecycle
from baton.router.stream import RequestStream


@dataclass(slots=True, eq=False)
class Active:
    """A request, from `submit` until no node has anything left to do or confirm for it."""

    request_id: RequestId
    lifecycle: Lifecycle
    stream: RequestStream
    began_s: float
    is_broken: bool = False
