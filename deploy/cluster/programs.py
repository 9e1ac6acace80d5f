"""Commands of platforms, such as `kubectl`, `squeue` and `systemctl`, run to their end.

The platforms call it. A question that fails is asked again, because an answer that is late must not
end a cluster; an order is given once. Ctrl-C does not reach the command, so that what it has begun
is known.
"""

import subprocess
import time
from collections.abc import Sequence

from baton.protocol.errors import ConfigError, NodeError

# Between the times that a question is asked.
PAUSES_S = (0.5, 1.0, 2.0)


def order(words: Sequence[str], missing: str, fine: Sequence[str] = ()) -> str:
    """Run a command that changes something and return what it prints.

    Raises `ConfigError` with `missing` if there is no such program and `NodeError` if it fails,
    unless it complains of something `fine`.
    """
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, check=False, start_new_session=True
        )
    except FileNotFoundError:
        raise ConfigError(f"{words[0]} is not installed here: {missing}") from None
    if done.returncode != 0 and not any(one in done.stderr for one in fine):
        lines = done.stderr.strip().splitlines()
        # systemctl puts where to look further behind the reason.
        why = [line for line in lines if not line.startswith("See ")] or lines
        raise NodeError(why[-1] if why else f"exit code {done.returncode}")
    return done.stdout


def question(words: Sequence[str], missing: str, fine: Sequence[str] = ()) -> str:
    """As `order`, for a command that changes nothing: one that fails is run again, a few times."""
    for pause_s in PAUSES_S:
        try:
            return order(words, missing, fine)
        except NodeError:
            time.sleep(pause_s)
    return order(words, missing, fine)
