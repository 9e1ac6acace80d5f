"""What a server is and what it can return, asked before any load: a few requests of two tokens.

The experiments call `probe` once per target. Whatever would spoil every request of a load is said
here in one line, with what to do about it; what the server merely does not know is left out of the
requests by `Probed.fit`.
"""

import asyncio

import msgspec

from baton.bench.client.answer_reader import Problem, message_of, one_line
from baton.bench.client.ask import Session
from baton.bench.client.exchange import Exchange
from baton.bench.client.target import Target, body_of, check, place_of
from baton.bench.records import Outcome, Planned
from baton.protocol.errors import BatonError, ConfigError

TIMEOUT_S = 60.0  # the first answer of a server may wait for a compiler
NUM_TOKENS = 2
MAX_NAMES = 8
PATH_OR_MODEL = "correct the path of --url, or name the model with --model if it has no such list"
# Fields of `Target` that ask for an extension.
EXTENSIONS = ("ignore_eos", "token_ids", "timeline", "continuous_usage")


class Probed(msgspec.Struct, frozen=True):
    """A server that answers streams. The flags say what it returned when asked for it."""

    model: str
    server: str  # the header `Server`
    version: str  # empty if it does not say
    usage: bool
    ignore_eos: bool  # accepted; whether it is obeyed is verified with every length
    token_ids: bool
    timeline: bool
    continuous_usage: bool

    def fit(self, target: Target) -> Target:
        """`target` with the model's name, and without what this server would refuse or ignore.

        Running usage is asked for where there are no token ids to count.
        """
        token_ids = target.token_ids and self.token_ids
        return msgspec.structs.replace(
            target,
            model=self.model,
            usage=target.usage and self.usage,
            ignore_eos=target.ignore_eos and self.ignore_eos,
            token_ids=token_ids,
            timeline=target.timeline and self.timeline,
            continuous_usage=self.continuous_usage and not token_ids,
        )


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


class _Version(msgspec.Struct):
    version: str


def probe(target: Target, stop_fd: int | None = None) -> Probed:
    """Raises `ConfigError` for what the user can mend, `BatonError` for a server that fails.

    It gives up when `stop_fd` becomes readable.
    """
    check(target, [])
    return asyncio.run(_probe(target) if stop_fd is None else _until(stop_fd, target))


async def _until(stop_fd: int, target: Target) -> Probed:
    loop = asyncio.get_running_loop()
    asking = asyncio.ensure_future(_probe(target))
    loop.add_reader(stop_fd, asking.cancel)
    try:
        return await asking
    except asyncio.CancelledError:
        raise BatonError(f"interrupted while {target.url} was asked what it can do") from None
    finally:
        loop.remove_reader(stop_fd)


async def _probe(target: Target) -> Probed:
    async with Session(target) as session:
        asked = await _get(session, target, session.base_path + "/models")
        model = _model(target, asked)
        # The bare request first: it has to work, and then a refusal is about the extension.
        bare = msgspec.structs.replace(
            target, model=model, usage=True, **dict.fromkeys(EXTENSIONS, False)
        )
        plain = await _try(session, bare)
        if _is_refused(plain):
            bare = msgspec.structs.replace(bare, usage=False)
            without = await _try(session, bare)
            plain = plain if _is_refused(without) else without
        _check_streams(target, plain)
        returned = {"usage": plain.reader.has_usage}
        for name in EXTENSIONS:
            extended = msgspec.structs.replace(bare, **{name: True})
            returned[name] = _has(name, await _try(session, extended))
        version = await _get(session, target, session.base_path.removesuffix("/v1") + "/version")
        return Probed(
            model=model,
            server=one_line(asked.headers.get("server", "")),
            version=_version(version),
            **returned,
        )


async def _get(session: Session, target: Target, path: str) -> Exchange:
    return await _send(session, target, session.request("GET", path))


