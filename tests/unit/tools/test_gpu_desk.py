"""What the GPU benchmark's sections share: what there is time for, how replays are timed, sizes."""

from collections.abc import Callable

import pytest
import torch

from baton.engine.sampler import NUCLEUS_CANDIDATES
from tools.gpu import engine, split
from tools.gpu.cases import KERNELS, QWEN3_06B, STEPS, CopyCase, SamplingCase
from tools.gpu.rows import Check, Event, Measured, Unreached
from tools.gpu.section import Desk
from tools.gpu.timing import Stopwatch, replay_s

H200_L2_BYTES = 60 << 20


def desk_with(left_s: float) -> tuple[Desk, list[Event]]:
    events: list[Event] = []
    return Desk(Stopwatch(torch.device("cpu")), events.append, lambda: 0.0, left_s), events


def test_what_there_is_no_time_for_is_not_begun_and_said() -> None:
    desk, events = desk_with(4.9)
    begun: list[str] = []

    def refuse() -> Measured:
        begun.append("row")
        raise AssertionError

    def refuse_check() -> Check:
        begun.append("check")
        raise AssertionError

    desk.measure(Measured("row", "ms"), refuse)
    desk.check("check", refuse_check)
    engine.run(desk, STEPS[:2])
    keys = ["row", "check", engine.AGREES, *(case.key for case in STEPS[:2])]
    assert events == [Unreached(key) for key in keys]
    assert not begun


def test_a_case_that_raises_is_a_row_with_an_error() -> None:
    desk, events = desk_with(60.0)

    def fail() -> Measured:
        raise RuntimeError("no kernel\nimage")

    desk.measure(Measured("row", "ms"), fail)
    assert events == [Measured("row", "ms", error="RuntimeError: no kernel image")]


def test_a_model_that_fits_by_its_sizes_but_cannot_be_built_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def build(*_: object) -> None:
        raise torch.OutOfMemoryError("in use by others")

    monkeypatch.setattr(engine, "build", build)
    monkeypatch.setattr(engine, "agreement", lambda _: Check(engine.AGREES, True, ""))
    desk, events = desk_with(60.0)
    engine.run(desk, STEPS[:1])
    assert STEPS[0].shape == QWEN3_06B
    assert events[1:] == [Measured(STEPS[0].key, "ms", error="in use by others")]


def test_a_split_server_that_left_no_record_of_a_hand_over_is_an_error() -> None:
    desk, events = desk_with(60.0)
    split.report_handovers(desk, split.SplitPlan(device="cpu", prompts=(40,)), [])
    assert events == [
        Measured("hand-over overhead, 40 tokens", "ms", error="no record of a hand-over")
    ]


def test_replays_are_timed_on_a_device_that_is_busy_already(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    queued: list[str] = []

    class Event:
        """Takes note of the order; what it tells is in milliseconds, as CUDA's."""

        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            queued.append("event")

        def elapsed_time(self, _: "Event") -> float:
            return 6.0

    class Graph:
        replay: Callable[[], None] = staticmethod(lambda: queued.append("replay"))

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: queued.append("wait"))
    assert replay_s(Graph(), 2) == pytest.approx(6e-3)  # type: ignore[arg-type]
    assert queued == ["replay", "event", "replay", "replay", "event", "wait"]


@pytest.mark.parametrize("case", KERNELS.copies, ids=lambda case: str(case.key))
def test_a_staging_buffer_has_left_the_l2_before_it_is_used_again(case: CopyCase) -> None:
    block_bytes = 2 * KERNELS.block_values
    num_calls, num_buffers = case.rotation(block_bytes)
    assert num_buffers <= num_calls
    assert num_buffers * case.num_blocks * block_bytes > 2 * H200_L2_BYTES


TOP_P_ALONE = [case for case in KERNELS.sampling if case.top_p < 1 and not case.top_k]


@pytest.mark.parametrize("case", TOP_P_ALONE, ids=lambda case: str(case.key))
def test_only_sampling_from_a_usual_nucleus_has_a_target(case: SamplingCase) -> None:
    torch.manual_seed(0)
    largest = 0
    for _ in range(case.batch):
        logits = case.spread * torch.randn(KERNELS.vocab_size)
        sums = (logits / case.temperature).softmax(0).sort(descending=True).values.cumsum(0)
        largest = max(largest, int((sums < case.top_p).sum()) + 1)
    assert (case.target is not None) == (largest <= NUCLEUS_CANDIDATES), largest
