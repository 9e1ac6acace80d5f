"""Texts to pool as token ids, and their requests before nodes that the test plays."""

import asyncio
import json
import math
from array import array
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import msgspec
import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from baton.protocol.config import ClusterConfig
from baton.protocol.errors import ConfigError, Failure, RequestError
from baton.protocol.messages import (
    Cancel,
    CancelDone,
    Failed,
    NodeFacts,
    NodeInfo,
    Pooled,
    Prefill,
)
from baton.protocol.pooling import ModelTasks
from baton.router.http import pooling_handlers
from baton.router.http.pooling_handlers import MAX_AT_ONCE
from baton.router.text.chat_template import ChatTemplate
from baton.router.text.detokenizer import decoding_of
from baton.router.text.pooled_texts import (
    PooledTexts,
    PromptOptions,
    Prompts,
    cosine_of,
    embedding_of,
    score_of,
)
from baton.router.text.tokenizer import Text
from tests.support.async_tests import AsyncTest, Test, with_bench
from tests.support.http_bench import HttpBench
from tests.support.refusals import raises
from tests.support.router_bench import REMOTE, RouterBench
from tests.support.scripted_nodes import ScriptedNode, node_info
from tests.support.small_tokenizers import END, small_tokenizer

PLAIN = PromptOptions(max_tokens=100)
# Qwen3's template, as far as these chats go.
QWEN3 = (
    "{% for m in messages if m.role in ('system', 'user') %}<|im_start|>{{ m.role }}\n"
    "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n"
    "{% endif %}{% endif %}"
)
PAIRS = "{% for m in messages %}[{{ m.role[0] }}]{{ m.content }}{% endfor %}"


def ending_tokenizer() -> Tokenizer:
    """One that adds a token to the end of each text."""
    tokenizer = small_tokenizer("byte_level")
    end = tokenizer.token_to_id(END)
    tokenizer.post_processor = TemplateProcessing(
        single=f"$A {END}", pair=f"$A {END} $B {END}", special_tokens=[(END, end)]
    )
    return tokenizer


def texts_with(
    template: str | None = None, prompts: Prompts | None = None
) -> tuple[PooledTexts, Text]:
    tokenizer = ending_tokenizer()
    text = Text(tokenizer, decoding_of(tokenizer))
    chat = None if template is None else ChatTemplate(template, {})
    return PooledTexts(text, chat, prompts or Prompts()), text


def test_the_end_of_a_text_stays_when_the_text_is_cut():
    texts, text = texts_with()
    whole = texts.of_input("hello world stop", PLAIN)
    end = text.encode_now("")[-1]
    for number in (1, 2, len(whole) - 1):
        cut = texts.of_input("hello world stop", PromptOptions(100, cut_to=number))
        assert cut == [*whole[: number - 1], end]
    assert texts.of_input("hello world stop", PromptOptions(100, cut_to=50)) == whole
    bare = PromptOptions(100, cut_to=3, add_special_tokens=False)
    assert texts.of_input("hello world stop", bare) == whole[:3]
    assert texts.of_input(whole, PromptOptions(100, cut_to=2)) == whole[:2]
    for given in ("hello " * 200, "x" * 10_000, [5] * 101):
        with raises(RequestError, "context_length_exceeded", "prompt"):
            texts.of_input(given, PLAIN)


def test_prompts_of_a_folder_go_before_texts_by_their_name_or_by_default(tmp_path):
    file = tmp_path / "config_sentence_transformers.json"
    assert Prompts.load(str(tmp_path)) == Prompts()
    prompts = {"query": "find: ", "document": "", "nothing": None}
    file.write_text(
        json.dumps({"prompts": prompts, "default_prompt_name": "query", "more": 1})
    )
    texts, text = texts_with(prompts=Prompts.load(str(tmp_path)))
    assert texts.of_input("x", PLAIN) == text.encode_now("find: x")
    for name in ("document", "nothing"):
        assert texts.of_input(
            "x", PromptOptions(100, prompt_name=name)
        ) == text.encode_now("x")
    with raises(RequestError, "invalid_request", "prompt_name"):
        texts.of_input("x", PromptOptions(100, prompt_name="q"))
    file.write_text("[]")
    with pytest.raises(ConfigError, match="cannot take prompts"):
        Prompts.load(str(tmp_path))


