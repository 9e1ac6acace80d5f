"""Show the progress of a cluster's start: a spinner on a terminal, plain lines elsewhere.

`serve` and `baton up` use it. The lines of child processes pass through it too, so that they do not
tear the spinner apart. It decides nothing.
"""

import sys
import threading
from collections.abc import Mapping

from rich.console import Console
from rich.status import Status
from rich.text import Text

from baton.runtime.log import is_json, logger, relayed

log = logger("serve")


class StartProgress:
    """Display the phase of each process, and the lines of children around the spinner."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._status: Status | None = None
        self._lock = threading.Lock()
        self._shown: dict[str, str] = {}
        if sys.stderr.isatty() and not is_json():
            self._status = self._console.status("starting")
            self._status.start()

    def show(self, phases: Mapping[str, str]) -> None:
        """Show `phases`: the name of each process, and its phase of the start."""
        with self._lock:
            if self._status is not None:
                text = "   ".join(f"{name}: {phase}" for name, phase in phases.items())
                self._status.update(Text(text or "starting"))
                return
            for name, phase in phases.items():
                # Counts change often; a line per phase is enough for a log.
                words = phase.rstrip("0123456789/ ")
                if self._shown.get(name) != words:
                    self._shown[name] = words
                    if is_json():
                        log.info("starting", node=name, phase=words)
                    else:
                        print(f"{name}: {words}", file=sys.stderr, flush=True)

    def relay(self, name: str, line: str) -> None:
        self.line(relayed(name, line))

    def line(self, text: str) -> None:
        """Print one line on stderr."""
        with self._lock:
            if self._status is None:
                print(text, file=sys.stderr, flush=True)
            else:
                # rich prints the lines that go through its console above the spinner.
                self._console.print(Text(text), soft_wrap=True)

    def stop(self) -> None:
        """Remove the spinner; later lines are printed as they are. Idempotent."""
        with self._lock:
            if self._status is not None:
                self._status.stop()
                self._status = None
