"""Record what a rank's steps do with torch's profiler, as a trace for Perfetto or Chrome.

The profiler sees the thread that begins it, so the thread that launches steps makes every call.
"""

import tempfile
import threading
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from baton.node.scheduling.plan import StepPlan
from baton.protocol.config import ClusterConfig
from baton.protocol.ids import Epoch
from baton.runtime.log import logger

log = logger("profiler")


class StepProfiler:
    """At most one profile at a time. Its errors are logged and never end a step."""

    def __init__(self, config: ClusterConfig, epoch: Epoch, rank: int = 0) -> None:
        self._folder = config.log.records
        self._suffix = f"-{config.node.id or epoch}-rank{rank}.json"
        self._name = ""
        self._profile: profile | None = None

    def step(self, plan: StepPlan) -> AbstractContextManager[object]:
        """Return the context of a step, which is a named range of the trace."""
        if self._profile is None:
            return nullcontext()
        num_tokens = sum(part.length for part in plan.slices)
        return record_function(f"step {plan.step_id}: {num_tokens} tokens")

    def turn(self, name: str) -> None:
        """Begin the profile `name`, after writing one that runs; an empty name only does that."""
        try:
            if self._profile is not None:
                self._end()
            if name:
                self._begin(name)
        except RuntimeError:
            self._profile = None
            log.exception("the profile failed", profile=name or self._name)

    def _begin(self, name: str) -> None:
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        found = profile(activities=activities)
        found.start()
        self._name = name
        self._profile = found
        log.info("the profile begins", profile=name)

    def _end(self) -> None:
        assert self._profile is not None
        found = self._profile
        self._profile = None
        found.stop()
        # A long trace takes seconds to write: the next steps must not wait for it, the end must.
        threading.Thread(target=self._write, args=(found, self._name)).start()

    def _write(self, found: profile, name: str) -> None:
        try:
            folder = Path(self._folder or tempfile.mkdtemp(prefix="baton-profile-"))
            path = folder / f"{name}{self._suffix}"
            part = path.with_suffix(".part")
            found.export_chrome_trace(str(part))
            part.rename(path)
        except (OSError, RuntimeError):
            log.exception("the trace was not written", profile=name)
        else:
            log.info("wrote the trace of a profile", profile=name, file=str(path))
