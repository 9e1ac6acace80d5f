"""Commands of platforms, such as `kubectl`, `squeue` and `systemctl`, run to their end.

The platforms call it. A failed question is asked again, because a late answer must not end a
cluster; an order is given only once. Ctrl-C does not reach the command, so its effect is always
known.
"""

import subprocess
import time
from collections.abc import Sequence

from baton.protocol.errors import ConfigError, NodeError

# The pause before a question is asked again.
PAUSES_S = (0.5, 1.0, 2.0)


def order(words: Sequence[str], missing: str, fine: Sequence[str] = ()) -> str:
    """Run a command that changes something and return what it prints.

    Raises `ConfigError` with `missing` if there is no such program, and `NodeError` if it fails,
    unless its message contains one of `fine`.
    """
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, check=False, start_new_session=True
        )
    except FileNotFoundError:
        raise ConfigError(f"{words[0]} is not installed here: {missing}") from None
    if done.returncode != 0 and not any(one in done.stderr for one in fine):
        lines = done.stderr.strip().splitlines()
        # systemctl prints a hint after the reason.
        why = [line for line in lines if not line.startswith("See ")] or lines
        raise NodeError(why[-1] if why else f"exit code {done.returncode}")
    return done.stdout


def question(words: Sequence[str], missing: str, fine: Sequence[str] = ()) -> str:
    """Do as `order` for a command that changes nothing; if it fails, repeat it a few times."""
    for pause_s in PAUSES_S:
        try:
            return order(words, missing, fine)
        except NodeError:
            time.sleep(pause_s)
    return order(words, missing, fine)
