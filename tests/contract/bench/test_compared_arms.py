"""Arms of a comparison that return different things are asked alike, and so counted alike."""

from collections.abc import Sequence

from baton.bench.client.target import Target, body_of
from baton.bench.compare import connect
from baton.bench.experiment import Experiment, Server
from baton.bench.records import Planned
from baton.bench.selftest.answers import DONE, event, token, usage, usage_body
from baton.bench.selftest.scripted_server import Call, Play, ScriptedServer
from baton.bench.settings import CompareSettings, LoadSettings

ASKED = Planned(index=0, at_s=None, output_tokens=2, prompt="Once upon a time")


def giving(*fields: str) -> Play:
    """A server that knows these fields of a request."""

    async def play(call: Call) -> None:
        knows_ids = "return_token_ids" in fields and "return_token_ids" in call.body
        runs = "running usage" in fields and "continuous_usage_stats" in str(call.body)
        for number in range(call.num_tokens):
            more = {"usage": usage_body(number + 1)} if runs else {}
            await call.write(token(" a", [7] if knows_ids else None, **more))
        if "timeline" in fields and "timeline" in call.body:
            await call.write(event({"choices": [], "timeline": [{"queue_s": 0.1}]}))
        await call.send(usage(call.num_tokens), DONE)

    return play


def connected(servers: Sequence[ScriptedServer]) -> list[Server]:
    settings = CompareSettings(load=LoadSettings(requests=1))
    arms = {server.url: Target(server.url) for server in servers}
    with Experiment("compare", settings, [None], concurrency=1) as experiment:
        return list(connect(experiment, arms).values())


def test_arms_are_asked_for_what_all_of_them_give() -> None:
    with (
        ScriptedServer(giving("return_token_ids", "running usage", "timeline")) as rich,
        ScriptedServer(giving("running usage")) as plain,
    ):
        first, second = connected([rich, plain])
        assert body_of(first.target, ASKED) == body_of(second.target, ASKED)
        assert first.target.continuous_usage
        assert not first.target.timeline
        assert first.described.endswith("giving usage, running usage")


def test_arms_that_all_give_token_ids_are_counted_by_them() -> None:
    given = ("return_token_ids", "running usage", "timeline")
    with ScriptedServer(giving(*given)) as one, ScriptedServer(giving(*given)) as other:
        for arm in connected([one, other]):
            assert (arm.target.token_ids, arm.target.timeline) == (True, True)
            assert not arm.target.continuous_usage
