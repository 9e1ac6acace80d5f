"""Real processes: both transports, a prompt cached in another node, clients that leave."""

from concurrent.futures import ThreadPoolExecutor
from functools import cache

import pytest

from tests.support.checkpoints import model_folder, tiny_cluster
from tests.support.cluster import Cluster, metric
from tests.support.node_threads import block_bytes
from tests.support.oracle import Oracle, count_ties, prompt
from tests.support.waiting import until

NUM_TOKENS = 40
MANY_TOKENS = 7_000
LENGTHS = (1, 15, 16, 17, 300, 4_100)


@cache
def oracle(family: str) -> Oracle:
    return Oracle(model_folder(family))


def body(token_ids: list[int], num_tokens: int = NUM_TOKENS) -> dict[str, object]:
    return {
        "model": "tiny",
        "prompt": token_ids,
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }


def answered(cluster: Cluster, token_ids: list[int]) -> list[int]:
    answer = cluster.complete(**body(token_ids))
    return answer["choices"][0]["token_ids"]


def prompt_tokens_computed(cluster: Cluster, name: str) -> int:
    return sum(step.num_prompt_tokens for step in cluster.steps(name))


def num_bytes_read(cluster: Cluster) -> int:
    return sum(read.num_bytes for read in cluster.reads("decode-0"))


def assert_prompts_are_moved_and_answered(cluster: Cluster, family: str) -> None:
    """Decode computes no prompt token, reads each block once and says what transformers says."""
    prompts = [prompt(length, salt=80 + length) for length in LENGTHS]
    before = num_bytes_read(cluster), prompt_tokens_computed(cluster, "decode-0")
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(
            pool.map(lambda token_ids: answered(cluster, token_ids), prompts)
        )
    for token_ids, tokens in zip(prompts, answers, strict=True):
        count_ties(oracle(family).greedy(token_ids, NUM_TOKENS), tokens)
    num_bytes = sum(-(-length // 16) for length in LENGTHS) * block_bytes(
        model_folder(family), 16
    )
    until(lambda: num_bytes_read(cluster) - before[0] >= num_bytes)
    assert num_bytes_read(cluster) - before[0] == num_bytes
    assert prompt_tokens_computed(cluster, "decode-0") == before[1]


def test_processes_say_what_transformers_says(cluster):
    assert_prompts_are_moved_and_answered(cluster, "llama")


@pytest.mark.release
@pytest.mark.parametrize("ranks", [(1, 2), (2, 1)])
def test_ranks_read_through_nixl(ranks, tmp_path):
    pytest.importorskip("nixl_cu13", reason="the nixl extra is not installed")
    config = tiny_cluster(
        "qwen3",
        cache={"num_blocks": 700},
        engine={"max_num_batched_tokens": 64},
        router={"local_prefill": "never"},
        transfer={"transport": "nixl"},
    )
    degrees = dict(zip(("prefill-0", "decode-0"), ranks, strict=True))
    with Cluster(tmp_path, config, ranks=degrees) as cluster:
        assert_prompts_are_moved_and_answered(cluster, "qwen3")


def test_a_prompt_goes_on_where_its_beginning_is_cached(tmp_path):
    config = tiny_cluster("qwen3", prefill=2, decode=2, cache={"num_blocks": 700})
    begun = prompt(80)
    longer = [*prompt(80), *prompt(10, salt=1)]
    names = ("prefill-0", "prefill-1", "decode-0", "decode-1")
    with Cluster(tmp_path, config) as cluster:
        answered(cluster, begun)
        # 5 blocks of the prompt, and 7 of the sequence: its last token was never computed.
        cluster.wait_for_metric("baton_known_cached_blocks", 5 + 7)
        before = {name: prompt_tokens_computed(cluster, name) for name in names}
        tokens = answered(cluster, longer)
        metrics = cluster.get("/metrics")[1]
        computed = {
            name: prompt_tokens_computed(cluster, name) - before[name] for name in names
        }
    count_ties(oracle("qwen3").greedy(longer, NUM_TOKENS), tokens)
    assert sorted(computed.values()) == [0, 0, 0, 10], computed
    assert computed["prefill-0"] + computed["prefill-1"] == 0, (
        "decode had all but 10 tokens"
    )
    assert len(begun) == metric(metrics, "baton_predicted_cached_prompt_tokens_total")
    assert metric(metrics, "baton_mispredicted_cached_prompt_tokens_total") == 0


def test_a_client_that_leaves_costs_nothing_more(cluster):
    before = sum(len(step.slices) for step in cluster.steps("decode-0"))
    # So many steps that the client leaves long before the last, however slow it is.
    stream = cluster.stream(**body(prompt(100, salt=72), num_tokens=MANY_TOKENS))
    for _ in range(5):
        next(stream)
    stream.close()  # closes the connection
    until(lambda: not cluster.num_used_blocks(), lambda: "blocks did not come back")
    assert len(answered(cluster, prompt(30, salt=72))) == NUM_TOKENS
    tokens = sum(len(step.slices) for step in cluster.steps("decode-0")) - before
    assert tokens < MANY_TOKENS, "it was generated to the end"