def test_a_pair_is_joined_as_the_tokenizer_joins_pairs():
    texts, text = texts_with()
    end = text.encode_now("")
    pair = texts.of_pair("hello", "world", PLAIN, asks=False)
    first, second = (text.encode_now(one, False) for one in ("hello", "world"))
    assert pair == [*first, *end, *second, *end]
    told = texts.of_pair(
        "hello", "world", PromptOptions(100, instruction="the "), asks=False
    )
    assert told[: -len([*second, *end])] == text.encode_now("the hello")


def test_a_model_that_is_asked_gets_the_words_of_qwen3_reranker():
    texts, text = texts_with(QWEN3)
    options = PromptOptions(4000)
    asked = text.decode(
        texts.of_pair("Q", "D", options, asks=True), skip_special_tokens=False
    )
    assert asked == (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query "
        'and the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
        "<|im_start|>user\n<Instruct>: Given a web search query, retrieve relevant passages that "
        "answer the query\n<Query>: Q\n<Document>: D<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    without, _ = texts_with()
    with raises(RequestError, "no_chat_template"):
        without.of_pair("Q", "D", options, asks=True)


@pytest.mark.parametrize("asks", [False, True])
def test_a_template_with_roles_for_pairs_is_filled_in(asks):
    texts, text = texts_with(PAIRS)
    assert text.decode(texts.of_pair("Q", "D", PLAIN, asks=asks)) == "[q]Q[d]D"
    told = PromptOptions(100, instruction="I")
    assert text.decode(texts.of_pair("Q", "D", told, asks=asks)) == "[s]I[q]Q[d]D"


def test_a_long_document_of_a_pair_is_cut_and_the_rest_stays():
    texts, text = texts_with(PAIRS + "?!")
    document = "hello world 你好 " * 30
    cut = texts.of_pair("Q", document, PromptOptions(500, cut_to=40), asks=True)
    shown = text.decode(cut)
    assert 30 < len(cut) <= 40
    assert (shown[:7], shown[-2:]) == ("[q]Q[d]", "?!")
    assert document.startswith(shown[7:-2].rstrip("\ufffd"))
    short = texts.of_pair(
        "Q", document, PromptOptions(500, max_document_tokens=4), asks=True
    )
    assert short == texts.of_pair(
        "Q", text.decode(text.encode_now(document)[:4]), PLAIN, asks=True
    )
    with raises(RequestError, "invalid_request", "truncate_prompt_tokens"):
        texts.of_pair("Q" * 100, document, PromptOptions(500, cut_to=40), asks=True)


def test_a_document_of_characters_with_many_tokens_is_cut_between_them():
    texts, text = texts_with(PAIRS)
    for most in range(20, 40):
        cut = texts.of_pair(
            "Q", "\U0001f600" * 50, PromptOptions(500, cut_to=most), asks=True
        )
        assert most - 4 < len(cut) <= most
        assert set(text.decode(cut).removeprefix("[q]Q[d]")) == {"\U0001f600"}


def row(*numbers: float) -> bytes:
    return array("f", numbers).tobytes()


def test_rows_become_embeddings_cosines_and_probabilities():
    assert embedding_of(row(3, 4), None, normalizes=True) == pytest.approx([0.6, 0.8])
    assert embedding_of(row(3, 4, 5), 2, normalizes=True) == pytest.approx([0.6, 0.8])
    assert embedding_of(row(3, 4), None, normalizes=False) == [3, 4]
    assert embedding_of(row(0, 0), None, normalizes=True) == [0, 0]
    with raises(RequestError, "invalid_request", "dimensions"):
        embedding_of(row(3, 4), 3, normalizes=False)
    assert cosine_of(row(3, 4), row(6, 8)) == pytest.approx(1)
    assert cosine_of(row(3, 4), row(-4, 3)) == pytest.approx(0, abs=1e-9)
    assert score_of(row(-2.5), is_probability=False) == -2.5
    for number in (-1000.0, -2.5, 0.0, 2.5, 1000.0):
        expected = 0.5 * (1 + math.tanh(number / 2))
        assert score_of(row(number), is_probability=True) == pytest.approx(expected)


# --- requests -------------------------------------------------------------------------------------


def embedding_node() -> NodeInfo:
    facts = NodeFacts(tasks=ModelTasks(embedding="last", normalizes=True))
    return msgspec.structs.replace(node_info("p0", "prefill"), facts=facts)


def before_a_node() -> Callable[[AsyncTest], Test]:
    """Run an async test with a served router as `http`, and a prefill node as `node`."""

    def run(use: AsyncTest, folder: Path) -> None:
        async def go(bench: RouterBench) -> None:
            node = await bench.scripted(embedding_node())
            async with HttpBench(bench.router, ClusterConfig(router=REMOTE)) as http:
                await use(http, node)
            await bench.settled()

        RouterBench(folder).run(go)

    return with_bench("http", "node", run=run)


async def orders_of(node: ScriptedNode, num: int) -> list[Prefill]:
    """The next prompts, of which there are no more before these are answered."""
    orders = [await node.hear(Prefill) for _ in range(num)]
    await asyncio.sleep(0.2)
    assert not any(isinstance(message, Prefill) for message in node.heard)
    return orders


@before_a_node()
async def test_each_prompt_of_a_large_batch_is_sent_once_and_few_at_a_time(http, node):
    num = 2 * MAX_AT_ONCE + 3
    inputs = [[1 + index % 200, index // 200] for index in range(num)]
    body = {"input": inputs, "normalize": False}
    asked = asyncio.create_task(http.post(body, "/v1/embeddings"))
    sent = []
    for size in (MAX_AT_ONCE, MAX_AT_ONCE, 3):
        orders = await orders_of(node, size)
        for order in reversed(orders):
            node.say(Pooled(order.key, row(order.token_ids[0], 0)))
        sent += [order.token_ids for order in orders]
    reply = await asked
    assert reply.status == 200
    assert sent == inputs
    firsts = [one["embedding"][0] for one in reply.json["data"]]
    assert firsts == [ids[0] for ids in inputs]
    assert reply.json["usage"]["prompt_tokens"] == 2 * num


@before_a_node()
async def test_long_prompts_of_a_batch_do_not_wait_for_each_other_until_the_queue_gives_up(
    http, node
):
    inputs = [[1, 2, 3], [4] * 9, [5], [6, 7], [8] * 4]
    with mock.patch.object(pooling_handlers, "MAX_TOKENS_AT_ONCE", 6):
        asked = asyncio.create_task(http.post({"input": inputs}, "/v1/embeddings"))
        for expected in ([[1, 2, 3]], [[4] * 9], [[5], [6, 7]], [[8] * 4]):
            orders = await orders_of(node, len(expected))
            assert [order.token_ids for order in orders] == expected
            for order in orders:
                node.say(Pooled(order.key, row(1, 0)))
        assert (await asked).status == 200


@pytest.mark.parametrize("ids", [[2**31], [2**64], [1024], [-1], []])
@before_a_node()
async def test_ids_that_no_model_has_are_refused_before_a_node_computes(
    http, node, ids
):
    reply = await http.post({"input": [[1], ids]}, "/v1/embeddings")
    assert (reply.status, reply.error["param"]) == (400, "input")
    assert not any(isinstance(message, Prefill) for message in node.heard)


@before_a_node()
async def test_an_error_names_the_text_of_a_pair_that_is_wrong(http, node):
    for query, document, wrong in (("", "D", "text_1"), ("Q", "", "text_2")):
        reply = await http.post({"text_1": query, "text_2": [document]}, "/v1/score")
        assert (reply.status, reply.error["param"]) == (400, wrong)
    assert not any(isinstance(message, Prefill) for message in node.heard)


@before_a_node()
async def test_a_client_that_leaves_ends_every_prompt_of_its_batch(http, node):
    body = {"input": [[1], [2], [3]]}
    asked = asyncio.create_task(http.post(body, "/v1/embeddings"))
    orders = [await node.hear(Prefill) for _ in range(3)]
    node.say(Pooled(orders[0].key, row(1)))
    await asyncio.sleep(0.1)
    asked.cancel()
    ended = [(await node.hear(Cancel)).keys for _ in range(2)]
    assert sorted(ended) == sorted((order.key,) for order in orders[1:])
    node.say(CancelDone(tuple(key for keys in ended for key in keys)))


@before_a_node()
async def test_the_first_error_of_a_batch_is_its_only_outcome(http, node):
    body = {"input": [[1], [2], [3]]}
    asked = asyncio.create_task(
        http.post(body, "/v1/embeddings", **{"X-Request-Id": "mine"})
    )
    orders = [await node.hear(Prefill) for _ in range(3)]
    failure = Failure("not_finite", "the model computed NaN", http_status=500)
    node.say(Failed(orders[1].key, failure))
    node.say(Pooled(orders[0].key, row(1)))
    reply = await asked
    assert (reply.status, reply.error["code"]) == (500, "not_finite")
    (ended,) = (await node.hear(Cancel)).keys
    assert ended == orders[2].key
    node.say(CancelDone((ended,)))
    page = (await http.get("/metrics")).text
    assert 'path="prefill_only"' in page
