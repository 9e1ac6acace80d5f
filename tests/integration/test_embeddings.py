"""Embeddings, scores and rerankings from real processes are those that transformers computes."""

import base64
import json
import math
import urllib.error
import urllib.request
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from tokenizers import Tokenizer

from baton import LLM, PoolingParams
from baton.protocol.errors import RequestError
from tests.support.checkpoints import model_folder, tiny_cluster
from tests.support.cluster import Cluster, metric
from tests.support.completions import post
from tests.support.pooling_folders import (
    PROMPTS,
    embedding_folder,
    embedding_of,
    reranker_folder,
    score_of,
)
from tests.support.refusals import raises

TOLERANCE = 1e-3
TEXTS = ["roses are red", "snow", "a long story about nothing at all " * 12]
SETTINGS: dict[str, object] = {
    "cache": {"num_blocks": 300},
    "engine": {"max_num_batched_tokens": 64, "threads": 1},
}


def ids_of(folder: Path, text: str) -> list[int]:
    found: list[int] = (
        Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
    )
    return found


def send(cluster: Cluster, path: str, **body: object) -> tuple[int, dict[str, Any]]:
    try:
        with urllib.request.urlopen(
            post(cluster.url(""), body, path), timeout=60
        ) as reply:
            return reply.status, json.loads(reply.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


def refusal(cluster: Cluster, path: str, **body: object) -> tuple[int, str, str | None]:
    status, reply = send(cluster, path, **body)
    return status, reply["error"]["code"], reply["error"]["param"]


def close_to(numbers: list[float], expected: Any) -> bool:
    return numbers == pytest.approx(expected.tolist(), abs=TOLERANCE)


# --- a cluster of prefill nodes alone -------------------------------------------------------------


@pytest.fixture(scope="module")
def folder() -> Path:
    return embedding_folder("qwen3", num_layers=2)


@pytest.fixture(scope="module")
def cluster(
    tmp_path_factory: pytest.TempPathFactory, folder: Path
) -> Iterator[Cluster]:
    config = tiny_cluster(folder, prefill=2, decode=0, **SETTINGS)
    with Cluster(tmp_path_factory.mktemp("embeddings"), config) as cluster:
        yield cluster


def test_clients_of_openai_get_what_transformers_computes(cluster, folder):
    client = openai.OpenAI(base_url=cluster.url("/v1"), api_key="none", max_retries=0)
    for encoding in ({}, {"encoding_format": "float"}):  # its default is base64
        reply = client.embeddings.create(model="tiny", input=TEXTS, **encoding)
        assert [one.index for one in reply.data] == [0, 1, 2]
        for text, one in zip(TEXTS, reply.data, strict=True):
            assert close_to(one.embedding, embedding_of(folder, ids_of(folder, text)))
        num_tokens = sum(len(ids_of(folder, text)) for text in TEXTS)
        assert reply.usage.prompt_tokens == reply.usage.total_tokens == num_tokens
        assert reply.model == "tiny"
    short = client.embeddings.create(model="tiny", input=TEXTS[0], dimensions=10)
    expected = embedding_of(folder, ids_of(folder, TEXTS[0]), dimensions=10)
    assert close_to(short.data[0].embedding, expected)


def test_token_ids_prompts_and_lengths_are_as_asked(cluster, folder):
    ids = ids_of(folder, TEXTS[0])
    status, reply = send(
        cluster, "/v1/embeddings", input=[ids, ids[:2]], encoding_format="base64"
    )
    assert (status, len(reply["data"])) == (200, 2)
    numbers = array("f", base64.b64decode(reply["data"][1]["embedding"])).tolist()
    assert close_to(numbers, embedding_of(folder, ids[:2]))
    _, alone = send(cluster, "/v1/embeddings", input=ids[:2], normalize=False)
    expected = embedding_of(folder, ids[:2], normalizes=False)
    assert close_to(alone["data"][0]["embedding"], expected)
    _, asked = send(cluster, "/v1/embeddings", input=TEXTS[0], prompt_name="query")
    whole = ids_of(folder, PROMPTS["query"] + TEXTS[0])
    assert close_to(asked["data"][0]["embedding"], embedding_of(folder, whole))
    _, cut = send(cluster, "/v1/embeddings", input=TEXTS[2], truncate_prompt_tokens=5)
    assert cut["usage"]["total_tokens"] == 5
    first = ids_of(folder, TEXTS[2])[:5]
    assert close_to(cut["data"][0]["embedding"], embedding_of(folder, first))


def test_a_large_batch_has_each_embedding_once_and_uses_both_nodes(cluster, folder):
    texts = [f"number {index} " * (1 + index % 7) + "x" * 40 for index in range(700)]
    texts += ["the same text " * 200] * 40
    body = {"input": texts, "encoding_format": "base64"}
    assert len(json.dumps(body)) > 128 * 1024  # read by a process of its own
    status, reply = send(cluster, "/v1/embeddings", **body)
    assert status == 200
    assert [one["index"] for one in reply["data"]] == list(range(len(texts)))
    embeddings = [one["embedding"] for one in reply["data"]]
    assert len(set(embeddings[:700])) == 700
    assert len(set(embeddings[700:])) == 1  # from the prefix cache, too
    for index in (0, 13, 699):
        numbers = array("f", base64.b64decode(embeddings[index])).tolist()
        assert close_to(numbers, embedding_of(folder, ids_of(folder, texts[index])))
    page = cluster.get("/metrics")[1]
    lines = [
        one
        for one in page.splitlines()
        if one.startswith("baton_node_prompt_tokens_total{")
    ]
    assert all(float(line.rpartition(" ")[2]) > 1000 for line in lines)
    assert metric(page, "baton_prefix_cache_hits_total") > 0


def test_scores_of_embeddings_are_cosines(cluster, folder):
    query = TEXTS[0]
    documents = [TEXTS[1], TEXTS[0], TEXTS[2]]
    rows = [embedding_of(folder, ids_of(folder, text)) for text in (query, *documents)]
    expected = [float(rows[0] @ row) for row in rows[1:]]
    for names in (("text_1", "text_2"), ("queries", "documents")):
        asked = dict(zip(names, (query, documents), strict=True))
        _, reply = send(cluster, "/v1/score", **asked)
        scores = [one["score"] for one in reply["data"]]
        assert scores == pytest.approx(expected, abs=TOLERANCE)
    _, many = send(cluster, "/score", text_1=documents, text_2=documents)
    assert [one["score"] for one in many["data"]] == pytest.approx([1, 1, 1], abs=1e-6)
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        _, ranked = send(
            cluster, path, query=query, documents=[{"text": documents[0]}, *documents]
        )
        order = [one["index"] for one in ranked["results"]]
        assert order[0] == 2
        assert order.index(0) < order.index(1)  # equal ones keep their order
        assert ranked["results"][0]["document"] == {"text": TEXTS[0]}


def test_what_the_model_or_the_body_does_not_allow_is_one_error_that_says_why(cluster):
    path = "/v1/embeddings"
    bad = (400, "invalid_request")
    assert refusal(cluster, path, input="") == (*bad, "input")
    assert refusal(cluster, path, input=[]) == (*bad, "input")
    assert refusal(cluster, path, input=["x", ""]) == (*bad, "input")
    assert refusal(cluster, path, input=[1, "x"]) == (*bad, "input")
    assert refusal(cluster, path, input=[1, 1 << 20]) == (*bad, "input")
    assert refusal(cluster, path, input=[[]]) == (*bad, "input")
    assert refusal(cluster, path, input=["x"] * 2049) == (*bad, "input")
    assert refusal(cluster, path, input=7) == (*bad, "input")
    assert refusal(cluster, path, input="x", dimensions=129) == (*bad, "dimensions")
    assert refusal(cluster, path, input="x", dimensions=0) == (*bad, "dimensions")
    assert refusal(cluster, path, input="x", encoding_format="hex") == (
        *bad,
        "encoding_format",
    )
    assert refusal(cluster, path, input="x", prompt_name="what") == (
        *bad,
        "prompt_name",
    )
    too_many = {"input": "x", "truncate_prompt_tokens": 10_000}
    assert refusal(cluster, path, **too_many) == (*bad, "truncate_prompt_tokens")
    assert refusal(cluster, path, input="x", model="other")[:2] == (
        404,
        "model_not_found",
    )
    assert refusal(cluster, path, prompt="x") == (400, "unsupported", "prompt")
    for text in ("word " * 4000, "y" * 200_000):
        assert refusal(cluster, path, input=text) == (
            400,
            "context_length_exceeded",
            "input",
        )
    assert refusal(cluster, "/v1/score", text_1="x") == (*bad, "text_2")
    assert refusal(cluster, "/v1/score", text_1=["a", "b"], text_2=["a"]) == (
        *bad,
        "text_1",
    )
    assert refusal(cluster, "/v1/rerank", query="x", documents=[]) == (
        *bad,
        "documents",
    )
    instructed = {"query": "x", "documents": ["y"], "instruction": "z"}
    assert refusal(cluster, "/v1/rerank", **instructed) == (
        400,
        "unsupported",
        "instruction",
    )
    completion = {"prompt": "x", "max_tokens": 1}
    assert refusal(cluster, "/v1/completions", **completion) == (
        400,
        "unsupported",
        "model",
    )
    status, page = cluster.get("/health")
    assert (status, json.loads(page)["status"]) == (200, "ready")


# --- a reranker beside completions ----------------------------------------------------------------


@pytest.fixture(scope="module")
def reranker() -> Path:
    return reranker_folder("qwen3", num_layers=2)


@pytest.fixture(scope="module")
def judges(
    tmp_path_factory: pytest.TempPathFactory, reranker: Path
) -> Iterator[Cluster]:
    config = tiny_cluster(reranker, **SETTINGS)
    with Cluster(tmp_path_factory.mktemp("reranker"), config) as cluster:
        yield cluster


def test_a_reranker_says_how_likely_a_yes_is(judges, reranker):
    query = TEXTS[0]
    documents = [TEXTS[1], TEXTS[2]]
    expected = [
        score_of(reranker, ids_of(reranker, f"<q>{query}<d>{one}?"))
        for one in documents
    ]
    _, reply = send(judges, "/v1/score", text_1=query, text_2=documents)
    assert [one["score"] for one in reply["data"]] == pytest.approx(
        expected, abs=TOLERANCE
    )
    _, ranked = send(
        judges,
        "/v1/rerank",
        query=query,
        documents=documents,
        top_n=1,
        return_documents=False,
    )
    (best,) = ranked["results"]
    assert best["index"] == expected.index(max(expected))
    assert best["relevance_score"] == pytest.approx(max(expected), abs=TOLERANCE)
    assert "document" not in best
    _, told = send(judges, "/v1/score", text_1="a", text_2="b", instruction="be kind")
    other = score_of(reranker, ids_of(reranker, "<i>be kind<q>a<d>b?"))
    assert told["data"][0]["score"] == pytest.approx(other, abs=TOLERANCE)


def test_a_document_is_cut_and_the_end_of_the_pair_stays(judges, reranker):
    _, cut = send(
        judges, "/v1/score", text_1="a", text_2=TEXTS[2], truncate_prompt_tokens=20
    )
    assert cut["usage"]["total_tokens"] <= 20
    document = TEXTS[2]
    while (
        len(ids := ids_of(reranker, f"<q>a<d>{document}?"))
        > cut["usage"]["total_tokens"]
    ):
        document = document[:-1]
    found = cut["data"][0]["score"]
    assert found == pytest.approx(score_of(reranker, ids), abs=TOLERANCE)
    status, reply = send(
        judges, "/v1/score", text_1=TEXTS[2], text_2="b", truncate_prompt_tokens=9
    )
    assert (status, reply["error"]["param"]) == (400, "truncate_prompt_tokens")
    per_document = {"query": "a", "documents": [TEXTS[2]], "max_tokens_per_doc": 3}
    _, short = send(judges, "/v2/rerank", **per_document)
    assert short["usage"]["total_tokens"] < 15


def test_a_reranker_completes_texts_and_makes_no_embeddings(judges):
    assert judges.complete(prompt="roses", max_tokens=3)["usage"]
    assert refusal(judges, "/v1/embeddings", input="x") == (400, "unsupported", "model")
    assert math.isclose(metric(judges.get("/metrics")[1], "baton_node_num_waiting"), 0)


# --- in Python ------------------------------------------------------------------------------------


def test_embeddings_and_scores_in_python_have_the_names_of_vllm(folder):
    with LLM(folder, runner="pooling", cache={"num_blocks": 300}) as llm:
        assert llm.config.decode == 0
        outputs = llm.embed(TEXTS, use_tqdm=False)
        for text, output in zip(TEXTS, outputs, strict=True):
            assert output.prompt_token_ids == ids_of(folder, text)
            expected = embedding_of(folder, output.prompt_token_ids)
            assert close_to(output.outputs.embedding, expected)
        cut = PoolingParams(dimensions=7, truncate_prompt_tokens=4)
        (short,) = llm.embed({"prompt": TEXTS[2]}, use_tqdm=False, pooling_params=cut)
        expected = embedding_of(folder, ids_of(folder, TEXTS[2])[:4], dimensions=7)
        assert close_to(short.outputs.embedding, expected)
        rows = [embedding_of(folder, ids_of(folder, text)) for text in TEXTS]
        scores = [
            one.outputs.score for one in llm.score(TEXTS[0], TEXTS, use_tqdm=False)
        ]
        assert scores == pytest.approx(
            [float(rows[0] @ row) for row in rows], abs=TOLERANCE
        )
        with raises(RequestError, "unsupported", "model"):
            llm.generate("x", use_tqdm=False)
        with raises(RequestError, "invalid_request", "dimensions"):
            llm.embed("x", use_tqdm=False, pooling_params=PoolingParams(dimensions=129))
        with pytest.raises(ValueError, match="2 queries"):
            llm.score(["a", "b"], ["c"], use_tqdm=False)


def test_a_model_of_tokens_makes_embeddings_if_asked():
    folder = model_folder("llama", num_layers=2)
    keywords = {"task": "embed", "tensor_parallel_size": 2}
    with LLM(folder, **keywords, cache={"num_blocks": 300}) as llm:
        (output,) = llm.embed(TEXTS[0], use_tqdm=False)
        assert close_to(
            output.outputs.embedding, embedding_of(folder, output.prompt_token_ids)
        )
        assert llm.generate("x", use_tqdm=False)[0].outputs[0].token_ids
        assert llm.embed(TEXTS[0], use_tqdm=False)[0].outputs == output.outputs
