"""The ids of events say how much of a response its reader has, and what makes it again."""

import json

import pytest

from baton.protocol.errors import NodeError, RequestError
from baton.protocol.messages import FinishReason
from baton.router.core.stream import ReceivedPart, RequestStream, digest_of
from baton.router.http.api.event_ids import MAX_CHOICES, EventIds, ResponseHead
from baton.router.http.api.openai_chunks import ChunkEvents, ShownPrompt
from baton.router.http.api.schema import ParsedRequest
from baton.router.outputs import CompletionOutput
from tests.support.async_tests import on_a_loop
from tests.support.http_bench import TEXT, HttpBench, ScriptedEngine, served

NAME = "chatcmpl-" + "0a" * 12
NOTHING = ReceivedPart()
STREAMED = {"Accept": "text/event-stream"}
START = ResponseHead(NAME, 0x65, -7, (NOTHING,) * 3)


def test_an_id_tells_what_its_events_brought():
    ids = EventIds(START)
    ids.begin(1)
    ids.advance(2, [7], has_ended=False)
    ids.advance(2, [1, 151_000], has_ended=True)
    digest = digest_of([7, 1, 151_000])
    event_id = f"{NAME}:65--7:.0.3e@{digest:08x}"
    assert ids.current().decode() == event_id
    received = (NOTHING, ReceivedPart(0, True), ReceivedPart(3, True, True, digest))
    head = ResponseHead.from_id(event_id)
    assert head == ResponseHead(NAME, 0x65, -7, received)
    again = EventIds(head)
    assert again.current().decode() == event_id
    again.advance(1, [4, 5], has_ended=False)
    later = ResponseHead.from_id(again.current(b"/u").decode())
    assert (later.received[1].digest, later.tail) == (digest_of([4, 5]), "/u")


@pytest.mark.parametrize(
    "event_id",
    [
        "",
        NAME,
        f"{NAME}:1",
        f"{NAME}:65-7:-1",
        f"{NAME}:65-7:1e2",
        f"{NAME}:65-7:@00000001",
        f"{NAME}:65-7:1@7",
        f"{NAME}:65-7:1/x",
        f"{NAME}:65-7:{'1' * 10}",
        f"{NAME}:65-7:" + MAX_CHOICES * "1.",
        f"{NAME}:65-7:1\n",
        f"{NAME}:65:1",
        f"{NAME}:65-{'f' * 17}:1",
        f"x{NAME}:65-7:1",
        f"cmpl-{'g' * 24}:65-7:1",
    ],
)
def test_what_is_no_id_is_refused(event_id):
    with pytest.raises(RequestError) as error:
        ResponseHead.from_id(event_id)
    assert error.value.param == "Last-Event-ID"


@pytest.mark.parametrize("is_chat", [True, False])
def test_the_packed_prompts_a_prompt_come_again_only_to_who_has_nothing(is_chat):
    parsed = ParsedRequest(
        endpoint="chat" if is_chat else "completions",
        model=None,
        prompts=(),
        sampling={},
        is_streamed=True,
        include_usage=False,
        continuous_usage=False,
        token_ids=True,
    )
    prompts = [ShownPrompt(token_ids=[5, 6])]
    for received, times in ((NOTHING, 1), (ReceivedPart(1, True), 0)):
        head = ResponseHead(NAME, 1, 1, (received,))
        events = ChunkEvents(parsed, head, prompts, [2], has_ids=True)
        data = b"".join(
            events.take(CompletionOutput(0, " a", [token_id])) for token_id in (7, 8)
        )
        assert data.count(b'"prompt_token_ids":[5,6]') == times
        assert data.count(b'"token_ids":') == 2


def test_tokens_are_passed_over_however_they_come_and_others_are_noticed():
    part = ReceivedPart(3, True, False, digest_of([5, 6, 7]))
    for cuts in (
        [[5, 6, 7], [8]],
        [[5], [], [6, 7, 8]],
        [[5, 6], [7], [8]],
        [[5, 6, 7, 8]],
    ):
        passing = part
        for tokens in cuts:
            assert not passing.is_passed or tokens == [8]
            passing = passing.passing(tokens, is_end=False)
        assert passing.is_passed
    for tokens, is_end in (([5, 6, 8], False), ([5, 6], True), ([], True)):
        with pytest.raises(RequestError) as error:
            part.passing(tokens, is_end=is_end)
        assert error.value.code == "stream_changed"


