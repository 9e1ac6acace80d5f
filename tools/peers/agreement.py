"""`python -m tools.peers.agreement MODEL`: compare `baton bench` with vLLM's benchmark.

It starts one server and puts the same load on it with `vllm bench serve` and with `baton bench
run`, in turn, round by round: the same file of prompts, as many clients, the same output length. It
prints both figures, their ratio, and differences in definition. The server keeps no prefixes, or
the second client would find the prompts of the first one cached.
"""

import argparse
import contextlib
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
from tokenizers import Tokenizer

from baton.bench.figures.metrics import Distribution, Summary
from baton.bench.report.document import read_json
from baton.bench.report.provenance import Provenance, collect, complete
from baton.protocol.errors import BatonError, ConfigError, NodeError
from tools.peers.arms import MODEL_NAME, PORTS_PER_ARM, Place, commands, parse_arm
from tools.peers.compare import START_TIMEOUT_S, check_installed, home
from tools.peers.servers import free_ports, running

MODULE = "tools.peers.agreement"
TOLERANCE = 0.03
RUN_TIMEOUT_S = 900.0
LETTERS = "abcdefghijklmnopqrstuvwxyz"
Theirs = Mapping[str, float]


class Load(msgspec.Struct, frozen=True):
    requests: int
    concurrency: int
    prompt_tokens: int
    output_tokens: int


class Served(msgspec.Struct, frozen=True):
    """The server of a measurement, and the folder with its tokenizer."""

    url: str
    name: str
    model: Path


class Metric(msgspec.Struct, frozen=True):
    """A figure by vLLM's name and by ours. `definition` says how they differ."""

    name: str
    theirs: str
    ours: Callable[[Summary], float | None]
    definition: str


class Line(msgspec.Struct, frozen=True):
    """The medians of a figure over the rounds; ratios are ours over theirs, within a round."""

    name: str
    theirs: float
    ours: float
    ratio: float
    low: float
    high: float
    definition: str

    @property
    def agrees(self) -> bool:
        return abs(self.ratio - 1) <= TOLERANCE


class Agreement(msgspec.Struct, frozen=True):
    provenance: Provenance
    lines: list[Line]


def _of(field: str, statistic: str) -> Callable[[Summary], float | None]:
    def figure(summary: Summary) -> float | None:
        found: Distribution | None = getattr(summary, field)
        return None if found is None else float(getattr(found, statistic))

    return figure


def _latencies(name: str, theirs: str, ours: str, definition: str) -> list[Metric]:
    statistics_ = (("mean", "mean"), ("p50", "p50"), ("p90", "p90"), ("p99", "p99"))
    return [
        Metric(f"{name} {own} ms", f"{other}_{theirs}_ms", _of(ours, own), definition)
        for own, other in statistics_
    ]


