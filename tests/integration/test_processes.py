"""Clusters of real processes: both transports, several nodes, clients that leave."""

from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import msgspec
import pytest

from baton.protocol.config import ClusterConfig, TransportChoice
from tests.support.checkpoints import model_folder, tiny_cluster
from tests.support.cluster import Cluster, metric
from tests.support.node_threads import block_bytes
from tests.support.oracle import Oracle, count_ties, prompt
from tests.support.waiting import until

NUM_TOKENS = 40
MANY_TOKENS = 8_000


@cache
def oracle(family: str) -> Oracle:
    return Oracle(model_folder(family))


def settings(family: str, transport: TransportChoice = "shm", **more: object) -> ClusterConfig:
    sections = {
        "cache": {"num_blocks": 700, "prefix": False}, "engine": {"chunk_tokens": 64},
        "router": {"local_prefill": "never"}, "transfer": {"transport": transport},
    }  # fmt: skip
    return tiny_cluster(family, **sections | more)


def body(length: int, salt: int = 0, num_tokens: int = NUM_TOKENS) -> dict[str, object]:
    return {
        "model": "tiny",
        "prompt": prompt(length, salt),
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }


def answered(cluster: Cluster, length: int, salt: int = 0) -> list[int]:
    answer = cluster.complete(**body(length, salt))
    return answer["choices"][0]["token_ids"]  # type: ignore[index,no-any-return]


@pytest.mark.parametrize(
    ("family", "transport", "ranks"),
    [
        ("qwen2", "shm", (1, 1)),
        ("mistral", "nixl", (1, 1)),
        ("qwen3", "nixl", (1, 2)),
        ("llama", "nixl", (2, 1)),
    ],
)
def test_processes_say_what_transformers_says(
    family: str, transport: TransportChoice, ranks: tuple[int, int], tmp_path: Path
) -> None:
    if transport == "nixl":
        pytest.importorskip("nixl_cu13", reason="the nixl extra is not installed")
    lengths = (1, 15, 16, 17, 300, 4_100)
    config = settings(family, transport)
    degrees = dict(zip(("prefill-0", "decode-0"), ranks, strict=True))
    with (
        Cluster(tmp_path, config, ranks=degrees) as cluster,
        ThreadPoolExecutor(len(lengths)) as pool,
    ):
        answers = list(pool.map(lambda n: answered(cluster, n), lengths))
    for length, tokens in zip(lengths, answers, strict=True):
        count_ties(oracle(family).greedy(prompt(length), NUM_TOKENS), tokens)
    assert sum(step.num_prompt_tokens for step in cluster.steps("decode-0")) == 0
    moved = sum(read.num_bytes for read in cluster.reads("decode-0"))
    blocks = sum(-(-length // 16) for length in lengths)
    assert moved == blocks * block_bytes(Path(config.model.path), 16)


def test_four_nodes_share_the_load(tmp_path: Path) -> None:
    config = settings("qwen3", prefill=2, decode=2)
    prompts = [prompt(80, salt) for salt in range(8)]
    with Cluster(tmp_path, config) as cluster:
        # In one request, so that all are in hand before the first of them can end.
        answer = cluster.complete(**{**body(80), "prompt": prompts})
    choices: list[dict[str, list[int]]] = answer["choices"]  # type: ignore[assignment]
    for token_ids, choice in zip(prompts, choices, strict=True):
        count_ties(oracle("qwen3").greedy(token_ids, NUM_TOKENS), choice["token_ids"])
    served = {
        name: len({part.key for step in cluster.steps(name) for part in step.slices})
        for name in ("prefill-0", "prefill-1", "decode-0", "decode-1")
    }
    # How many each gets is tested with the policy: a busy machine can cost a node some.
    assert all(served.values()), served


def test_a_prompt_goes_on_where_its_beginning_is_cached(tmp_path: Path) -> None:
    config = settings("qwen3", prefill=2, decode=2, cache={"num_blocks": 700}, router={})
    begun, longer = prompt(80), [*prompt(80), *prompt(10, salt=1)]
    names = ("prefill-0", "prefill-1", "decode-0", "decode-1")
    with Cluster(tmp_path, config) as cluster:
        answered(cluster, 80)
        # 5 blocks of the prompt, and 7 of the sequence: its last token was never computed.
        cluster.wait_for_metric("baton_known_cached_blocks", 5 + 7)
        before = {name: len(cluster.steps(name)) for name in names}
        answer = cluster.complete(**{**body(80), "prompt": longer})
        metrics = cluster.get("/metrics")[1]
    choices: list[dict[str, list[int]]] = answer["choices"]  # type: ignore[assignment]
    count_ties(oracle("qwen3").greedy(longer, NUM_TOKENS), choices[0]["token_ids"])
    computed = {
        name: sum(step.num_prompt_tokens for step in cluster.steps(name)[before[name] :])
        for name in names
    }
    assert sorted(computed.values()) == [0, 0, 0, 10], computed
    assert computed["prefill-0"] + computed["prefill-1"] == 0, "decode had all but 10 tokens"
    assert len(begun) == metric(metrics, "baton_predicted_cached_prompt_tokens_total")
    assert metric(metrics, "baton_mispredicted_cached_prompt_tokens_total") == 0


def test_a_client_that_leaves_costs_nothing_more(tmp_path: Path) -> None:
    with Cluster(tmp_path, settings("qwen3")) as cluster:
        # So many steps that the client leaves long before the last, however slow it is.
        stream = cluster.stream(**body(100, num_tokens=MANY_TOKENS))
        for _ in range(5):
            next(stream)
        stream.close()  # closes the connection
        until(lambda: not cluster.num_used_blocks(), lambda: "blocks did not come back")
        assert len(answered(cluster, 30)) == NUM_TOKENS
    tokens = sum(len(step.slices) for step in cluster.steps("decode-0"))
    assert tokens < MANY_TOKENS, "it was generated to the end"


def test_a_node_of_another_model_is_told_so_and_waits(tmp_path: Path) -> None:
    with Cluster(tmp_path, settings("qwen3")) as cluster:
        other = msgspec.structs.replace(
            cluster.config,
            model=tiny_cluster("llama").model,
            node=msgspec.structs.replace(cluster.config.node, id="stranger"),
        )
        cluster.start("stranger", other, "decode")
        stranger = cluster.children["stranger"]
        told = until(lambda: [line for line in stranger.tail if "refused this node" in line])
        assert len(answered(cluster, 30)) == NUM_TOKENS
        assert stranger.poll() is None
        assert len(told) == 1
        assert "serves another model" in told[0]
        assert stranger.stop() == 0
        del cluster.children["stranger"]
