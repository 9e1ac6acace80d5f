"""Which rows of a step decode, and which are a prompt's."""

import pytest
import torch

from baton.model.runner.packing import (
    ALL_DECODE_ROWS,
    DECODE_ROWS,
    ModelFacts,
    PackedStep,
    Packer,
)
from baton.node.scheduling.plan import Slice, StepPlan
from baton.protocol.ids import Key, RequestId

PROMPT = 12


def part(number: int, start: int, length: int) -> Slice:
    """Tokens of a sequence whose prompt has `PROMPT`."""
    blocks = tuple(range(16))
    return Slice(
        Key(RequestId(str(number))),
        start,
        length,
        (7,) * length,
        blocks,
        num_prompt_tokens=PROMPT,
    )


def packed(*spans: tuple[int, int], head_guesses: int | None = None) -> PackedStep:
    """Pack slices that start somewhere and have some tokens."""
    packer = Packer(ModelFacts(4, ()), None, lambda size: torch.full((size,), -7))
    packer.head_guesses = head_guesses
    slices = tuple(part(number, *span) for number, span in enumerate(spans))
    return packer.pack(StepPlan(1, slices))


@pytest.mark.parametrize(
    ("start", "length", "decodes"),
    [
        (PROMPT, 1, True),
        (PROMPT, 4, True),
        (PROMPT - 1, 4, True),
        # What is left of a prompt is no response, however short it is.
        (PROMPT - 2, 2, False),
        (PROMPT - 2, 3, False),
        (0, 2, False),
        # A response that is computed again.
        (PROMPT, DECODE_ROWS, True),
        (PROMPT, DECODE_ROWS + 1, False),
    ],
)
def test_several_rows_decode_by_their_position(start, length, decodes):
    step = packed((start, length))
    assert (step.num_decoding, step.num_more_rows) == (
        (1, length - 1) if decodes else (0, 0)
    )


def test_what_follows_a_prompt_goes_with_it():
    step = packed((20, 1), (14, 1), (15, 4), (12, 2), (0, 5), (15, 2))
    assert (step.num_decoding, step.num_more_rows) == (4, 4)


def test_as_many_rows_decode_as_the_kernels_take():
    step = packed(*[(PROMPT, DECODE_ROWS)] * 20)
    assert step.num_decoding == ALL_DECODE_ROWS // DECODE_ROWS
    step = packed(*[(PROMPT, 1)] * 600, (PROMPT, 2))
    assert (step.num_decoding, step.num_more_rows) == (600, 0)
    step = packed(*[(PROMPT, 17)] * 30, *[(0, 1)] * 700)
    assert step.num_decoding + step.num_more_rows == ALL_DECODE_ROWS
    step = packed(*[(0, 1)] * 700)
    assert step.num_decoding == 700
    step = packed(*[(0, 1)] * 700, head_guesses=3)
    assert step.num_decoding == ALL_DECODE_ROWS // 2, "a head may have two rows of each"
