"""An output that repeats itself ends where vLLM's documentation says, which a plain loop checks."""

import random

import pytest

from baton.node.scheduling.plan import NO_ROUTER
from baton.node.scheduling.request import Request
from baton.node.scheduling.scheduler import NodeLimits
from baton.protocol.errors import RequestError
from baton.protocol.messages import Decode, FinishReason
from baton.protocol.sampling import RepetitionDetectionParams, SamplingParams
from tests.support.drive import key, sampling
from tests.support.refusals import raises

LIMITS = NodeLimits(max_num_batched_tokens=16, max_num_seqs=2, max_model_len=1000)
PROMPT = [1, 2, 1, 2, 1, 2]


def ends_in_repetition(output: list[int], params: RepetitionDetectionParams) -> bool:
    """The rule, size by size."""
    for size in range(max(params.min_pattern_size, 1), params.max_pattern_size + 1):
        num_tokens = size * params.min_count
        tail = output[-num_tokens:]
        if len(output) >= num_tokens and tail == tail[:size] * params.min_count:
            return True
    return False


def end_of(
    output: list[int],
    params: RepetitionDetectionParams,
    max_tokens: int = 900,
    min_tokens: int = 0,
) -> tuple[int, FinishReason | None]:
    """Return after how many tokens a node ends an output, and why."""
    wanted = sampling(max_tokens, min_tokens=min_tokens, repetition_detection=params)
    message = Decode(key(), [*PROMPT], len(PROMPT), wanted)
    sequence = Request.of(message, NO_ROUTER, 0.0).prompt
    for index, token_id in enumerate(output, 1):
        reason = sequence.finish_reason(token_id, LIMITS)
        if reason is not None:
            return index, reason
        sequence.token_ids.append(token_id)
    return len(output), None


def test_random_outputs_end_with_their_first_repetition():
    luck = random.Random(7)
    num_ended = 0
    for _ in range(400):
        largest = luck.randint(1, 9)
        smallest = luck.randint(0, largest)
        params = RepetitionDetectionParams(largest, smallest, luck.randint(2, 4))
        output = [luck.randint(1, 3) for _ in range(60)]
        prefixes = range(1, len(output) + 1)
        ends = (end for end in prefixes if ends_in_repetition(output[:end], params))
        first = next(ends, None)
        expected = (len(output), None) if first is None else (first, "repetition")
        assert end_of(output, params) == expected
        num_ended += first is not None
    assert 100 < num_ended < 390


def test_a_prompt_is_no_part_of_a_repetition():
    assert end_of([1, 2], RepetitionDetectionParams(2, 2, 2)) == (2, None)


def test_a_repetition_ends_nothing_before_min_tokens_and_the_limit_comes_first():
    params = RepetitionDetectionParams(1, 1, 3)
    assert end_of([5] * 9, params) == (3, "repetition")
    assert end_of([5] * 9, params, min_tokens=7) == (7, "repetition")
    assert end_of([5] * 9, params, max_tokens=3) == (3, "length")


@pytest.mark.parametrize("sizes", [(0, 0, 0), (0, 0, 5)])
def test_a_largest_size_of_0_detects_nothing(sizes):
    assert end_of([5] * 9, RepetitionDetectionParams(*sizes)) == (9, None)


@pytest.mark.parametrize(
    "sizes", [(2, 3, 2), (3, 1, 1), (-1, 0, 2), (1025, 1, 2), ("3", 0, 2)]
)
def test_what_fits_no_pattern_is_refused(sizes):
    with raises(RequestError, "invalid_request", "repetition_detection"):
        SamplingParams(repetition_detection=RepetitionDetectionParams(*sizes))
