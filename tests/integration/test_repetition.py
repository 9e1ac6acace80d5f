"""A model that goes in circles is stopped at the same token split and aggregated, and says why."""

import pytest

from baton import AsyncLLM, RepetitionDetectionParams, SamplingParams
from baton.router.outputs import CompletionOutput
from tests.support.checkpoints import model_folder, tiny_cluster
from tests.support.node_threads import NodeThreads, always_local, never_local
from tests.support.oracle import prompt

FREE = SamplingParams(
    temperature=0,
    max_tokens=200,
    ignore_eos=True,
    allowed_token_ids=[70, 71],
    output_kind="final",
)
CIRCLES = RepetitionDetectionParams(
    max_pattern_size=20, min_pattern_size=1, min_count=3
)


async def said(llm: AsyncLLM, params: SamplingParams) -> CompletionOutput:
    async for output in llm.generate(prompt(40), params):
        last = output
    (choice,) = last.outputs
    return choice


async def free_and_stopped(llm: AsyncLLM) -> tuple[CompletionOutput, CompletionOutput]:
    return await said(llm, FREE), await said(
        llm, FREE.clone(repetition_detection=CIRCLES)
    )


@pytest.mark.parametrize("place", [never_local, always_local])
def test_an_output_ends_with_its_first_repetition(place, tmp_path):
    config = tiny_cluster(model_folder("llama"), cache={"num_blocks": 100})
    free, stopped = NodeThreads(tmp_path, place(config)).run(free_and_stopped)
    ends = [
        end
        for end in range(1, len(free.token_ids) + 1)
        for size in range(1, 21)
        if end >= 3 * size
        and free.token_ids[end - 3 * size : end] == free.token_ids[end - size : end] * 3
    ]
    assert stopped.token_ids == free.token_ids[: ends[0]]
    assert (stopped.finish_reason, stopped.stop_reason) == (
        "repetition",
        "repetition_detected",
    )
    assert (free.finish_reason, free.stop_reason) == ("length", None)
