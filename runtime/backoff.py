"""The delays between attempts at something that failed.

Supervisors use it before they restart a child, and nodes before they ask a router again. This file
is pure.
"""


class Backoff:
    """The delay before the next attempt. It doubles each time, and starts anew after a good run."""

    def __init__(
        self, first_s: float = 0.5, longest_s: float = 30.0, good_run_s: float = 60.0
    ) -> None:
        self._first_s, self._longest_s, self._good_run_s = first_s, longest_s, good_run_s
        self._next_s = first_s

    def after(self, ran_s: float) -> float:
        """Return the delay after a run of `ran_s`."""
        if ran_s >= self._good_run_s:
            self._next_s = self._first_s
        delay_s, self._next_s = self._next_s, min(2 * self._next_s, self._longest_s)
        return delay_s