def saying(*tokens: list[int], end: FinishReason = "length") -> ScriptedEngine:
    """Return an engine that says these tokens, one push for each list."""

    def script(stream: RequestStream) -> None:
        stream.metrics.num_attempts = 1
        for index in range(stream.params.n):
            for part in tokens[:-1]:
                stream.push(index, part, None)
            stream.push(index, tokens[-1], end)
        stream.finish()

    return ScriptedEngine(script)


async def events_of(
    bench: HttpBench, body: dict[str, object], last: str = ""
) -> list[tuple[str, str]]:
    headers = {**STREAMED, **({"Last-Event-ID": last} if last else {})}
    reply = await bench.post({"stream": True, **body}, **headers)
    assert reply.status == 200, reply.text
    return reply.events


WORDS = [[token] for token in TEXT.encode_now(" hello the world. the end")]
BODIES: list[dict[str, object]] = [
    {"prompt": [5]},
    {"prompt": [5], "n": 3, "stream_options": {"include_usage": True}},
    {"prompt": [5], "stop": ["the end", "world, never"]},
    {"prompt": [5], "return_token_ids": True, "seed": 3},
]


@pytest.mark.parametrize("body", BODIES)
@on_a_loop
async def test_after_every_event_the_rest_comes_byte_for_byte(body):
    """Whatever the steps are in which it is computed again."""
    async with HttpBench(saying(*WORDS)) as bench:
        whole = await events_of(bench, body)
        assert whole[-1][1] == "[DONE]"
        tokens = [token for (token,) in WORDS]
        for cuts in (WORDS, [tokens], [tokens[:3], tokens[3:]]):
            engine = saying(*cuts)
            async with HttpBench(engine) as other:
                for number, (event_id, _) in enumerate(whole[:-1], 1):
                    rest = await events_of(other, body, event_id)
                    assert text_of(rest) == text_of(whole[number:])
                    assert rest[-1] == whole[-1]
                    sought = ResponseHead.from_id(event_id)
                    assert engine.streams[-1].params.seed == sought.seed
                    assert engine.streams[-1].metrics.num_new_tokens <= len(WORDS) * 3


def text_of(events: list[tuple[str, str]]) -> dict[int, tuple[str, str]]:
    """Return the text and the end of each choice."""
    found: dict[int, tuple[str, str]] = {}
    for _, data in events[:-1]:
        for choice in json.loads(data)["choices"]:
            text, _ = found.get(choice["index"], ("", ""))
            found[choice["index"]] = (
                text + choice["text"],
                choice["finish_reason"] or "",
            )
    return found


@served(script=None)
async def test_other_tokens_than_the_clients_end_the_request_before_its_first_event(
    bench, engine
):
    engine.script = saying(*WORDS).script
    (first, *_) = await events_of(bench, {"prompt": [5]})
    engine.script = saying([9], *WORDS).script
    reply = await bench.post(
        {"prompt": [5], "stream": True}, **{"Last-Event-ID": first[0]}
    )
    assert (reply.status, reply.json["error"]["code"]) == (409, "stream_changed")
    assert len(engine.closed) == 1, "its nodes go on"
    for more in ({"stream": False}, {"n": 2}, {"echo": True}, {"logprobs": 1}):
        body = {"prompt": [5], "stream": True, **more}
        reply = await bench.post(body, **{"Last-Event-ID": first[0]})
        assert (reply.status, reply.json["error"]["code"]) == (409, "stream_changed")


@served(script=None)
async def test_a_stream_that_is_lost_again_is_resumed_again(bench, engine):
    def lost(stream: RequestStream) -> None:
        stream.metrics.num_attempts = 1
        for part in WORDS[: 2 + 2 * len(engine.streams)]:
            stream.push(0, part, None)
        stream.finish(NodeError("gone"))

    engine.script = lost
    text = ""
    last = ""
    for _ in range(2):
        events = await events_of(bench, {"prompt": [5]}, last)
        assert "error" in json.loads(events.pop()[1])
        text += text_of([*events, ("", "")])[0][0]
        last = events[-1][0]
    engine.script = saying(*WORDS).script
    text += text_of(await events_of(bench, {"prompt": [5]}, last))[0][0]
    assert text == " hello the world. the end"


@served(script=None)
async def test_benchmarks_get_no_ids_and_other_responses_get_numbers(bench, engine):
    engine.script = saying(*WORDS).script
    reply = await bench.post({"prompt": [5], "stream": True}, Accept="*/*")
    assert "id: " not in reply.text
    assert engine.streams[-1].params.seed is None
    for more in ({"echo": True}, {"logprobs": 0}, {"prompt": [[5], [6]]}):
        events = await events_of(bench, {"prompt": [5], **more})
        assert [event_id.partition(":")[2] for event_id, _ in events[:2]] == ["1", "2"]
