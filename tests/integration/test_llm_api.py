"""`LLM` and `AsyncLLM` as users call them, over real node processes."""

import json
import re
import subprocess
import sys
import time

import psutil
import pytest

from baton import LLM, LoRARequest, SamplingParams
from baton.deploy.model_folder import CHECKPOINT
from baton.protocol.errors import ConfigError, RequestError
from baton.router.outputs import RequestOutput
from tests.support.adapters import write_adapter
from tests.support.refusals import raises
from tests.support.sources import REPOSITORY
from tests.support.waiting import until

# What each example of docs/python.md prints, among other things.
EXAMPLES = (
    "42.",
    "8153.",
    "3 choices",
    "True ready",
    "128 True",
    "context_length_exceeded",
)
GONE_TIMEOUT_S = 30.0
PROMPT = list(range(20, 60))
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("records")


@pytest.fixture(scope="module")
def llm(folder):
    """The demo model, which needs no argument, with arguments of vLLM."""
    keywords = {
        "dtype": "float32",
        "max_model_len": 256,
        "tensor_parallel_size": 1,
        "seed": 3,
    }
    folders = [write_adapter(CHECKPOINT, rank=rank, seed=rank) for rank in (4, 8)]
    modules = [f"{rank}={folder}" for rank, folder in zip((4, 8), folders, strict=True)]
    nested = {"router": {"local_prefill": "never"}, "log": {"records": str(folder)}}
    with LLM(**keywords, **nested, lora_modules=modules) as started:
        yield started


def test_the_offline_programs_of_vllm_run_with_another_import_and_leave_no_process():
    file = REPOSITORY / "tests" / "examples" / "offline.py"
    script = subprocess.Popen(
        [sys.executable, str(file)], stdout=subprocess.PIPE, text=True
    )
    # And what they run for a moment while they start.
    nodes: set[psutil.Process] = set()
    assert script.stdout is not None
    with script.stdout as lines:
        while len(nodes) < 2 and script.poll() is None:
            nodes.update(psutil.Process(script.pid).children(recursive=True))
            time.sleep(0.01)
        printed = lines.read()
    assert script.wait(60.0) == 0
    assert "Generated text: '42" in printed
    assert "cached tokens: 0 128 0" in printed
    assert len(nodes) >= 2
    assert psutil.wait_procs(list(nodes), timeout=GONE_TIMEOUT_S)[1] == []


def test_generating_twice_gives_the_same_greedy_tokens_and_reuses_the_prefix(llm):
    first, again = (llm.generate(PROMPT, GREEDY, use_tqdm=False)[0] for _ in range(2))
    assert len(first.outputs[0].token_ids) == 40
    assert first.outputs[0] == again.outputs[0]
    assert (first.metrics.num_cached_tokens, again.metrics.num_cached_tokens) == (0, 32)
    assert first.metrics.path == "disaggregated"
    assert first.metrics.transfer_bytes > 0


def test_prompts_share_cached_blocks_only_with_those_of_the_same_salt(llm):
    ids = list(range(120, 160))

    def asked(**given: str) -> RequestOutput:
        return llm.generate({"prompt_token_ids": ids, **given}, GREEDY, use_tqdm=False)[
            0
        ]

    salted = [asked(cache_salt=salt) for salt in ("a", "a", "b")]
    outputs = [*salted, asked(), asked()]
    assert [one.num_cached_tokens for one in outputs] == [0, 32, 0, 0, 32]
    assert all(one.outputs == outputs[0].outputs for one in outputs)
    with raises(RequestError, "invalid_request", "cache_salt"):
        asked(cache_salt="")


def test_adapters_run_beside_each_other_and_share_no_blocks(llm):
    ids = list(range(70, 110))
    adapters = [None, LoRARequest("4"), LoRARequest("8", 2)]
    together = llm.generate([ids] * 3, GREEDY, use_tqdm=False, lora_request=adapters)
    tokens = [output.outputs[0].token_ids for output in together]
    assert len(set(map(tuple, tokens))) == 3
    for adapter, expected in zip(adapters, tokens, strict=True):
        (alone,) = llm.generate(ids, GREEDY, use_tqdm=False, lora_request=adapter)
        assert alone.outputs[0].token_ids == expected
        assert alone.num_cached_tokens == 32
    wrong = {
        "2": ("", "name=folder"),
        "4": ("/elsewhere", "two adapters"),
        "5": ("/no", "cannot"),
    }
    for name, (folder, reason) in wrong.items():
        with pytest.raises(ConfigError, match=reason):
            llm.generate(
                ids, GREEDY, use_tqdm=False, lora_request=LoRARequest(name, 1, folder)
            )
    # One that is named at its first use, as programs for vLLM do it.
    third = LoRARequest("third", 3, str(write_adapter(CHECKPOINT, rank=8, seed=2)))
    outputs = llm.generate(
        [ids] * 2, GREEDY, use_tqdm=False, lora_request=[third, adapters[1]]
    )
    assert outputs[0].outputs[0].token_ids not in tokens
    assert outputs[1].outputs[0].token_ids == tokens[1]


def test_many_prompts_of_many_lengths_are_answered_each_as_if_alone(llm):
    prompts = [[30 + i] * (1 + 13 * i) for i in range(12)]
    params = [
        SamplingParams(temperature=0, max_tokens=1 + i, ignore_eos=True)
        for i in range(12)
    ]
    together = llm.generate(prompts, params, use_tqdm=False)
    for prompt, wanted, output in zip(prompts, params, together, strict=True):
        (alone,) = llm.generate(prompt, wanted, use_tqdm=False)
        assert alone.outputs == output.outputs
        assert len(output.outputs[0].token_ids) == wanted.max_tokens


def test_a_chat_ends_where_the_model_ends_it(llm):
    told = (
        "The code of Lima is 4071. The code of Oslo is 2210. What is the code of Lima?"
    )
    params = SamplingParams(temperature=0, max_tokens=32)
    (answer,) = llm.chat([{"role": "user", "content": told}], params, use_tqdm=False)
    assert "4071" in answer.outputs[0].text
    assert answer.outputs[0].finish_reason == "stop"
    assert llm.get_tokenizer().decode(answer.prompt_token_ids) == answer.prompt
    assert (llm.get_model_config().name, llm.get_model_config().max_model_len) == (
        "demo",
        256,
    )


def test_a_profile_is_a_trace_of_each_nodes_steps(llm, folder):
    profile = llm.start_profile()
    llm.generate(PROMPT, GREEDY, use_tqdm=False)
    assert llm.stop_profile() == profile
    with raises(RequestError, "no_profile"):
        llm.stop_profile()
    files = [folder / f"{profile.name}-{node}-rank0.json" for node in profile.nodes]
    until(lambda: all(file.exists() for file in files))
    for file in files:
        names = [event["name"] for event in json.loads(file.read_text())["traceEvents"]]
        assert any(re.fullmatch(r"step \d+: \d+ tokens", name) for name in names)
        assert any(name.startswith("aten::") for name in names)
    assert len(files) == 2


@pytest.mark.release
def test_the_examples_of_the_documentation_run(tmp_path):
    page = (REPOSITORY / "docs" / "python.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    for block, printed in zip(blocks, EXAMPLES, strict=True):
        script = tmp_path / "example.py"
        script.write_text(block)
        done = subprocess.run(
            [sys.executable, str(script)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert printed in done.stdout