async def _try(session: Session, target: Target) -> Exchange:
    planned = Planned(index=0, at_s=None, output_tokens=NUM_TOKENS, prompt="Once upon a time")
    path = session.base_path + target.path
    return await _send(session, target, session.request("POST", path, body_of(target, planned)))


async def _send(session: Session, target: Target, request: bytes) -> Exchange:
    timeout_s = min(target.timeout_s, TIMEOUT_S)
    connection = session.take() or await session.open(timeout_s)
    if isinstance(connection, Problem):
        raise ConfigError(f"cannot reach {target.url}: {connection.detail}")
    if not connection.is_idle:
        text = "spoke or hung up before it was asked: is another program listening there?"
        raise ConfigError(f"{target.url} {text}")
    exchange = Exchange(target.is_chat)
    await session.exchange(connection, request, exchange, timeout_s)
    return exchange


def _model(target: Target, asked: Exchange) -> str:
    """The model to ask for: the named one, or the only one."""
    status = asked.status
    if status is None:
        why = asked.problem.detail if asked.problem is not None else ""
        hint = "" if target.url.startswith("https:") else "; https:// instead of http://?"
        raise ConfigError(f"{target.url} gives no answer: {why}{hint}")
    if status in (401, 403):
        why = "wrong" if target.api_key else "missing"
        raise ConfigError(f"{target.url} wants an API key, and it is {why} (status {status})")
    if status == 404 and target.model:
        return target.model  # a server without the list; the first request will tell
    if status == 404:
        text = f"has no {place_of(target.url).base_path}/models (status 404): {PATH_OR_MODEL}"
        raise ConfigError(f"{target.url} {text}")
    if status != 200:
        why = message_of(bytes(asked.body))
        raise BatonError(f"{target.url} does not list its models (status {status}): {why}")
    try:
        names = [model.id for model in msgspec.json.decode(asked.body, type=_Models).data]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        text = "is no server with OpenAI's API: its list of models is not JSON of that form"
        raise ConfigError(f"{target.url} {text}") from None
    shown = ", ".join(map(one_line, names[:MAX_NAMES])) + (", ..." if names[MAX_NAMES:] else "")
    if target.model and target.model not in names:
        text = f"does not serve the model {target.model!r}; it serves {shown or 'none'}"
        raise ConfigError(f"{target.url} {text}")
    if not target.model and len(names) != 1:
        text = f"serves {shown or 'no model'}: name one with --model"
        raise ConfigError(f"{target.url} {text}")
    if not target.model and not names[0].isprintable():
        raise ConfigError(f"{target.url} serves {shown!r}, which is no name to print")
    return target.model or names[0]


def _is_refused(asked: Exchange) -> bool:
    return asked.problem is not None and asked.problem.outcome is Outcome.CLIENT_ERROR


def _check_streams(target: Target, asked: Exchange) -> None:
    """Whether a plain stream works at all."""
    if (problem := asked.problem) is None:
        return
    kind = ConfigError if problem.outcome in _MENDABLE else BatonError
    status = "" if asked.status in (None, 200) else f" (status {asked.status})"
    text = f"{target.url} does not stream an answer{status}: {problem.detail}"
    if asked.status == 404:
        asked_for = place_of(target.url).base_path + target.path
        text += f"; it was asked for {asked_for}: is the path of --url right?"
    raise kind(text)


_MENDABLE = (Outcome.CLIENT_ERROR, Outcome.NOT_STREAMED)


def _has(name: str, asked: Exchange) -> bool:
    """Whether the answer shows the extension that it was asked for."""
    if asked.problem is not None:
        return False
    match name:
        case "token_ids":
            return bool(asked.reader.token_ids)
        case "timeline":
            return asked.reader.timeline is not None
        case "continuous_usage":
            return asked.reader.has_running_usage
        case _:
            return True


def _version(asked: Exchange) -> str:
    try:
        return one_line(msgspec.json.decode(asked.body, type=_Version).version)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""
