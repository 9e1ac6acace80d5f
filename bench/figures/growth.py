"""Find a queue that grew from the first request of a load to the last: the load outran its server.

`validity.py` warns of it, and a search takes such a run as failed, because its figures say how long
the run was. A burst, a slow start and chance do not count as growth. Pure.
"""

import math
from collections.abc import Sequence

import numpy as np

from baton.bench.figures.metrics import Window, counted, measure
from baton.bench.records import Outcome, Record

NUM_BINS = 10
MIN_REQUESTS = 50
MIN_T = 3.0  # about one run in a hundred without growth has a slope of so many errors
MIN_FACTOR = 1.5  # last third of the arrivals over the first


def find_growth(records: Sequence[Record], window: Window | None) -> str:
    """Return a line about a queue that grew throughout; empty without one, or with few requests.

    Both figures have to grow: TTFT alone rises with longer prompts, requests in flight with longer
    answers.
    """
    arrived = counted(records, window)
    if len(arrived) < MIN_REQUESTS:
        return ""
    moments = np.array([record.intended_s for record in arrived])
    ttfts_ms = np.array([_ttft_ms(record) for record in arrived])
    # Requests that arrived before the window may still be in flight within it.
    every = counted(records, None)
    begun = np.searchsorted(np.sort([one.intended_s for one in every]), moments, "right")
    ended = np.searchsorted(np.sort([one.end_s for one in every]), moments, "right")
    waits = [part[~np.isnan(part)] for part in np.array_split(ttfts_ms, NUM_BINS)]
    if not all(len(part) for part in waits):
        return ""
    wait_ms = [float(part.mean()) for part in waits]
    in_flight = [float(part.mean()) for part in np.array_split(begun - ended, NUM_BINS)]
    if not (_grows(wait_ms) and _grows(in_flight)):
        return ""
    (first_ms, last_ms), (first, last) = _ends(wait_ms), _ends(in_flight)
    return (
        f"the load outran the server: over the run TTFT grew from {first_ms:.0f} to {last_ms:.0f} "
        f"ms and requests in flight from {first:.1f} to {last:.1f}, so a longer run would measure "
        "worse figures"
    )


def slope_in_errors(ys: Sequence[float]) -> float:
    """Return the slope of the least-squares line through points at equal distances, three at least.

    It is measured in its own standard errors, as Student's t, and very large if the line is exact.
    """
    if max(ys) == min(ys):
        return 0.0
    r = float(np.corrcoef(np.arange(len(ys)), ys)[0, 1])
    return r * math.sqrt((len(ys) - 2) / max(1 - r * r, 1e-13))


def _grows(means: Sequence[float]) -> bool:
    first, last = _ends(means)
    return slope_in_errors(means) > MIN_T and last > MIN_FACTOR * first


def _ends(means: Sequence[float]) -> tuple[float, float]:
    """Return the means of the first and the last third."""
    third = len(means) // 3
    return float(np.mean(means[:third])), float(np.mean(means[-third:]))


def _ttft_ms(record: Record) -> float:
    ttft_ms = measure(record).ttft_ms if record.outcome is Outcome.ANSWERED else None
    return ttft_ms or math.nan
