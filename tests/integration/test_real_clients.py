"""The tools that people use with a server, installed from PyPI and judged by what they report.

Each runs in an environment of its own, which adds its packages to those of these tests. Of `vllm
bench serve` only the client is run, from the file of vLLM's wheel: the rest needs gigabytes.
"""

import json
import os
import re
import shutil
import site
import subprocess
import venv
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from baton.deploy.model_folder import CHECKPOINT
from tests.support.checkpoints import model_folder, tiny_cluster
from tests.support.cluster import Cluster
from tests.support.compute import Text, compute_config, greedy, loaded, logits
from tests.support.oracle import Oracle, count_ties, prompt

pytestmark = [pytest.mark.release, pytest.mark.timeout(900)]

INSTALL_S = 600.0
RUN_S = 200.0
NUM_REQUESTS = 4
TEXT = "What is 17 + 25?"

OPENAI = f"""
import sys, openai, pydantic

class Weather(pydantic.BaseModel):
    sunny: bool

says = [{{"role": "user", "content": {TEXT!r}}}]
asked = {{"model": "tiny", "temperature": 0}}
function = {{"name": "tell", "parameters": Weather.model_json_schema()}}
with openai.OpenAI(base_url=sys.argv[1] + "/v1", api_key="none", max_retries=0) as client:
    chat = client.chat.completions
    whole = chat.create(messages=says, max_tokens=8, **asked).choices[0].message.content
    chunks = chat.create(messages=says, max_tokens=8, stream=True, **asked)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole
    parsed = chat.parse(messages=says, max_tokens=100, response_format=Weather, **asked)
    print(type(parsed.choices[0].message.parsed.sunny))
    tools = [{{"type": "function", "function": function}}]
    choice = {{"type": "function", "function": {{"name": "tell"}}}}
    called = chat.create(messages=says, max_tokens=100, tools=tools, tool_choice=choice, **asked)
    print(called.choices[0].message.tool_calls[0].function.name)
    print(client.responses.create(input={TEXT!r}, max_output_tokens=8, **asked).output_text)
"""
ANTHROPIC = f"""
import sys, anthropic

says = [{{"role": "user", "content": {TEXT!r}}}]
asked = {{"model": "tiny", "max_tokens": 200, "extra_body": {{"temperature": 0}}}}
client = anthropic.Anthropic(base_url=sys.argv[1], api_key="none", max_retries=0)
whole = client.messages.create(messages=says, **asked)
with client.messages.stream(messages=says, **asked) as stream:
    text = "".join(stream.text_stream)
    final = stream.get_final_message()
assert text == whole.content[0].text
assert final.usage.output_tokens == whole.usage.output_tokens
count = client.messages.count_tokens(model="tiny", messages=says).input_tokens
used = whole.usage
print(text, whole.stop_reason, used.input_tokens + used.cache_read_input_tokens == count)
schema = {{"properties": {{"sunny": {{"type": "boolean"}}}}, "required": ["sunny"]}}
schema |= {{"type": "object", "additionalProperties": False}}
tools = [{{"name": "tell", "input_schema": schema}}]
choice = {{"type": "any", "disable_parallel_tool_use": True}}
called = client.messages.create(messages=says, tools=tools, tool_choice=choice, **asked)
print(called.content[0].name, called.stop_reason)
result = {{"type": "tool_result", "tool_use_id": called.content[0].id, "content": "done"}}
says.append({{"role": "assistant", "content": called.content}})
says.append({{"role": "user", "content": [result]}})
client.messages.create(messages=says, tools=tools, tool_choice={{"type": "none"}}, **asked)
"""
# A reader of EventSource's kind sees every event of a stream, each with an id, and its end.
EVENTS = f"""
import json, sys, urllib.request, sseclient

body = {{"model": "tiny", "prompt": {TEXT!r}, "max_tokens": 8, "temperature": 0, "stream": True}}
headers = {{"Content-Type": "application/json", "Accept": "text/event-stream"}}
url = sys.argv[1] + "/v1/completions"
request = urllib.request.Request(url, json.dumps(body).encode(), headers)
with urllib.request.urlopen(request) as stream:
    *events, last = sseclient.SSEClient(stream).events()
assert last.data == "[DONE]" and all(event.id for event in events)
print("".join(json.loads(event.data)["choices"][0]["text"] for event in events))
"""
VLLM = f"""
import asyncio, importlib.util, sys, aiohttp

spec = importlib.util.spec_from_file_location("client", "client.py")
client = sys.modules["client"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(client)

async def main():
    async with aiohttp.ClientSession() as session:
        for kind, path in (("openai", "completions"), ("openai-chat", "chat/completions")):
            url = f"{{sys.argv[1]}}/v1/{{path}}"
            asked = client.RequestFuncInput(prompt={TEXT!r}, api_url=url, prompt_len=8,
                                            output_len=6, model="tiny", ignore_eos=True)
            done = await client.ASYNC_REQUEST_FUNCS[kind](asked, session)
            print(done.success, done.output_tokens, len(done.itl), done.error)

asyncio.run(main())
"""
PEFT = """
import sys, torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

torch.manual_seed(0)
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
wanted = LoraConfig(r=4, lora_alpha=6, use_rslora=True, target_modules="all-linear",
                    lora_dropout=0.1, task_type="CAUSAL_LM", init_lora_weights=False)
adapted = get_peft_model(model, wanted)
adapted.save_pretrained("adapter")
adapted.merge_and_unload().save_pretrained("merged")
"""
TASK = """
task: codes
dataset_path: json
dataset_kwargs: {data_files: {test: codes.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: ["4071", "2210"]
doc_to_target: label
metric_list: [{metric: acc}]
"""
QUESTION = {
    "question": "The code of Lima is 4071. The code of Oslo is 2210. What is the code of Lima?",
    "label": 0,
}


