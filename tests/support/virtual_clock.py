"""A clock that a test moves by hand."""


class VirtualClock:
    """A `Clock` that only moves when told to."""

    def __init__(self, start_s: float = 0.0) -> None:
        self.now_s = start_s

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> float:
        """Move on by `seconds` and return the new time; time never goes back."""
        if seconds < 0:
            raise ValueError(f"a clock cannot go back by {-seconds} s")
        self.now_s += seconds
        return self.now_s
