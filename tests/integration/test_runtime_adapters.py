"""LoRA adapters come and go while a cluster of real processes serves: on all nodes, or on none."""

import json
import os
import signal
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.support.adapters import merged, write_adapter
from tests.support.checkpoints import model_folder, tiny_cluster
from tests.support.cluster import Cluster
from tests.support.foreign_checkpoints import foreign_folder
from tests.support.oracle import Oracle, count_ties
from tests.support.stream_reader import StreamReader
from tests.support.waiting import until

PROMPT = [10 + (i * i + 7 * i) % 241 for i in range(70)]
MODEL = model_folder("qwen3")
LONG = 400


def serving(folder: Path, **sections: object) -> Cluster:
    named = {"path": str(MODEL), "served_model_name": "tiny"}
    allowed = {"allow_runtime_lora_updating": True, "max_loras": 2, "max_lora_rank": 8}
    return Cluster(
        folder,
        tiny_cluster(
            cache={"num_blocks": 600},
            router={"local_prefill": "never"},
            model=named | allowed,
            **sections,
        ),
    )


def post(cluster: Cluster, path: str, **body: object) -> tuple[int, str]:
    data = json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(cluster.url(path), data, headers)
    try:
        with urllib.request.urlopen(request, timeout=60.0) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())["error"]["message"]


def load(cluster: Cluster, name: str, path: Path, **more: object) -> tuple[int, str]:
    return post(
        cluster, "/v1/load_lora_adapter", lora_name=name, lora_path=str(path), **more
    )


def unload(cluster: Cluster, name: str) -> tuple[int, str]:
    return post(cluster, "/v1/unload_lora_adapter", lora_name=name)


def asked(model: str, num_tokens: int = 12) -> dict[str, object]:
    return {
        "model": model,
        "prompt": PROMPT,
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }


def tokens(cluster: Cluster, model: str, num_tokens: int = 12) -> list[int]:
    answer = cluster.complete(**asked(model, num_tokens))
    assert answer["model"] == model
    (choice,) = answer["choices"]
    return choice["token_ids"]


def is_of(adapter: Path, token_ids: list[int]) -> bool:
    """Whether these are the tokens of the model with the adapter merged into it."""
    rank = json.loads((adapter / "adapter_config.json").read_text())["r"]
    found = Oracle(merged(MODEL, adapter, 16 / rank)).greedy(PROMPT, len(token_ids))
    return count_ties(found, token_ids) == 0


def names(cluster: Cluster) -> list[str]:
    return [card["id"] for card in json.loads(cluster.get("/v1/models")[1])["data"]]


def test_adapters_come_and_go_while_others_are_served(tmp_path):
    one, two = (write_adapter(MODEL, rank=4, seed=seed) for seed in range(2))
    wide = write_adapter(MODEL, rank=9)
    foreign = write_adapter(foreign_folder("phi3"), ("qkv_proj",), rank=4)
    with serving(tmp_path) as cluster:
        plain = tokens(cluster, "tiny")
        reader = StreamReader(cluster, asked("tiny", LONG))
        reader.wait_for_more(2)
        for adapter, reason in (
            (Path("/nowhere"), "No such file"),
            (wide, "rank 9, more than model.max_lora_rank"),
            (foreign, "the model has no linear layer"),
        ):
            status, text = load(cluster, "mine", adapter)
            assert status == 400
            assert "the adapter 'mine' was not loaded: " in text
            assert reason in text
            assert "\n" not in text
        assert load(cluster, "tiny", one)[0] == 400
        assert load(cluster, "two words", one)[0] == 400
        assert post(cluster, "/v1/load_lora_adapter", lora_name="mine")[0] == 400
        assert post(cluster, "/v1/unload_lora_adapter")[0] == 400
        assert unload(cluster, "mine")[0] == 404
        assert names(cluster) == ["tiny"]

        success = "Success: LoRA adapter 'mine' added successfully."
        assert load(cluster, "mine", one, lora_int_id=7) == (200, success)
        assert names(cluster) == ["tiny", "mine"]
        first = tokens(cluster, "mine")
        assert is_of(one, first)
        status, text = load(cluster, "mine", two)
        assert status == 400
        assert "load_inplace" in text
        old = StreamReader(cluster, asked("mine", LONG))
        old.wait_for_more(2)
        assert load(cluster, "mine", two, load_inplace=True)[0] == 200
        second = tokens(cluster, "mine")
        assert second != first
        assert is_of(two, second)
        assert load(cluster, "other", one)[0] == 200
        assert tokens(cluster, "other") == first
        status, text = load(cluster, "third", one)
        assert status == 400
        assert "model.max_loras" in text
        success = "Success: LoRA adapter 'other' removed successfully."
        assert unload(cluster, "other") == (200, success)
        with pytest.raises(urllib.error.HTTPError, match="404"):
            tokens(cluster, "other")
        assert names(cluster) == ["tiny", "mine"]
        assert tokens(cluster, "tiny") == plain
        for stream in (reader, old):
            stream.join()
        assert reader.token_ids[:12] == plain
        assert is_of(one, old.token_ids)  # it ends with the version that it began with


def test_a_node_that_dies_during_a_load_gets_the_adapter_when_it_is_back(tmp_path):
    adapter = write_adapter(MODEL, rank=4)
    with serving(tmp_path, decode=2) as cluster:
        os.kill(cluster.children["decode-0"].pid, signal.SIGSTOP)
        answers: list[tuple[int, str]] = []
        loading = threading.Thread(
            target=lambda: answers.append(load(cluster, "mine", adapter))
        )
        loading.start()
        cluster.wait_for_line("decode-1: an adapter was loaded")
        cluster.kill("decode-0")
        loading.join(60.0)
        assert answers[0][0] == 200
        assert is_of(adapter, tokens(cluster, "mine"))
        cluster.start_node("decode", 0)
        cluster.wait_for_line("decode-0: an adapter was loaded")
        cluster.kill("decode-1")  # so the other one takes what follows
        assert is_of(adapter, tokens(cluster, "mine"))
        cluster.kill("router")
        cluster.start_router()
        cluster.start_node("decode", 1)
        cluster.wait_until_healthy()
        until(lambda: names(cluster) == ["tiny", "mine"], lambda: "the nodes know it")
        assert is_of(adapter, tokens(cluster, "mine"))


def test_nothing_can_be_loaded_without_the_setting(cluster):
    assert load(cluster, "mine", write_adapter(MODEL, rank=4))[0] == 404
