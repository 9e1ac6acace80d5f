"""Find out, with a few requests before any load, what a server is and what it can return.

A server that would spoil every request of a load is refused in one line that says what to do;
`Probed.fit` removes from the requests the fields that the server does not know.
"""

import asyncio

import msgspec

from baton.bench.client.http import Exchange, Session, body_of, check, send
from baton.bench.client.response import Problem, message_of, one_line
from baton.bench.records import Outcome, Planned, Record
from baton.bench.settings import AUTO_VOCABULARY, Target, Vocabulary, server_address
from baton.protocol.errors import BatonError, ConfigError

TIMEOUT_S = 60.0  # the first response of a server may wait for a compiler
NUM_TOKENS = 2
MAX_NAMES = 8
# Fields of `Target` that a server may refuse; the first attempt that it accepts is used.
FIELDS = ("usage", "ignore_eos", "token_ids")
ATTEMPTS = (FIELDS, ("usage", "ignore_eos"), ("ignore_eos",), ("usage",), ())
LOWEST_ID, HIGHEST_ID = AUTO_VOCABULARY
HIGHEST_IDS = (HIGHEST_ID, 4000, 2000, 1000, 500)


class Probed(msgspec.Struct, frozen=True):
    """A server that streams responses."""

    model: str
    server: str  # the header `Server`
    # The `FIELDS` that it accepts; the check of each length shows whether it obeys `ignore_eos`.
    gives: frozenset[str]

    def fit(self, target: Target) -> Target:
        """Return `target` with the model's name, without fields that the server does not know."""
        fields = {name: getattr(target, name) and name in self.gives for name in FIELDS}
        return msgspec.structs.replace(target, model=self.model, **fields)


class _Named(msgspec.Struct):
    id: str


class _Page(msgspec.Struct):
    """A list of models."""

    data: list[_Named] | None = None


def probe(target: Target, stop_fd: int | None = None) -> Probed:
    """Ask the server, and give up when `stop_fd` becomes readable.

    Raises `ConfigError` for a fault that the user can mend, `BatonError` for a server that fails.
    """
    check(target, [])

    async def until_stopped() -> Probed:
        loop = asyncio.get_running_loop()
        asking = asyncio.ensure_future(_probe(target))
        if stop_fd is not None:
            loop.add_reader(stop_fd, asking.cancel)
        try:
            return await asking
        except asyncio.CancelledError:
            raise BatonError(
                f"interrupted while {target.url} was asked what it can do"
            ) from None
        finally:
            if stop_fd is not None:
                loop.remove_reader(stop_fd)

    return asyncio.run(until_stopped())


async def _probe(target: Target) -> Probed:
    async with Session(target) as session:
        listed = await _exchange(session, target, "GET", session.base_path + "/models")
        model = _model(target, listed)
        planned = Planned(
            index=0, at_s=None, output_tokens=NUM_TOKENS, prompt="Once upon a time"
        )
        for accepted_fields in ATTEMPTS:
            fields = {name: name in accepted_fields for name in FIELDS}
            attempt = msgspec.structs.replace(target, model=model, **fields)
            path = session.base_path + target.path
            body = body_of(attempt, planned)
            tried = await _exchange(session, target, "POST", path, body)
            if (
                tried.problem is None
                or tried.problem.outcome is not Outcome.CLIENT_ERROR
            ):
                break
        _check_streams(target, tried)
        reader = tried.reader
        shown = {"usage": reader.usage is not None, "token_ids": bool(reader.token_ids)}
        gives = {name for name in accepted_fields if shown.get(name, True)}
        server = one_line(listed.headers.get("server", ""))
        return Probed(model, server, frozenset(gives))


def accepted(target: Target) -> Vocabulary:
    """Return the widest range of token ids whose highest id the server accepts in prompts.

    Ids are tried from above, one prompt of one token each; a server answers 4xx to ids it lacks.
    """
    plain = msgspec.structs.replace(target, token_ids=False)

    async def prompted_with(token_id: int) -> Record | None:
        planned = Planned(index=0, at_s=None, output_tokens=1, prompt_ids=(token_id,))
        async with Session(plain) as session:
            return await send(session, plain, planned)

    why = ""
    for highest in HIGHEST_IDS:
        record = asyncio.run(prompted_with(highest))
        assert record is not None, "nothing stops it"
        if record.outcome is not Outcome.CLIENT_ERROR:
            return LOWEST_ID, highest
        why = record.detail
    raise ConfigError(
        f"{target.url} takes no prompt of token ids ({why}): name ids of the model with "
        "--vocabulary LOW-HIGH, or choose --workload text or chat"
    )


async def _exchange(
    session: Session, target: Target, method: str, path: str, body: bytes = b""
) -> Exchange:
    timeout_s = min(target.timeout_s, TIMEOUT_S)
    connection = session.take() or await session.open(timeout_s)
    if isinstance(connection, Problem):
        raise ConfigError(f"cannot reach {target.url}: {connection.detail}")
    if not connection.is_idle:
        raise ConfigError(
            f"{target.url} closed the connection: does another program listen there?"
        )
    exchange = Exchange(target.is_chat)
    await session.exchange(
        connection, session.request(method, path, body), exchange, timeout_s
    )
    return exchange


def _model(target: Target, listed: Exchange) -> str:
    """Return the model to measure: the named one, or the only one."""
    url = target.url
    wanted = target.model
    status = listed.status
    if status is None:
        why = listed.problem.detail if listed.problem is not None else ""
        raise ConfigError(f"{url} gives no response: {why}; is it http:// or https://?")
    if status in (401, 403):
        why = "wrong" if target.api_key else "missing"
        raise ConfigError(f"{url} wants an API key, and it is {why} (status {status})")
    if status == 404 and wanted:
        # The server has no list of models; the first request will show a mistake.
        return wanted
    if status == 404:
        path = f"{server_address(url).base_path}/models"
        raise ConfigError(
            f"{url} has no {path}: correct the path of --url, or name a --model"
        )
    if status != 200:
        why = message_of(bytes(listed.body))
        raise BatonError(f"{url} does not list its models (status {status}): {why}")
    page = _page(listed)
    if page is None or page.data is None:
        raise ConfigError(
            f"{url} is not a server with OpenAI's API: it lists no models"
        )
    names = [model.id for model in page.data]
    shown = ", ".join(map(one_line, names[:MAX_NAMES])) + (
        ", ..." if names[MAX_NAMES:] else ""
    )
    if wanted and wanted not in names:
        text = f"does not serve the model {wanted!r}; it serves {shown or 'none'}"
        raise ConfigError(f"{url} {text}")
    if not wanted and (len(names) != 1 or not names[0].isprintable()):
        raise ConfigError(f"{url} serves {shown or 'no model'}: name one with --model")
    return wanted or names[0]


def _page(exchange: Exchange) -> _Page | None:
    try:
        return msgspec.json.decode(exchange.body, type=_Page)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _check_streams(target: Target, plain: Exchange) -> None:
    """Raise an error if the response to a plain request is not a good stream."""
    if (problem := plain.problem) is None:
        return
    status = "" if plain.status in (None, 200) else f" (status {plain.status})"
    text = f"{target.url} does not stream a response{status}: {problem.detail}"
    if plain.status == 404:
        path = server_address(target.url).base_path + target.path
        text += f"; the request went to {path}: is the path of --url right?"
    is_mendable = problem.outcome in (Outcome.CLIENT_ERROR, Outcome.NOT_STREAMED)
    raise ConfigError(text) if is_mendable else BatonError(text)
