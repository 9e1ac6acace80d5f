"""Whom a load is put on, and what it asks of a server: plain data, with checks.

The command line makes a `Target`, the client turns it and a planned request into bytes, and
`probe.py` finds out what the server can do. The key for the server is in here, so a `Target` is
never written anywhere; `public` is what reports get.
"""

from typing import Literal
from urllib.parse import urlsplit

import msgspec

from baton.bench.records import Planned
from baton.protocol.errors import ConfigError

Api = Literal["completions", "chat"]
PATHS: dict[Api, str] = {"completions": "/completions", "chat": "/chat/completions"}
# The client decides about these, and reads the answer accordingly.
OWN_FIELDS = (
    "model", "prompt", "messages", "stream", "n", "max_tokens", "max_completion_tokens",
)  # fmt: skip


class Target(msgspec.Struct, frozen=True):
    """A server, a model on it, and the fields that every request carries.

    `token_ids`, `timeline` and `continuous_usage` ask for extensions; `Probed.fit` turns off those
    that the server refuses. Without `ignore_eos` lengths are asked for, but not forced.
    """

    url: str
    model: str
    api: Api = "completions"
    api_key: str = ""
    verify_tls: bool = True
    ca_file: str = ""
    timeout_s: float = 300.0  # of one answer, from sending
    extra_body: dict[str, object] = {}
    timeline: bool = False
    token_ids: bool = False
    ignore_eos: bool = True
    usage: bool = True
    continuous_usage: bool = False


class Place(msgspec.Struct, frozen=True):
    """Where requests go: what a URL says."""

    host: str
    port: int
    is_tls: bool
    base_path: str  # up to and with /v1

    @property
    def authority(self) -> str:
        """The value of the header `Host`."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.is_tls else 80) else f"{host}:{self.port}"


def place_of(url: str) -> Place:
    """Raises `ConfigError`. The path may end in /v1 or not."""
    shown = repr(url.rpartition("@")[2])  # what stands before it may be a password
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigError(f"the server's address {shown} is no URL: {error}") from None
    if parts.scheme not in ("http", "https") or not host:
        text = f"the server's address {shown} must be http://host:port or https://host:port"
        raise ConfigError(text)
    if parts.username is not None or parts.query or parts.fragment:
        # Not shown: it may hold a password.
        raise ConfigError("the server's address is host, port and path only; keys have a flag")
    path = parts.path.rstrip("/")
    if not all(33 <= ord(letter) < 127 for letter in path):
        raise ConfigError(f"the path of the server's address {shown} must be plain ASCII")
    is_tls = parts.scheme == "https"
    base_path = path if path.endswith("/v1") else f"{path}/v1"
    return Place(host, port or (443 if is_tls else 80), is_tls, base_path)


def check(target: Target, requests: list[Planned]) -> None:
    """Raises `ConfigError` where these requests cannot be put to this target."""
    place_of(target.url)
    if taken := [name for name in OWN_FIELDS if name in target.extra_body]:
        raise ConfigError(f"the extra body must not set {', '.join(taken)}: the load does")
    if not target.api_key.isprintable() or not target.api_key.isascii():
        raise ConfigError("the API key must be printable ASCII")
    for planned in requests:
        if planned.messages and target.api == "completions":
            raise ConfigError("the load has chat messages; the completions API takes none")
        if planned.prompt_ids and target.api == "chat":
            raise ConfigError("the load has prompts of token ids; the chat API takes none")
        if planned.turn and planned.prompt_ids and not target.token_ids:
            raise ConfigError(
                "a conversation in token ids needs a server that returns token ids "
                "(return_token_ids); this one does not: use a conversation in chat messages"
            )
        if planned.output_tokens < 1:
            raise ConfigError(f"request {planned.index} asks for no output token")


_encoder = msgspec.json.Encoder()


def body_of(target: Target, planned: Planned) -> bytes:
    """The JSON of one request."""
    body: dict[str, object] = {"model": target.model}
    if target.api == "chat":
        body["messages"] = planned.messages or [{"role": "user", "content": planned.prompt}]
    else:
        body["prompt"] = planned.prompt_ids or planned.prompt
    body["max_tokens"] = planned.output_tokens
    body["temperature"] = 0
    body["stream"] = True
    if target.usage:
        options = {"include_usage": True}
        if target.continuous_usage:
            options["continuous_usage_stats"] = True
        body["stream_options"] = options
    # `min_tokens` is not needed beside it, and some servers pay for it in every step.
    if target.ignore_eos:
        body["ignore_eos"] = True
    if target.token_ids:
        body["return_token_ids"] = True
    if target.timeline:
        body["timeline"] = True
    return _encoder.encode(body | target.extra_body)
