"""The ids of events say how much of an answer its reader has, and nothing else is taken for one."""

import pytest

from baton.protocol.errors import RequestError
from baton.router.core.reattach import ReceivedPart
from baton.router.core.stream import digest_of
from baton.router.http.api.openai_chunks import ResponseWriter, ShownPrompt
from baton.router.http.api.sse import (
    MAX_CHOICES,
    ChunkEvents,
    EventIds,
    Form,
    ResumePosition,
    form_of,
    kept_of,
    owner_of,
    resume_position,
    start_of,
)
from baton.router.outputs import CompletionOutput
from baton.router.text.response_parser import Parsing
from tests.support.http_bench import served

NAME = "chatcmpl-" + "0a" * 12
NOTHING = ReceivedPart()


def test_an_id_tells_what_its_events_brought():
    ids = EventIds(NAME, [NOTHING] * 3)
    ids.begin(1)
    ids.advance(2, [7], has_ended=False)
    ids.advance(2, [1, 151_000], has_ended=True)
    digest = digest_of([7, 1, 151_000])
    event_id = f"{NAME}:.0.3e@{digest:08x}"
    assert ids.current().decode() == event_id
    received = (NOTHING, ReceivedPart(0, True), ReceivedPart(3, True, True, digest))
    assert resume_position(event_id) == ResumePosition(NAME, received)
    again = EventIds(NAME, received)
    assert again.current().decode() == event_id
    again.advance(1, [4, 5], has_ended=False)
    place = resume_position(again.current(b"/u").decode())
    assert place.received is not None
    assert (place.received[1].digest, place.tail) == (digest_of([4, 5]), "/u")


@pytest.mark.parametrize(
    "event_id",
    [
        "",
        NAME,
        f"{NAME}:-1",
        f"{NAME}:1e2",
        f"{NAME}:@00000001",
        f"{NAME}:1@7",
        f"{NAME}:1/x",
        f"{NAME}:{'1' * 10}",
        f"{NAME}:" + MAX_CHOICES * "1.",
        f"{NAME}:1\n",
        f"x{NAME}:1",
        f"cmpl-{'g' * 24}:1",
    ],
)
def test_what_is_no_id_is_refused(event_id):
    with pytest.raises(RequestError) as error:
        resume_position(event_id)
    assert error.value.param == "Last-Event-ID"


def test_a_name_alone_is_the_start_and_must_be_one_of_ours():
    assert start_of(NAME) == ResumePosition(NAME, None)
    with pytest.raises(RequestError):
        start_of("cmpl-1")


def test_a_form_comes_back_as_it_was_and_another_version_of_it_is_gone():
    writer = ResponseWriter(NAME, "tiny", 7, True, True, False, False)
    form = Form(writer, {"stop": ["a", "é"], "n": 2, "max_tokens": 5}, "request", Parsing("hermes"))
    kept = kept_of(form, b"owner", 2)
    assert form_of(kept.form) == form
    assert form.params.stop == ["a", "é"]
    for data in (b"", b"\x93\x01\x02\x03", kept.form[:-3]):
        with pytest.raises(RequestError) as error:
            form_of(data)
        assert error.value.code == "stream_gone"
    assert kept_of(form, b"", MAX_CHOICES + 1) is None
    huge = Form(writer, {"stop": ["x" * 40_000]}, "request")
    assert kept_of(huge, b"", 1) is None


@pytest.mark.parametrize("is_chat", [True, False])
def test_the_token_ids_of_a_prompt_come_again_only_to_who_has_nothing(is_chat):
    writer = ResponseWriter(NAME, "tiny", 7, is_chat, include_usage=False, token_ids=True)
    prompts = [ShownPrompt(token_ids=[5, 6])]
    for received, times in ((None, 1), ((ReceivedPart(1, True),), 0)):
        events = ChunkEvents(writer, 1, prompts, [2], ResumePosition(NAME, received))
        data = b"".join(events.take(CompletionOutput(0, " a", [token_id])) for token_id in (7, 8))
        assert data.count(b'"prompt_token_ids":[5,6]') == times
        assert data.count(b'"token_ids":') == 2


def test_an_owner_is_known_by_its_key_alone():
    one, other = (owner_of(f"Bearer {key}", wants_key=True) for key in ("one", "two"))
    assert one != other
    assert owner_of("bearer  one", wants_key=True) == one
    assert owner_of("Bearer one", wants_key=False) == b""


@served()
async def test_a_client_that_has_all_is_told_to_stop_asking(bench):
    async def get(path: str, event_id: str) -> int:
        async with bench.session.get(path, headers={"Last-Event-ID": event_id}) as reply:
            return reply.status

    path = f"/v1/streams/{NAME}"
    assert await get(path, f"{NAME}:5e/d") == 204
    assert await get(path, "another") == 400
    assert await get(path, f"cmpl-{24 * '0'}:1") == 400
    assert (await bench.get("/v1/streams/another")).status == 404
    await bench.server.drain(0.0)
    assert await get(path, f"{NAME}:5e") == 503
