"""The address that a dialer connects to: a fixed one, or the one that a file holds now.

`dialer` uses it. A file, written `file:///path`, serves listeners that may move to another host
while their dialers run, as routers do under Ray. Its writer replaces it as a whole, and it is read
again when it changes. This module never opens a connection.
"""

from collections.abc import Callable
from pathlib import Path

from baton.protocol.errors import ConfigError
from baton.runtime.channels.endpoint import Endpoint, bindable
from baton.runtime.channels.keys import Keys
from baton.runtime.clock import monotonic
from baton.runtime.file_state import state_of
from baton.runtime.log import logger

SCHEME = "file://"
# A changed file takes effect within this time.
LOOK_AGAIN_S = 1.0
MAX_FILE_BYTES = 4096

log = logger("channel")


class Destination:
    """The address of a listener. Only one thread may use it."""

    def __init__(self, text: str, keys: Keys, clock: Callable[[], float] = monotonic) -> None:
        """Raises `ConfigError` if the address cannot be dialled, or must not be without a key."""
        self._text = text
        self._keys = keys
        self._clock = clock
        self._file = Path(text.removeprefix(SCHEME)) if text.startswith(SCHEME) else None
        self._state = state_of(self._file) if self._file else None
        self._look_at_s = clock() + LOOK_AGAIN_S
        self.address = self._read()

    @property
    def look_in_s(self) -> float | None:
        """Return for how long the address cannot change; None means for ever."""
        return max(0.0, self._look_at_s - self._clock()) if self._file else None

    def has_moved(self) -> bool:
        """Return whether `address` has changed since the last call, after looking once a second."""
        if self._file is None or self._clock() < self._look_at_s:
            return False
        self._look_at_s = self._clock() + LOOK_AGAIN_S
        state, before = state_of(self._file), self.address
        if state == self._state:
            return False
        self._state = state
        try:
            self.address = self._read()
        except ConfigError as error:
            log.warning(f"the address {before} stays in use", reason=error.message)
        return self.address != before

    def _read(self) -> Endpoint:
        address = address_in(self._text)
        self._keys.check(address, "dialling")
        _ = address.dial_endpoint  # raises for an address that only a listener could use
        return address


def address_in(text: str) -> Endpoint:
    """Return the address `text`, or the one in the file that it names. Raises `ConfigError`."""
    if not text.startswith(SCHEME):
        return bindable(text)
    path = Path(text.removeprefix(SCHEME))
    try:
        with path.open() as file:
            return bindable(file.read(MAX_FILE_BYTES).strip())
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "the file is not text"
        raise ConfigError(f"cannot read the address of a router from {path}: {reason}") from error
