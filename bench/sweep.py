"""`baton bench sweep`: one load after the other at several rates, from the lowest up.

Every load has prompts of its own, so that none profits from what an earlier one left in a prefix
cache. The report then shows attainment, goodput and latencies against the rate.
"""

from baton.bench.experiment import Experiment
from baton.bench.planning import shaped
from baton.bench.settings import SweepSettings
from baton.protocol.errors import ConfigError


def sweep(settings: SweepSettings) -> int:
    """Return the exit code."""
    rates = rates_of(settings.rates)
    arrivals = [shaped(settings.shape, rate) for rate in rates]
    with Experiment("sweep", settings, arrivals) as experiment:
        server = experiment.connect_alone(", by rate")
        experiment.note_repeated_prompts()
        for place, rate in enumerate(rates):
            experiment.put(experiment.case(server, place, f"{rate:g}/s", arrivals[place]))
            if experiment.interrupted:
                break
    return experiment.finish(len(rates))


def rates_of(text: str) -> list[float]:
    """Return the rates in ascending order, each once. Raises `ConfigError`."""
    try:
        rates = sorted({float(part) for part in text.split(",") if part.strip()})
    except ValueError:
        rates = []
    if not rates or not all(0 < rate < float("inf") for rate in rates):
        raise ConfigError(f"--rates {text!r}: write requests/s as 1,2,4,8")
    return rates
