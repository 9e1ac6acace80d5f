"""`LLM` and `AsyncLLM` as scripts use them, over toy nodes that live on their own event loop."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from baton import LLM, AsyncLLM, SamplingParams
from baton.protocol.config import CacheConfig, ClusterConfig, ModelConfig
from baton.protocol.errors import BatonError, Cancelled, ConfigError, NodeError, RequestError
from baton.runtime.process import Exit
from baton.started_nodes import Launcher
from tests.support.scripted_nodes import VOCAB_SIZE, ToyNode, node_info, toy_answer
from tests.support.small_tokenizers import Family, write_tokenizer

READY_S = 60.0
GREEDY = SamplingParams(temperature=0, max_tokens=6)


class ToyCluster:
    """What `LocalCluster` is to processes."""

    max_steps: int | None = None  # of the decode nodes

    def __init__(self, config: ClusterConfig, endpoint: str) -> None:
        self._config = config
        self._endpoint = endpoint
        self._loop = asyncio.get_running_loop()
        self._nodes: list[ToyNode] = []

    def start(self) -> None:
        prefills = [node_info(f"p{i}", "prefill") for i in range(self._config.prefill)]
        decodes = [node_info(f"d{i}", "decode") for i in range(self._config.decode)]
        self._nodes = [ToyNode(self._endpoint, info) for info in prefills]
        self._nodes += [ToyNode(self._endpoint, info, self.max_steps) for info in decodes]
        for node in self._nodes:
            node.join()

    def poll(self) -> list[Exit]:
        for node in self._nodes:
            node.beat()
        return []

    def stop(self) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(10.0)

    async def _end(self) -> None:
        for node in self._nodes:
            node.die()


class BrokenCluster(ToyCluster):
    def start(self) -> None:
        raise NodeError("cannot start")


class StalledCluster(ToyCluster):
    """Each decode node stops after two steps."""

    max_steps = 2


class StillbornCluster(ToyCluster):
    """One of the nodes ends at once."""

    def start(self) -> None:
        self._exits = [Exit("decode-0", 1, ("no such model",), 1, 0.5)]

    def poll(self) -> list[Exit]:
        exits, self._exits = self._exits, []
        return exits


def toy_llm(folder: Path, **settings: object) -> LLM:
    return LLM(model=write_tokenizer(folder / "model"), launcher=ToyCluster, **settings)


def test_a_quickstart_script_runs_as_it_stands(tmp_path: Path) -> None:
    llm = toy_llm(tmp_path)
    prompts = ["xyz", "abc abc", "q"]
    sampling_params = SamplingParams(temperature=0.8, top_p=0.95)
    outputs = llm.generate(prompts, sampling_params)
    for output, prompt in zip(outputs, prompts, strict=True):
        assert output.prompt == prompt
        assert output.finished
        assert output.outputs[0].token_ids == toy_answer(output.prompt_token_ids, 16)
        assert isinstance(output.outputs[0].text, str)
    llm.shutdown()
    llm.shutdown()


def test_outputs_come_in_the_order_of_their_prompts(tmp_path: Path) -> None:
    with toy_llm(tmp_path, prefill=2, decode=2, router={"max_inflight": 3}) as llm:
        lengths = [40, 1, 17, 3, 28, 2, 9, 5]
        prompts = [[number % VOCAB_SIZE, 1, 2] for number in range(len(lengths))]
        params = [SamplingParams(temperature=0, max_tokens=length) for length in lengths]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        for output, prompt, length in zip(outputs, prompts, lengths, strict=True):
            assert output.prompt_token_ids == prompt
            assert output.outputs[0].token_ids == toy_answer(prompt, length)


def test_prompts_may_be_text_ids_or_dicts_alone_or_in_lists(tmp_path: Path) -> None:
    with toy_llm(tmp_path) as llm:
        ids = llm.get_tokenizer().encode_now("xyz")
        forms = [
            llm.generate("xyz", GREEDY, use_tqdm=False),
            llm.generate(ids, GREEDY, use_tqdm=False),
            llm.generate({"prompt": "xyz"}, GREEDY, use_tqdm=False),
            llm.generate([{"prompt_token_ids": ids}], GREEDY, use_tqdm=False),
        ]
        for (output,) in forms:
            assert output.outputs[0].token_ids == toy_answer(ids, 6)
        assert llm.generate([], GREEDY, use_tqdm=False) == []
        assert len(llm.generate("xyz", use_tqdm=False)[0].outputs[0].token_ids) == 16


def test_the_progress_bar_is_shown_on_the_error_stream_only_when_wanted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with toy_llm(tmp_path) as llm:
        llm.generate(["xyz", "q"], GREEDY)
        shown = capsys.readouterr()
        assert "Processed prompts" in shown.err
        assert "2/2" in shown.err
        assert "12 output tokens" in shown.err
        assert shown.out == ""
        llm.generate(["xyz"], GREEDY, use_tqdm=False)
        assert capsys.readouterr().err == ""


def test_a_bad_prompt_is_an_error_and_the_next_call_works(tmp_path: Path) -> None:
    with toy_llm(tmp_path) as llm:
        with pytest.raises(RequestError, match="empty"):
            llm.generate([[1, 2], []], GREEDY, use_tqdm=False)
        with pytest.raises(ValueError, match="2 prompts"):
            llm.generate(["a", "b"], [GREEDY], use_tqdm=False)
        (output,) = llm.generate([[1, 2]], GREEDY, use_tqdm=False)
        assert output.outputs[0].token_ids == toy_answer([1, 2], 6)


def test_settings_are_those_of_the_cluster_and_checked(tmp_path: Path) -> None:
    with toy_llm(tmp_path, cache=CacheConfig(block_size=8), decode=2) as llm:
        assert (llm.config.cache.block_size, llm.config.decode) == (8, 2)
        assert llm.get_model_config().max_model_len == 200
        assert llm.get_model_config().name == "model"
    with pytest.raises(ConfigError, match="decod"):
        toy_llm(tmp_path, decod=2)
    with pytest.raises(ConfigError, match="model"):
        LLM(launcher=ToyCluster)
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        LLM(model=str(tmp_path), launcher=ToyCluster)


def test_what_cannot_start_raises_and_what_was_shut_down_says_so(tmp_path: Path) -> None:
    model = write_tokenizer(tmp_path / "model")
    with pytest.raises(NodeError, match="cannot start"):
        LLM(model=model, launcher=BrokenCluster)
    with toy_llm(tmp_path) as llm:
        pass
    with pytest.raises(BatonError, match="shut down"):
        llm.generate("xyz", GREEDY, use_tqdm=False)


@asynccontextmanager
async def toy_async_llm(
    folder: Path, launcher: Launcher = ToyCluster, family: Family = "byte_level"
) -> AsyncIterator[AsyncLLM]:
    model = ModelConfig(path=write_tokenizer(folder / "model", family))
    llm = AsyncLLM.from_config(ClusterConfig(model=model), launcher=launcher)
    await llm.start()
    try:
        await llm.ready(READY_S)
        assert llm.is_running
        yield llm
    finally:
        await llm.shutdown()
        assert not llm.is_running
        assert not llm.errored


def test_an_abort_by_name_ends_the_reader_and_frees_the_name(tmp_path: Path) -> None:
    async def use() -> None:
        async with toy_async_llm(tmp_path, StalledCluster) as llm:
            reader = llm.generate([1, 2], GREEDY, request_id="mine")
            await anext(reader)
            with pytest.raises(RequestError, match="in use"):
                await anext(llm.generate([1, 2], GREEDY, request_id="mine"))
            await llm.abort("mine")
            with pytest.raises(Cancelled):
                async for _ in reader:
                    pass
            await llm.abort("mine")
            again = llm.generate([1, 2], GREEDY, request_id="mine")
            output = await anext(again)
            assert output.request_id == "mine"
            assert output.outputs[0].token_ids[:1] == toy_answer([1, 2], 1)
            await again.aclose()

    asyncio.run(use())


def test_an_abort_while_the_prompt_is_tokenized_is_not_forgotten(tmp_path: Path) -> None:
    async def use() -> None:
        async with toy_async_llm(tmp_path, family="word_piece") as llm:
            # So long that another thread encodes it, but few tokens.
            reader = llm.generate("hello world " * 20, GREEDY, request_id="mine")
            first = asyncio.ensure_future(anext(reader))
            await asyncio.sleep(0)  # the reader waits for a thread of the tokenizer now
            await llm.abort("mine")
            with pytest.raises(Cancelled):
                await first

    asyncio.run(use())


def test_nodes_that_die_at_their_start_are_told_to_all_who_wait(tmp_path: Path) -> None:
    async def use() -> None:
        model = ModelConfig(path=write_tokenizer(tmp_path / "model"))
        llm = AsyncLLM.from_config(ClusterConfig(model=model), launcher=StillbornCluster)
        await llm.start()
        try:
            with pytest.raises(NodeError, match="no such model"):
                await llm.ready(READY_S)
            assert llm.errored
            with pytest.raises(NodeError, match="no such model"):
                await anext(llm.generate([1, 2], GREEDY))
        finally:
            await llm.shutdown()

    asyncio.run(use())


def test_importing_baton_loads_no_torch_and_names_its_public_classes() -> None:
    script = (
        "import sys, baton; from baton import LLM, AsyncLLM, SamplingParams; "
        "assert 'torch' not in sys.modules; assert set(baton.__all__) <= set(dir(baton)) | "
        "{'LLM', 'AsyncLLM', 'SamplingParams'}; print(AsyncLLM.__module__)"
    )
    out = subprocess.check_output([sys.executable, "-c", script], text=True, timeout=60)
    assert out.strip() == AsyncLLM.__module__
