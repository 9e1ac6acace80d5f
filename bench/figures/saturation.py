"""Whether a load outran the server: requests in flight and TTFT that grow throughout a run.

`validity` warns of it and a search takes such a run as failed, because figures of a queue that
grows say how long the run was. A burst, a slow start and chance do not count as growth.
"""

from collections.abc import Sequence

import msgspec
import numpy as np

from baton.bench.figures.metrics import Window, counted, measure
from baton.bench.figures.paired import Trend, trend
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
    """None where nothing grows, or where too few requests arrived in the window to say so.

    Both figures have to grow: TTFT alone rises with longer prompts, requests in flight with longer
    answers.
    """
    arrived = counted(records, window)
    if len(arrived) < MIN_REQUESTS:
        return None
    # Those that arrived before the window may still be in flight within it.
    every = counted(records, None)
    sent_s = np.sort([record.intended_s for record in every])
    ended_s = np.sort([record.end_s for record in every])
    waits: list[float] = []
    in_flight: list[float] = []
    for part in np.array_split(np.arange(len(arrived)), NUM_BINS):
        own = [arrived[index] for index in part]
        ttfts = [
            ttft_ms
            for record in own
            if record.outcome is Outcome.ANSWERED and (ttft_ms := measure(record).ttft_ms)
        ]
        if not ttfts:
            return None
        waits.append(float(np.mean(ttfts)))
        moments = np.array([record.intended_s for record in own])
        at_once = np.searchsorted(sent_s, moments, "right") - np.searchsorted(
            ended_s, moments, "right"
        )
        in_flight.append(float(at_once.mean()))
    if not (_grows(waits) and _grows(in_flight)):
        return None
    third = NUM_BINS // 3
    return Growth(
        float(np.mean(waits[:third])),
        float(np.mean(waits[-third:])),
        float(np.mean(in_flight[:third])),
        float(np.mean(in_flight[-third:])),
    )


def _grows(means: Sequence[float]) -> bool:
    found: Trend | None = trend(range(len(means)), means)
    third = len(means) // 3
    first, last = float(np.mean(means[:third])), float(np.mean(means[-third:]))
    return found is not None and found.t > MIN_T and last > MIN_FACTOR * first
