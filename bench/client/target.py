"""The server under load and the fields of every request to it: plain data, with checks.

`settled` fills in the fields that the user leaves open, and the probe adds the server's abilities.
A target holds the server's key, so it leaves this process only redacted, in reports.
"""

import os
import ssl
from collections.abc import Sequence
from typing import Annotated, Literal
from urllib.parse import urlsplit

import msgspec

from baton.bench.records import Planned
from baton.protocol.config import about
from baton.protocol.errors import ConfigError
from baton.runtime.tls import client_context, trusting

API_KEY_VARIABLE = "BATON_BENCH_API_KEY"
# The client sets these fields itself and reads the answer accordingly.
OWN_FIELDS = (
    "model", "prompt", "messages", "stream", "n", "max_tokens", "max_completion_tokens",
)  # fmt: skip


class Target(msgspec.Struct, frozen=True):
    """A server, a model on it, and the fields that every request carries.

    `token_ids` and `timeline` ask for extensions; `Probed.fit` turns off those that the server
    refuses. Without `ignore_eos` lengths are asked for, but not forced.
    """

    url: Annotated[str, about("address of the server, without /v1")] = "http://127.0.0.1:8000"
    model: Annotated[str, about("name of the model, if the server has several")] = ""
    api: Annotated[
        Literal["auto", "completions", "chat"],
        about("endpoint to use; auto takes chat for messages, else completions"),
    ] = "auto"
    api_key: Annotated[
        str,
        about(f"bearer token, which is better kept in {API_KEY_VARIABLE}; it is never reported"),
    ] = ""
    ca_file: Annotated[
        str, about("PEM file with the authority that signed the server's certificate", kind="path")
    ] = ""
    insecure: Annotated[bool, about("trust any certificate, as curl --insecure does")] = False
    timeout_s: Annotated[float, about("time limit of an answer", "s", gt=0)] = 300.0
    extra_body: Annotated[str, about("JSON object that is merged into every request")] = ""
    ignore_eos: Annotated[bool, about("ask for outputs of the full length")] = True
    timeline: bool = True
    token_ids: bool = True
    usage: bool = True

    @property
    def is_chat(self) -> bool:
        return self.api == "chat"

    @property
    def path(self) -> str:
        """Return the endpoint below the base path."""
        return "/chat/completions" if self.is_chat else "/completions"

    @property
    def extra(self) -> dict[str, object]:
        """Return `extra_body` as a dict. Raises `ConfigError`."""
        if not self.extra_body:
            return {}
        try:
            return msgspec.json.decode(self.extra_body, type=dict[str, object])
        except msgspec.DecodeError as error:
            text = f"--extra-body {self.extra_body!r} is not a JSON object: {error}"
            raise ConfigError(text) from error


def settled(target: Target, requests: Sequence[Planned]) -> Target:
    """Return `target` with its API chosen for `requests`, and by default the environment's key."""
    api = target.api
    if api == "auto":
        api = "chat" if any(planned.messages for planned in requests) else "completions"
    target.extra  # noqa: B018  it raises if the text is not a JSON object
    api_key = target.api_key or os.environ.get(API_KEY_VARIABLE, "")
    return msgspec.structs.replace(target, api=api, api_key=api_key)


def tls_of(target: Target) -> ssl.SSLContext:
    """Return the TLS settings. Raises `ConfigError` for an unusable `ca_file`."""
    context = client_context(target.ca_file)
    return trusting(context) if target.insecure else context


class Place(msgspec.Struct, frozen=True):
    """The parts of a URL to which requests go."""

    host: str
    port: int
    is_tls: bool
    base_path: str  # up to and including /v1

    @property
    def authority(self) -> str:
        """Return the value of the header `Host`."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.is_tls else 80) else f"{host}:{self.port}"


def place_of(url: str) -> Place:
    """Return the place of a URL, whose path may end in /v1 or not. Raises `ConfigError`."""
    shown = repr(url.rpartition("@")[2])  # the text before the @ may be a password
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigError(f"the server's address {shown} is not a URL: {error}") from None
    if parts.scheme not in ("http", "https") or not host:
        text = f"the server's address {shown} must be http://host:port or https://host:port"
        raise ConfigError(text)
    if parts.username is not None or parts.query or parts.fragment:
        # The address may hold a password, so it is not shown.
        raise ConfigError("the server's address is host, port and path only; keys have a flag")
    path = parts.path.rstrip("/")
    if not all(33 <= ord(letter) < 127 for letter in path):
        raise ConfigError(f"the path of the server's address {shown} must be plain ASCII")
    is_tls = parts.scheme == "https"
    base_path = path if path.endswith("/v1") else f"{path}/v1"
    return Place(host, port or (443 if is_tls else 80), is_tls, base_path)


def check(target: Target, requests: Sequence[Planned]) -> None:
    """Raise `ConfigError` if these requests cannot be sent to this target."""
    place_of(target.url)
    if taken := [name for name in OWN_FIELDS if name in target.extra]:
        raise ConfigError(f"the extra body must not set {', '.join(taken)}: the load does")
    if not target.api_key.isprintable() or not target.api_key.isascii():
        raise ConfigError("the API key must be printable ASCII")
    for planned in requests:
        if planned.messages and not target.is_chat:
            raise ConfigError("the load has chat messages; the completions API takes none")
        if planned.prompt_ids and target.is_chat:
            raise ConfigError("the load has prompts of token ids; the chat API takes none")


_encoder = msgspec.json.Encoder()


def body_of(target: Target, planned: Planned) -> bytes:
    """Return the JSON of one request."""
    body: dict[str, object] = {"model": target.model}
    if target.is_chat:
        body["messages"] = planned.messages or [{"role": "user", "content": planned.prompt}]
    else:
        body["prompt"] = planned.prompt_ids or planned.prompt
    body["max_tokens"] = planned.output_tokens
    body["temperature"] = 0
    body["stream"] = True
    if target.usage:
        body["stream_options"] = {"include_usage": True}
    # With `ignore_eos`, `min_tokens` is not needed, and it costs some servers time in every step.
    if target.ignore_eos:
        body["ignore_eos"] = True
    if target.token_ids:
        body["return_token_ids"] = True
    if target.timeline:
        body["timeline"] = True
    return _encoder.encode(body | target.extra)
