"""Processes that end while they serve: every request still ends as it should.

The soak draws faults at random; the others are schedules that it cannot be sure to meet.
"""

import asyncio
import json
import time
from functools import cache

import psutil
import pytest

from baton.protocol.config import ClusterConfig
from tests.support.adapters import merged, write_adapter
from tests.support.checkpoints import model_folder, tiny_cluster
from tests.support.cluster import Cluster
from tests.support.oracle import Oracle, count_ties
from tests.support.stream_reader import StreamReader
from tests.support.waiting import until
from tools.soak.__main__ import SoakSettings, soak, table

MAX_ATTEMPTS = 2
MANY_TOKENS = 4_000  # far more than the streams get to
DEADLINE_S = 240.0
PROMPT = [10 + (i * i + 7 * i) % 241 for i in range(70)]


@cache
def expected(num_tokens: int) -> list[int]:
    return Oracle(model_folder("qwen3")).greedy(PROMPT, num_tokens).token_ids


def settings(**nodes: object) -> ClusterConfig:
    return tiny_cluster(
        cache={"num_blocks": 600},
        engine={"max_num_batched_tokens": 64, "num_speculative_tokens": 3},
        router={"local_prefill": "never", "max_attempts": MAX_ATTEMPTS},
        **nodes,
    )


def body(token_ids: list[int], num_tokens: int) -> dict[str, object]:
    return {
        "model": "tiny",
        "prompt": token_ids,
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }


def token_ids(event: dict[str, object]) -> list[int]:
    choices = event.get("choices") or []
    assert "error" not in event, event
    return [token for choice in choices for token in choice["token_ids"]]


def serving(cluster: Cluster, role: str) -> str:
    """The node of that role which has computed something."""
    names = [name for name in cluster.children if name.startswith(role)]
    return max(names, key=lambda name: len(cluster.steps(name)))


@pytest.mark.parametrize(
    ("shutdown_timeout_s", "by_command", "num_tokens"),
    # So many that the stream has not ended when it is to be handed back.
    [pytest.param(0.0, False, 2_000, marks=pytest.mark.release), (60.0, True, 200)],
)
def test_a_decode_node_that_is_told_to_end_finishes_or_hands_back(
    shutdown_timeout_s, by_command, num_tokens, tmp_path
):
    config = settings(decode=2, node={"shutdown_timeout_s": shutdown_timeout_s})
    with Cluster(tmp_path, config) as cluster:
        stream = cluster.stream(**body(PROMPT, num_tokens))
        tokens: list[int] = []
        while len(tokens) < 20:
            tokens += token_ids(next(stream))
        first = serving(cluster, "decode")
        if by_command:
            mistaken, command = (
                cluster.command("drain", name) for name in ("decode-7", first)
            )
            # The stream may have ended by now, since a command takes its time to start.
            cluster.wait_for_line(f"drain | {first} is draining: ")
        else:
            cluster.children[first].terminate()
        other = cluster.complete(**body(PROMPT, 20))["choices"]
        for event in stream:
            tokens += token_ids(event)
        assert cluster.children[first].wait(time.monotonic() + DEADLINE_S)
        assert cluster.children[first].exit_code == 0
        if by_command:
            assert command.wait(time.monotonic() + DEADLINE_S)
            assert (command.exit_code, command.tail[-1]) == (0, f"{first} is gone")
            assert mistaken.wait(time.monotonic() + DEADLINE_S)
            assert mistaken.exit_code == 2
            (line,) = mistaken.tail
            assert "there is no node decode-7" in line
            assert "prefill-0" in line
        left = [line for line in cluster.lines if "node out of service" in line]
        assert "has left" in left[0]
        steps = {name: cluster.steps(name) for name in ("decode-0", "decode-1")}
    assert tokens == expected(num_tokens)
    assert other[0]["token_ids"] == expected(20)
    attempts = {part.key.attempt for step in steps[first] for part in step.slices}
    moved = [
        part
        for name in steps
        if name != first
        for s in steps[name]
        for part in s.slices
    ]
    assert attempts == {0}
    assert any(
        part.key.request_id == steps[first][0].slices[0].key.request_id
        for part in moved
    ) == (shutdown_timeout_s == 0)