METRICS: tuple[Metric, ...] = (
    Metric(
        "requests/s", "request_throughput", lambda summary: summary.answered_rate,
        "theirs divides by the time until the last client has finished, ours by the window up to "
        "the last end",
    ),
    Metric(
        "output tokens/s", "output_throughput", lambda summary: summary.tokens_per_s,
        "as for requests/s",
    ),
    *_latencies("TTFT", "ttft", "ttft_from_sent", "theirs is the first event with a choice, even "
                "without text; ours the first bytes with a token"),
    *_latencies("TPOT", "tpot", "tpot", "of n tokens theirs divides by n - 1, ours by those that "
                "came after the first chunk: the same where that had one"),
    *_latencies("ITL as it came", "itl", "chunk_gap", "theirs has one gap per event; this is our "
                "chunk_gap"),
    *_latencies("ITL", "itl", "itl", "ours counts a chunk of k tokens as k gaps"),
    *_latencies("E2E", "e2el", "e2e_from_sent", "theirs ends with the last event with a choice, "
                "ours with the last byte, after usage and [DONE]"),
)  # fmt: skip
PERCENTILES = "Percentiles: theirs interpolate between samples, ours are samples (nearest rank)."


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=__doc__)
    parser.add_argument("model", type=Path, help="Hugging Face folder")
    parser.add_argument("--arm", default="vllm", help="the server: vllm, vllm-pair, baton, ...")
    parser.add_argument("--requests", type=int, default=64, help="requests in a run")
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5, help="both tools run once in each")
    parser.add_argument("--out", type=Path, default=Path(".baton/agreement"))
    given = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # `finally` ends the server
    words = sys.argv[1:] if arguments is None else arguments
    before = collect(["python", "-m", MODULE, *words])
    load = Load(given.requests, given.concurrency, given.prompt_tokens, given.output_tokens)
    try:
        lines = measure(given.model.absolute(), given.arm, load, given.rounds, given.out.absolute())
    except BatonError as error:
        print(f"baton: {error.message}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        return 130
    page = table(lines, load, given.arm, given.rounds)
    print(page)
    (given.out / "agreement.md").write_text(page + "\n")
    agreement = Agreement(complete(before), lines)
    (given.out / "agreement.json").write_bytes(msgspec.json.encode(agreement) + b"\n")
    return 0


def measure(model: Path, arm_text: str, load: Load, rounds: int, out: Path) -> list[Line]:
    """Run both tools on one server. Raises `BatonError` when either fails."""
    check_installed(parse_arm("vllm"))  # the comparison needs vLLM's benchmark
    if not (model / "tokenizer.json").is_file():
        raise ConfigError(f"{model} has no tokenizer.json")
    out.mkdir(parents=True, exist_ok=True)
    found: list[tuple[Theirs, Summary]] = []
    with serving(model, arm_text, out) as served:
        for number in range(rounds + 1):  # the first one warms everything up
            prompts = out / f"prompts-{number}.jsonl"
            write_prompts(model, prompts, load, seed=number)
            if number % 2:
                theirs, ours = theirs_run(served, prompts, load), ours_run(served, prompts, load)
            else:
                ours, theirs = ours_run(served, prompts, load), theirs_run(served, prompts, load)
            if number:
                found.append((theirs, ours))
                print(f"round {number} of {rounds} is done", file=sys.stderr, flush=True)
    return compare(found)


@contextlib.contextmanager
def serving(model: Path, arm_text: str, out: Path) -> Iterator[Served]:
    arm = msgspec.structs.replace(parse_arm(arm_text), keeps_prefixes=False)
    with tempfile.TemporaryDirectory(prefix="baton-peers-") as folder:
        place = Place(model, tuple(free_ports(PORTS_PER_ARM)), Path(folder), home())
        with running(commands(arm, place), out / "logs", START_TIMEOUT_S):
            yield Served(place.url, MODEL_NAME, model)


def write_prompts(model: Path, path: Path, load: Load, seed: int) -> None:
    """Write prompts of random words with `prompt_tokens` tokens, or a few less for long words."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    dice = random.Random(f"prompts {seed}")
    lines = []
    for number in range(load.requests):
        text = f"script {number}"
        while True:
            longer = f"{text} {''.join(dice.choices(LETTERS, k=dice.randint(2, 8)))}"
            if len(tokenizer.encode(longer).ids) > load.prompt_tokens:
                break
            text = longer
        row = {"prompt": text, "output_tokens": load.output_tokens}
        lines.append(msgspec.json.encode(row))
    path.write_bytes(b"\n".join(lines) + b"\n")


def theirs_run(served: Served, prompts: Path, load: Load) -> Theirs:
    """Run `vllm bench serve` and return the figures of its result file."""
    out = prompts.parent
    result = out / f"vllm-{prompts.stem}.json"
    result.unlink(missing_ok=True)
    words = (
        str(home() / "venvs/vllm/bin/vllm"), "bench", "serve", "--backend", "openai",
        "--base-url", served.url, "--endpoint", "/v1/completions",
        "--model", str(served.model), "--served-model-name", served.name,
        "--dataset-name", "custom", "--dataset-path", str(prompts), "--skip-chat-template",
        "--disable-shuffle", "--custom-output-len", str(load.output_tokens), "--ignore-eos",
        "--num-prompts", str(load.requests), "--max-concurrency", str(load.concurrency),
        "--temperature", "0", "--disable-tqdm",
        "--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "50,90,99",
        "--save-result", "--result-dir", str(out), "--result-filename", result.name,
    )  # fmt: skip
    _call(words, out / "vllm-bench.log", {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"})
    figures = msgspec.json.decode(result.read_bytes(), type=dict[str, msgspec.Raw])
    numbers: dict[str, float] = {}
    for name, raw in figures.items():
        try:
            numbers[name] = msgspec.json.decode(raw, type=float)
        except msgspec.DecodeError:
            continue  # skip names and lists
    if numbers.get("completed") != load.requests:
        raise NodeError(f"vllm bench serve: {numbers.get('completed')} of {load.requests} answered")
    return numbers


def ours_run(served: Served, prompts: Path, load: Load) -> Summary:
    """Run `baton bench run` and return the summary of its report."""
    out = prompts.parent
    folder = out / f"baton-{prompts.stem}"
    words = (
        sys.executable, "-m", "baton", "bench", "run", "--url", served.url, "--model", served.name,
        "--workload", "file", "--path", str(prompts), "--requests", str(load.requests),
        "--output", str(load.output_tokens), "--concurrency", str(load.concurrency),
        "--out", str(folder),
    )  # fmt: skip
    _call(words, out / "baton-bench.log", {})
    run = read_json(folder / "report.json").runs[0]
    if run.summary.outcomes.get("answered") != load.requests:
        raise NodeError(f"baton bench run: {run.summary.outcomes}")
    return run.summary


def _call(words: Sequence[str], log: Path, env: Mapping[str, str]) -> None:

    with log.open("ab") as output:
        try:
            done = subprocess.run(
                words, env=os.environ | dict(env), stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.STDOUT, check=False, timeout=RUN_TIMEOUT_S,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NodeError(f"{words[0]} did not end: {error}") from error
    if done.returncode:
        raise NodeError(f"{' '.join(words[:4])} ended with code {done.returncode}; see {log}")


def compare(found: Sequence[tuple[Theirs, Summary]]) -> list[Line]:
    """Return a line per figure that both tools have in every round."""
    lines = []
    for metric in METRICS:
        pairs = [(theirs.get(metric.theirs), metric.ours(summary)) for theirs, summary in found]
        both = [(a, b) for a, b in pairs if a and b is not None]
        if not both or len(both) < len(pairs):
            continue
        ratios = [b / a for a, b in both]
        lines.append(
            Line(
                metric.name, statistics.median(a for a, _ in both),
                statistics.median(b for _, b in both), statistics.median(ratios),
                min(ratios), max(ratios), metric.definition,
            )
        )  # fmt: skip
    return lines


def table(lines: Sequence[Line], load: Load, arm: str, rounds: int) -> str:
    """Return the lines as a Markdown table."""
    head = [
        f"{arm}: {load.requests} requests a run, {load.concurrency} at a time, "
        f"{load.prompt_tokens} tokens in, {load.output_tokens} out; medians of {rounds} rounds, "
        "ratios within a round.",
        "",
        f"| figure | vllm bench serve | baton bench run | ratio | range | within "
        f"{100 * TOLERANCE:.0f} % | difference in definition |",
        "|---|---|---|---|---|---|---|",
    ]
    body = [
        f"| {line.name} | {line.theirs:.2f} | {line.ours:.2f} | {line.ratio:.3f} | "
        f"{line.low:.3f} to {line.high:.3f} | {'yes' if line.agrees else '**no**'} | "
        f"{line.definition} |"
        for line in lines
    ]
    return "\n".join([*head, *body, "", PERCENTILES])


if __name__ == "__main__":
    sys.exit(main())
