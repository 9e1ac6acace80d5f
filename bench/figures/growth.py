"""Whether a load outran its server: a queue that grew from the first request to the last.

`validity.py` warns of it, and a search takes such a run as failed, because its figures say how long
the run was. A burst, a slow start and chance do not count as growth. Pure.
"""

import math
from collections.abc import Sequence

import msgspec
import numpy as np

from baton.bench.figures.metrics import Window, counted, measure
from baton.bench.records import Outcome, Record

NUM_BINS = 10
MIN_REQUESTS = 50
MIN_T = 3.0  # about one run in a hundred without growth has a slope of so many errors
MIN_FACTOR = 1.5  # last third of the arrivals over the first


class Growth(msgspec.Struct, frozen=True):
    """Means of the first and the last third of the arrivals."""

    first_ttft_ms: float
    last_ttft_ms: float
    first_in_flight: float
    last_in_flight: float

    @property
    def line(self) -> str:
        return (
            "the load outran the server: over the run TTFT grew from "
            f"{self.first_ttft_ms:.0f} to {self.last_ttft_ms:.0f} ms and requests in flight from "
            f"{self.first_in_flight:.1f} to {self.last_in_flight:.1f}, so a longer run would "
            "measure worse figures"
        )


def find_growth(records: Sequence[Record], window: Window | None) -> Growth | None:
    """Find a queue that grew throughout; None also where too few requests arrived to say so.

    Both figures have to grow: TTFT alone rises with longer prompts, requests in flight with longer
    answers.
    """
    arrived = counted(records, window)
    if len(arrived) < MIN_REQUESTS:
        return None
    moments = np.array([record.intended_s for record in arrived])
    ttfts_ms = np.array([_ttft_ms(record) for record in arrived])
    # Requests that arrived before the window may still be in flight within it.
    every = counted(records, None)
    begun = np.searchsorted(np.sort([one.intended_s for one in every]), moments, "right")
    ended = np.searchsorted(np.sort([one.end_s for one in every]), moments, "right")
    waits = [part[~np.isnan(part)] for part in np.array_split(ttfts_ms, NUM_BINS)]
    if not all(len(part) for part in waits):
        return None
    wait_ms = [float(part.mean()) for part in waits]
    in_flight = [float(part.mean()) for part in np.array_split(begun - ended, NUM_BINS)]
    if not (_grows(wait_ms) and _grows(in_flight)):
        return None
    return Growth(*_ends(wait_ms), *_ends(in_flight))


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
    third = len(means) // 3
    return float(np.mean(means[:third])), float(np.mean(means[-third:]))


def _ttft_ms(record: Record) -> float:
    ttft_ms = measure(record).ttft_ms if record.outcome is Outcome.ANSWERED else None
    return ttft_ms or math.nan
