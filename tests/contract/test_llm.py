"""`LLM` as a script uses it, over toy nodes that live on its own event loop."""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from baton import LLM, SamplingParams
from baton.protocol.config import CacheConfig, ClusterConfig
from baton.protocol.errors import BatonError, ConfigError, NodeError, RequestError
from baton.router.async_llm import AsyncLLM
from baton.runtime.process import Exit
from tests.support.scripted_nodes import VOCAB_SIZE, ToyNode, node_info, toy_answer
from tests.support.small_tokenizers import write_tokenizer

GREEDY = SamplingParams(temperature=0, max_tokens=6)


class ToyCluster:
    """What `deploy.local` is to processes."""

    def __init__(self, config: ClusterConfig, endpoint: str) -> None:
        self._config = config
        self._endpoint = endpoint
        self._loop = asyncio.get_running_loop()
        self._nodes: list[ToyNode] = []

    def start(self) -> None:
        infos = [node_info(f"p{i}", "prefill") for i in range(self._config.prefill)]
        infos += [node_info(f"d{i}", "decode") for i in range(self._config.decode)]
        self._nodes = [ToyNode(self._endpoint, info) for info in infos]
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


def test_importing_baton_loads_no_torch_and_names_its_public_classes() -> None:
    script = (
        "import sys, baton; from baton import LLM, AsyncLLM, SamplingParams; "
        "assert 'torch' not in sys.modules; assert set(baton.__all__) <= set(dir(baton)) | "
        "{'LLM', 'AsyncLLM', 'SamplingParams'}; print(AsyncLLM.__module__)"
    )
    out = subprocess.check_output([sys.executable, "-c", script], text=True, timeout=60)
    assert out.strip() == AsyncLLM.__module__