@dataclass(frozen=True)
class Tool:
    """`words` begin with a program of the environment, or are Python code; {} is a server's URL."""

    packages: tuple[str, ...]
    words: tuple[str, ...]
    # Of what it printed, and of the folder where it ran.
    check: Callable[[str, Path], None]
    prepare: Callable[["Environment"], None] = lambda _: None


class Environment:
    """A virtual environment in `folder`, in which the packages of this one can be imported too."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        venv.create(folder / "venv", with_pip=True)
        self.bin = folder / "venv" / "bin"
        (packages,) = (folder / "venv" / "lib").glob("python*/site-packages")
        ours = [
            f"import site; site.addsitedir({path!r})\n"
            for path in site.getsitepackages()
        ]
        (packages / "ours.pth").write_text("".join(ours))

    def pip(self, *words: str) -> None:
        """Skips the test where pip cannot have the packages."""
        done = self.run("python", "-m", "pip", *words, "--quiet", seconds=INSTALL_S)
        if done.returncode != 0:
            last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
            pytest.skip(f"pip {' '.join(words)}: {last}")

    def run(
        self, *words: str, seconds: float = RUN_S
    ) -> subprocess.CompletedProcess[str]:
        env = os.environ | {
            "HF_HUB_OFFLINE": "1",
            "HF_HOME": str(self.folder),
            "COLUMNS": "200",
        }
        command = [str(self.bin / words[0]), *words[1:]]
        return subprocess.run(
            command,
            cwd=self.folder,
            env=env,
            capture_output=True,
            text=True,
            check=False,
            timeout=seconds,
        )


def prints(*lines: str) -> Callable[[str, Path], None]:
    def check(printed: str, _: Path) -> None:
        assert [line.strip() for line in printed.splitlines()] == list(lines)

    return check


def guidellm_counts(_: str, folder: Path) -> None:
    (benchmark,) = json.loads((folder / "report.json").read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"], totals["total"]) == (4, 0, 4)


def aiperf_counts(_: str, folder: Path) -> None:
    (report,) = folder.glob("**/profile_export_aiperf.json")
    found = json.loads(report.read_text())
    assert (found["completed_request_count"]["avg"], found["error_summary"]) == (
        NUM_REQUESTS,
        [],
    )


def lm_eval_is_right(printed: str, _: Path) -> None:
    (score,) = re.findall(r"\|acc\s*\|\S*\s*\|\s*([\d.]+)\|", printed)
    assert float(score) == 1.0


def write_task(environment: Environment) -> None:
    (environment.folder / "codes.yaml").write_text(TASK)
    lines = [json.dumps(QUESTION)] * NUM_REQUESTS
    (environment.folder / "codes.jsonl").write_text("\n".join(lines))


def cache_tokenizer(environment: Environment) -> None:
    """Lay the model out as a download of the name `baton/demo`: offline, aiperf takes no folder."""
    cached = environment.folder / "hub" / "models--baton--demo"
    shutil.copytree(CHECKPOINT, cached / "snapshots" / "1")
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("1")


def take_vllm_client(environment: Environment) -> None:
    environment.pip(
        "download", "--no-deps", "--only-binary=:all:", "--dest", ".", "vllm"
    )
    (wheel,) = environment.folder.glob("vllm-*.whl")
    with zipfile.ZipFile(wheel) as files:
        code = files.read("vllm/benchmarks/lib/endpoint_request_func.py")
    (environment.folder / "client.py").write_bytes(code)
    wheel.unlink()


TOOLS = {
    "openai": Tool(
        ("openai",),
        ("python", "-c", OPENAI, "{}"),
        prints("<class 'bool'>", "tell", "42."),
    ),
    "anthropic": Tool(
        ("anthropic",),
        ("python", "-c", ANTHROPIC, "{}"),
        prints("42. end_turn True", "tell tool_use"),
    ),
    "sseclient": Tool(("sseclient-py",), ("python", "-c", EVENTS, "{}"), prints("42.")),
    "vllm bench serve's client": Tool(
        ("aiohttp", "regex", "tqdm"),
        ("python", "-c", VLLM, "{}"),
        prints("True 6 5", "True 6 5"),
        take_vllm_client,
    ),
    "guidellm": Tool(
        ("guidellm",),
        (
            "guidellm",
            "run",
            "--backend",
            "kind=openai_http,target={},model=tiny",
            "--profile",
            "kind=synchronous",
            "--constraint",
            f"kind=max_requests,count={NUM_REQUESTS}",
            "--tokenizer",
            f"kind=huggingface_auto,model={CHECKPOINT}",
            "--data",
            "kind=synthetic_text,prompt_tokens=32,output_tokens=8",
            "--output",
            "kind=json,path=report.json",
            "--disable-console",
        ),
        guidellm_counts,
    ),
    "aiperf": Tool(
        ("aiperf",),
        (
            "aiperf",
            "profile",
            "-m",
            "tiny",
            "--url",
            "{}",
            "--endpoint-type",
            "chat",
            "--streaming",
            "--tokenizer",
            "baton/demo",
            "--request-count",
            str(NUM_REQUESTS),
            "--concurrency",
            "1",
            "--synthetic-input-tokens-mean",
            "32",
            "--output-tokens-mean",
            "8",
            "--ui",
            "none",
        ),
        aiperf_counts,
        cache_tokenizer,
    ),
    "lm-eval": Tool(
        ("lm-eval[api]",),
        (
            "lm_eval",
            "--model",
            "local-completions",
            "--tasks",
            "codes",
            "--include_path",
            ".",
            "--model_args",
            f"model=tiny,base_url={{}}/v1/completions,tokenizer={CHECKPOINT},num_concurrent=2",
        ),
        lm_eval_is_right,
        write_task,
    ),
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    config = tiny_cluster(CHECKPOINT, router={"local_prefill": "never"})
    with Cluster(tmp_path_factory.mktemp("clients"), config) as running:
        yield running


@pytest.mark.parametrize("name", TOOLS)
def test_a_tool_reports_no_failed_request(name, cluster, tmp_path):
    tool = TOOLS[name]
    environment = Environment(tmp_path)
    environment.pip("install", *tool.packages)
    tool.prepare(environment)
    done = environment.run(
        *(word.replace("{}", cluster.url("")) for word in tool.words)
    )
    assert done.returncode == 0, done.stdout + done.stderr
    tool.check(done.stdout, tmp_path)


def test_an_adapter_that_peft_saved_says_what_peft_says(tmp_path):
    model = model_folder("llama")
    environment = Environment(tmp_path)
    environment.pip("install", "peft")
    done = environment.run("python", "-c", PEFT, str(model))
    assert done.returncode == 0, done.stdout + done.stderr
    question = prompt(50)
    expected = Oracle(tmp_path / "merged").greedy(question, 20)
    assert expected.token_ids != Oracle(model).greedy(question, 20).token_ids
    modules = (f"mine={tmp_path / 'adapter'}",)
    with loaded(compute_config(model, dtype="float32", lora_modules=modules)) as runner:
        text = Text("a", question, range(8), "mine")
        logits(runner, text.chunk(0, len(question) - 1))
        assert count_ties(expected, greedy(runner, text, 20)) == 0