def test_streams_that_move_on_outlive_any_number_of_kills(tmp_path):
    """More kills than a request has attempts, and no other decode node to go to."""
    model = model_folder("qwen3")
    adapter = write_adapter(model)
    named = {
        "path": str(model),
        "served_model_name": "tiny",
        "lora_modules": [f"mine={adapter}"],
    }
    with Cluster(tmp_path, settings(model=named)) as cluster:
        readers = [
            StreamReader(cluster, body(PROMPT, MANY_TOKENS) | {"model": name})
            for name in ("tiny", "mine")
        ]
        for _ in range(MAX_ATTEMPTS + 1):
            for reader in readers:
                reader.wait_for_more(2)
            cluster.kill("decode-0")
            cluster.start_node("decode", 0)
        for reader in readers:
            reader.wait_for_more(2)
    for reader in readers:
        reader.join()
    plain, adapted = (reader.token_ids for reader in readers)
    assert plain == expected(len(plain))
    of_adapter = Oracle(merged(model, adapter, 2.0)).greedy(PROMPT, len(adapted))
    assert count_ties(of_adapter, adapted) == 0


@pytest.mark.release
def test_a_form_goes_on_where_it_was_when_its_node_is_killed(tmp_path):
    config = tiny_cluster(
        model_folder("qwen3", eos_token_id=2),
        cache={"num_blocks": 600},
        engine={"max_num_batched_tokens": 64},
        router={"local_prefill": "never"},
    )
    numbers = {
        "type": "array",
        "items": {"type": "integer"},
        "minItems": 200,
        "maxItems": 200,
    }
    asked = {
        "prompt": PROMPT,
        "max_tokens": MANY_TOKENS,
        "seed": 7,
        "return_token_ids": True,
        "structured_outputs": {"json": numbers},
        "bad_words": ["7"],
    }
    with Cluster(tmp_path, config) as cluster:
        reader = StreamReader(cluster, asked)
        for _ in range(2):
            reader.wait_for_more(40)
            cluster.kill("decode-0")
            cluster.start_node("decode", 0)
        reader.join()
        whole = cluster.complete(**asked)["choices"][0]
    assert reader.token_ids == whole["token_ids"]
    assert len(json.loads(whole["text"])) == 200
    assert "7" not in whole["text"]


def is_ended(process: psutil.Process) -> bool:
    """Whoever adopts an orphan may take its time to reap it."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.release
def test_a_stream_goes_on_elsewhere_when_one_rank_of_its_node_is_killed(tmp_path):
    """Another rank waits for the dead one for ever, as a collective of NCCL does."""
    ranks = {"prefill-0": 1, "decode-0": 2, "decode-1": 4}
    config = settings(decode=2, transfer={"verify_kv": True})
    with Cluster(tmp_path, config, ranks=ranks) as cluster:
        reader = StreamReader(cluster, body(PROMPT, MANY_TOKENS))
        reader.wait_for_more(20)
        first = serving(cluster, "decode")
        node = cluster.children[first]
        waiting, victim, *_ = psutil.Process(node.pid).children()
        waiting.suspend()
        victim.kill()
        reader.wait_for_more(20)
        assert node.wait(time.monotonic() + DEADLINE_S)
        assert node.exit_code == 1
        until(lambda: is_ended(waiting))
        other = "decode-1" if first == "decode-0" else "decode-0"
        reads = [read.failure for read in cluster.reads(other)]
    reader.join()
    assert reader.token_ids == expected(len(reader.token_ids))
    assert reads
    assert not any(reads)


@pytest.mark.release
def test_a_few_faults_lose_and_alter_no_token(tmp_path):
    settings = SoakSettings(
        requests=24,
        faults=4,
        clients=4,
        model=str(model_folder("qwen3")),
        vocab_size=250,
    )
    report = asyncio.run(soak(settings, tmp_path))
    assert not report.problems, table(report)
    assert report.outcomes["wrong"] == report.outcomes["lost"] == 0
    assert report.outcomes["whole"]
