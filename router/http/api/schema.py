"""The bodies that clients of the OpenAI endpoints may send, and why any other is refused.

Every mistake in a body becomes a `RequestError` that names the field. `decoding.py` says which
unknown fields are ignored.
"""

import operator
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Annotated, Literal, Optional, TypeVar, cast

import msgspec
from msgspec import Meta

from baton.protocol.errors import RequestError
from baton.protocol.sampling import (
    EVERYONE,
    NEUTRAL,
    ROWS,
    Int32,
    SamplingParams,
    Scope,
)
from baton.router.http.api.decoding import decoded
from baton.router.http.api.turns import (
    MAX_TURNS,
    Anything,
    Tool,
    ToolChoice,
    ToolList,
    ToolUse,
    Turn,
    allowed_of,
    functions_of,
    plain_tools,
    plain_turns,
    tool_use_of,
    unsupported,
)
from baton.router.http.errors import FORM_PARAM
from baton.router.text.response_parser import Parsing

MAX_PROMPTS = 512
MAX_TOTAL_CHOICES = 1024
MAX_STOP_STRINGS = 64
MAX_STOP_CHARS = 1024
MAX_ALL_STOP_CHARS = 4096
DEFAULT_MAX_TOKENS = 16

KeptTokens = Annotated[int, Meta(ge=-1, le=2**31 - 1)]
# The value of `truncate_prompt_tokens` that keeps what fits the model.
LONGEST_PROMPT = -1
Endpoint = Literal["completions", "chat", "responses", "messages"]
B = TypeVar("B", bound=msgspec.Struct)


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    # Padding against traffic analysis; baton never sends it.
    include_obfuscation: bool | None = None


class JsonSchema(msgspec.Struct):
    schema: dict[str, object]
    name: str = ""


class ResponseFormat(msgspec.Struct):
    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None
    structures: list[dict[str, object]] | None = None
    triggers: list[str] | None = None


def with_sampling(body: type[B]) -> type[B]:
    """Return a body with the fields of `SamplingParams` that all bodies take as they are."""
    fields: list[tuple[str, object, object]] = [
        (row.name, Optional[row.about.body], None)  # noqa: UP045 - the type is a value
        for row in ROWS
        if row.about.body is not None and row.name not in body.__struct_fields__
    ]
    whole = msgspec.defstruct(
        body.__name__,
        fields,
        bases=(body,),
        module=body.__module__,
        forbid_unknown_fields=True,
        kw_only=True,
    )
    return cast("type[B]", whole)


@with_sampling
class AnyBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The fields that all endpoints have. In each of them, null means the default.

    Those that become a field of `SamplingParams` unchanged come from its rows.
    """

    model: str | None = None
    stream: bool | None = None
    min_tokens: Int32 | None = None
    stop: str | list[str] | None = None
    bad_words: list[str] | None = None
    structured_outputs: dict[str, object] | None = None
    cache_salt: Annotated[str, Meta(min_length=1)] | None = None
    truncate_prompt_tokens: KeptTokens | None = None  # the last ones of the prompt
    # These are accepted only with values that ask for nothing (`_NEUTRAL`).
    include_reasoning: bool | None = None  # in chats; a completion's text has it anyway
    # These change nothing about a response.
    user: str | None = None
    store: bool | None = None
    metadata: dict[str, object] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    request_id: str | None = None
    session_id: str | None = None


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


def options_of(effort: Effort | None) -> dict[str, object]:
    """Return the variables that say to a template how much to reason."""
    if effort is None:
        return {}
    if effort == "none":
        return {"reasoning_effort": effort, "enable_thinking": False, "thinking": False}
    return {"reasoning_effort": effort}


class GenerationBody(AnyBody, kw_only=True):
    """The fields that completions and chats have."""

    stream_options: StreamOptions | None = None
    max_tokens: Int32 | None = None
    n: Int32 | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    prompt_logprobs: Int32 | None = None
    # Those that the tokenizer adds to every text; by default only in completions.
    add_special_tokens: bool | None = None
    response_format: ResponseFormat | None = None
    # These are accepted only with values that ask for nothing.
    reasoning_effort: Effort | None = None  # in chats, for templates that read it
    best_of: Int32 | None = None
    modalities: list[str] | None = None
    # These change nothing about a response.
    verbosity: str | None = None
    prediction: Anything = msgspec.UNSET


class CompletionBody(GenerationBody, kw_only=True):
    """The body of POST /v1/completions."""

    prompt: str | list[int | str | list[int]]
    echo: bool | None = None
    # Of each token and of so many of the likeliest.
    logprobs: Int32 | bool | None = None
    suffix: str | None = None


class ChatBody(GenerationBody, kw_only=True):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[Turn], Meta(max_length=MAX_TURNS)]
    max_completion_tokens: Int32 | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, object] | None = None
    logprobs: bool | None = None
    top_logprobs: Int32 | None = None
    tools: ToolList | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None


# The values besides null that ask for nothing.
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    # Bodies may cut their prompts, unlike `SamplingParams`.
    **{
        name: values
        for name, values in NEUTRAL.items()
        if name != "truncate_prompt_tokens"
    },
    "modalities": (["text"],),
    "suffix": ("",),
}
_NONE: Mapping[str, object] = {}

_completion_decoder = msgspec.json.Decoder(CompletionBody)
_chat_decoder = msgspec.json.Decoder(ChatBody)


class Chat(msgspec.Struct, frozen=True):
    """A conversation that the model's chat template has yet to turn into a prompt."""

    messages: list[dict[str, object]]  # in the form that templates take, with text only
    add_generation_prompt: bool
    options: dict[str, object] | None
    tools: list[dict[str, object]] | None = None  # in the form that templates take
    # The last message stays open, so that the model goes on with it.
    continues_final: bool = False


BodyPrompt = str | list[int] | Chat
_PROMPTS: Mapping[Endpoint, str] = {
    "completions": "prompt",
    "chat": "messages",
    "responses": "input",
    "messages": "messages",
}


class ParsedRequest(msgspec.Struct, frozen=True, kw_only=True, dict=True, tag=True):
    """The checked content of one HTTP request, and then its prompts as the model gets them."""

    endpoint: Endpoint
    model: str | None
    prompts: Sequence[BodyPrompt]  # at least one, and none is empty
    sampling: dict[str, object]  # the given fields of `params`, which can be sent
    is_streamed: bool
    include_usage: bool
    continuous_usage: bool
    token_ids: bool
    echo: bool = False
    generates: bool = True  # False if the response is the prompt alone
    num_prompt_logprobs: int | None = None
    names_ids: bool = False
    tools: ToolUse | None = None
    tool_indices: tuple[int, ...] = ()  # of those in `tools`, in the field of the body
    include_reasoning: bool = True
    add_special_tokens: bool = True  # those that the tokenizer adds to every text
    # How many of its last tokens a prompt keeps.
    truncate_prompt_tokens: int | None = None
    form_param: str = "structured_outputs"  # the field that asks for it
    scope: Scope = EVERYONE
    settings: bytes = b""  # what a response object repeats of its request, as JSON
    ignored: tuple[str, ...] = ()  # the names of fields that change nothing
    parsing: Parsing | None = None  # what to find in the response
    packed_prompts: tuple[bytes, ...] = ()  # of each prompt, by `packed`
    # The text before each choice, per prompt; empty without `echo`.
    echoes: tuple[str, ...] = ()

    @property
    def is_chat(self) -> bool:
        return self.endpoint != "completions"

    @property
    def needs_nodes(self) -> bool:
        return self.generates or self.params.prompt_logprobs is not None

    @cached_property
    def sent(self) -> dict[str, str]:
        """The fields of the body, by the parameters that they become."""
        logprobs = "logprobs" if self.num_prompt_logprobs is None else "prompt_logprobs"
        prompt = _PROMPTS[self.endpoint]
        names = {"prompt": prompt, "messages": prompt, FORM_PARAM: self.form_param}
        if self.form_param == "tools":
            # A grammar numbers the tools that may be called, and a client all of them.
            for number, index in enumerate(self.tool_indices):
                names[f"{FORM_PARAM}[{number}]"] = f"tools[{index}]"
        return {**names, "prompt_logprobs": logprobs}

    def ignoring(self, names: Sequence[str]) -> "ParsedRequest":
        """Return the request with the names of the fields that are ignored."""
        return msgspec.structs.replace(self, ignored=tuple(names)) if names else self

    @cached_property
    def params(self) -> SamplingParams:
        return SamplingParams(**self.sampling)  # type: ignore[arg-type]


def parse_completion(
    data: bytes, defaults: Mapping[str, object] = _NONE
) -> ParsedRequest:
    """Return the checked body of a completion. Raises `RequestError`.

    `defaults` are the model's sampling parameters, for fields that the body leaves out.
    """
    body, ignored = decoded(_completion_decoder, data)
    check(body)
    if body.max_tokens is None:
        body.max_tokens = max(DEFAULT_MAX_TOKENS, body.min_tokens or 0)
    only_echo = bool(body.echo) and body.max_tokens == 0
    if only_echo:
        body.max_tokens = 1  # its token is dropped if nodes have to compute the prompt
    prompts = _prompts_of(body)
    parsed = _parsed_request(
        body, defaults, prompts, echo=bool(body.echo), generates=not only_echo
    )
    return parsed.ignoring(ignored)


def parse_chat(data: bytes, defaults: Mapping[str, object] = _NONE) -> ParsedRequest:
    """Return the checked body of a chat. Raises `RequestError`.

    A chat without a limit in its body or in the model's `defaults` may use all the room that the
    model has left.
    """
    body, ignored = decoded(_chat_decoder, data)
    if not body.messages:
        raise RequestError("messages must not be empty", param="messages")
    return parsed_chat(body, plain_turns(body.messages), defaults, ignored)


def parsed_chat(
    body: ChatBody,
    messages: list[dict[str, object]],
    defaults: Mapping[str, object],
    ignored: list[str],
    limit_name: str = "max_completion_tokens",
) -> ParsedRequest:
    """Return what a checked body asks for, with these turns. Raises `RequestError`.

    `ignored` has the names of ignored fields. `limit_name` is the name that clients use for
    `max_completion_tokens`.
    """
    check(body)
    continues = bool(body.continue_final_message)
    if continues:
        check_continued(
            messages, add_generation_prompt=body.add_generation_prompt is True
        )
    generates = body.add_generation_prompt is not False and not continues
    functions = functions_of(body.tools or (), body.tool_choice, ignored)
    functions = allowed_of(functions, body.tool_choice)
    tools = plain_tools(functions)
    use = tool_use_of(functions, body.tool_choice, body.parallel_tool_calls)
    # With `none` the model must not call, so it does not see the tools.
    options = {**options_of(body.reasoning_effort), **(body.chat_template_kwargs or {})}
    chat = Chat(messages, generates, options or None, tools if use else None, continues)
    if body.max_completion_tokens is None:
        parsed = _parsed_request(body, defaults, [chat])
    else:
        body.max_tokens = body.max_completion_tokens
        parsed = _parsed_request(body, defaults, [chat], limit_name=limit_name)
    parsed = parsed.ignoring(ignored)
    if use is None and body.include_reasoning is not False:
        return parsed
    return msgspec.structs.replace(
        parsed,
        tools=use,
        tool_indices=_indices_of(use, body.tools or ()),
        include_reasoning=body.include_reasoning is not False,
    )


def _indices_of(use: ToolUse | None, tools: Sequence[Tool]) -> tuple[int, ...]:
    """Return at which indices of `tools` the functions are that a response may call."""
    if use is None:
        return ()
    indices = {
        tool.function.name: index for index, tool in enumerate(tools) if tool.function
    }
    return tuple(indices[function.name] for function in use.functions)


def _parsed_request(
    body: GenerationBody,
    defaults: Mapping[str, object],
    prompts: Sequence[BodyPrompt],
    *,
    echo: bool = False,
    generates: bool = True,
    limit_name: str = "max_tokens",
) -> ParsedRequest:
    options = body.stream_options
    include_usage = options is not None and bool(options.include_usage)
    continuous_usage = options is not None and bool(options.continuous_usage_stats)
    parsed = ParsedRequest(
        endpoint="chat" if isinstance(body, ChatBody) else "completions",
        model=body.model,
        prompts=prompts,
        sampling=_sampling_of(body, defaults),
        is_streamed=bool(body.stream),
        include_usage=include_usage,
        continuous_usage=include_usage and continuous_usage,
        token_ids=bool(body.return_token_ids),
        num_prompt_logprobs=body.prompt_logprobs,
        names_ids=bool(body.return_tokens_as_token_ids),
        echo=echo,
        generates=generates,
        form_param="response_format" if body.response_format else "structured_outputs",
        scope=Scope(cache_salt=body.cache_salt or ""),
        add_special_tokens=_adds_special_tokens(body),
        truncate_prompt_tokens=body.truncate_prompt_tokens,
    )
    _check_params(parsed, limit_name)
    return parsed


def _adds_special_tokens(body: GenerationBody) -> bool:
    if body.add_special_tokens is None:
        return isinstance(body, CompletionBody)  # a chat template has written them
    return body.add_special_tokens


def check_continued(
    messages: Sequence[Mapping[str, object]], *, add_generation_prompt: bool
) -> None:
    """Raise `RequestError` if the model cannot continue the last message."""
    problem = ""
    if add_generation_prompt:
        problem = "cannot be used together with add_generation_prompt"
    elif not messages or messages[-1].get("tool_calls"):
        problem = "needs a last message without tool calls"
    if problem:
        text = f"continue_final_message {problem}"
        raise RequestError(text, param="continue_final_message")


def _prompts_of(body: CompletionBody) -> list[str | list[int]]:
    prompt = body.prompt
    if isinstance(prompt, str):
        prompts: list[str | list[int]] = [prompt]
    elif prompt and all(isinstance(item, int) for item in prompt):
        prompts = [prompt]  # type: ignore[list-item]
    elif any(isinstance(item, int) for item in prompt):
        raise RequestError(
            "token ids and prompts cannot be mixed in one list", param="prompt"
        )
    else:
        prompts = list(prompt)  # type: ignore[arg-type]
    if not prompts or not all(prompts):
        raise RequestError("the prompt is empty", param="prompt")
    if len(prompts) > MAX_PROMPTS:
        text = f"prompt holds {len(prompts)} prompts; at most {MAX_PROMPTS} fit one request"
        raise RequestError(text, param="prompt")
    if len(prompts) * (body.n or 1) > MAX_TOTAL_CHOICES:
        text = f"n times the number of prompts must be at most {MAX_TOTAL_CHOICES}"
        raise RequestError(text, param="n")
    return prompts


def _sampling_of(
    body: GenerationBody, defaults: Mapping[str, object]
) -> dict[str, object]:
    values = zip(_SAMPLING_FIELDS, _sampling_values(body), strict=True)
    given = {name: value for name, value in values if value is not None}
    if (form := _form_of(body.response_format)) is not None:
        if body.structured_outputs is not None:
            text = "response_format and structured_outputs cannot be used together"
            raise RequestError(text, param="response_format")
        given["structured_outputs"] = form
    if (num_logprobs := _num_logprobs_of(body)) is not None:
        given["logprobs"] = num_logprobs
        if isinstance(body, CompletionBody) and body.echo:
            given["prompt_logprobs"] = max(num_logprobs, body.prompt_logprobs or 0)
    return {"max_tokens": None, **defaults, **given}


def _num_logprobs_of(body: GenerationBody) -> int | None:
    """Return for how many of the likeliest tokens log probabilities are wanted."""
    if isinstance(body, ChatBody):
        if body.top_logprobs and not body.logprobs:
            text = "top_logprobs can be used only if logprobs is true"
            raise RequestError(text, param="top_logprobs")
        return (body.top_logprobs or 0) if body.logprobs else None
    assert isinstance(body, CompletionBody)
    if body.logprobs is None or body.logprobs is False:
        return None
    return int(body.logprobs)


def _form_of(wanted: ResponseFormat | None) -> dict[str, object] | None:
    """Return a response format as the fields of `StructuredOutputsParams`."""
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return {"json_object": True}
    if wanted.type == "structural_tag":
        return {
            "structural_tag": {
                "structures": wanted.structures,
                "triggers": wanted.triggers,
            }
        }
    if wanted.json_schema is None:
        text = "response_format of the type json_schema needs the field json_schema"
        raise RequestError(text, param="response_format")
    return {"json": wanted.json_schema.schema}


def _check_params(parsed: ParsedRequest, limit_name: str) -> None:
    """Raise a `RequestError` for a parameter out of range, by the name that clients use."""
    try:
        _ = parsed.params
    except RequestError as error:
        if error.param == "structured_outputs":
            error.param = parsed.form_param
        if error.param == "logprobs" and parsed.is_chat:
            text = error.message.replace("logprobs", "top_logprobs")
            raise RequestError(text, param="top_logprobs") from None
        if error.param != "max_tokens":
            raise
        text = error.message.replace("max_tokens", limit_name)
        raise RequestError(text, param=limit_name) from None


# `check` has made sure that the fields of `NEUTRAL` ask for nothing.
_SAMPLING_FIELDS = sorted(
    set(SamplingParams.__struct_fields__)
    & set(GenerationBody.__struct_fields__) - NEUTRAL.keys()
)
_sampling_values = operator.attrgetter(*_SAMPLING_FIELDS)


# Almost every body leaves out all of these, which a single comparison of tuples shows.
_NEUTRAL_NAMES: Mapping[type[GenerationBody], list[str]] = {
    kind: [name for name in _NEUTRAL if name in kind.__struct_fields__]
    for kind in (CompletionBody, ChatBody)
}
_neutral_values = {
    kind: operator.attrgetter(*names) for kind, names in _NEUTRAL_NAMES.items()
}
_LEFT_OUT = {kind: (None,) * len(names) for kind, names in _NEUTRAL_NAMES.items()}


def _check_neutral(body: GenerationBody) -> None:
    kind = type(body)
    values = _neutral_values[kind](body)
    if values == _LEFT_OUT[kind]:
        return
    for name, value in zip(_NEUTRAL_NAMES[kind], values, strict=True):
        if value is not None and value not in _NEUTRAL[name]:
            raise unsupported(name)


def check(body: GenerationBody) -> None:
    """Raise a `RequestError` for fields that are not supported, or not together."""
    _check_neutral(body)
    if body.truncate_prompt_tokens == 0:
        text = (
            "truncate_prompt_tokens must be at least 1, or -1 for what fits the model"
        )
        raise RequestError(text, param="truncate_prompt_tokens")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise unsupported("best_of")
    options = body.stream_options
    if options is not None and not body.stream:
        raise RequestError(
            "stream_options can be used only if stream is true", param="stream_options"
        )
    if body.stream and body.prompt_logprobs is not None:
        text = "prompt_logprobs cannot be streamed: leave out stream, or ask for echo and logprobs"
        raise RequestError(text, param="prompt_logprobs")
    if body.stop is not None:
        _check_stops("stop", [body.stop] if isinstance(body.stop, str) else body.stop)
    if body.bad_words:
        _check_stops("bad_words", body.bad_words)


def _check_stops(name: str, stops: list[str]) -> None:
    if (
        len(stops) > MAX_STOP_STRINGS
        or any(len(stop) > MAX_STOP_CHARS for stop in stops)
        or sum(len(stop) for stop in stops) > MAX_ALL_STOP_CHARS
    ):
        text = (
            f"{name} takes at most {MAX_STOP_STRINGS} strings of {MAX_STOP_CHARS} characters, "
            f"{MAX_ALL_STOP_CHARS} together"
        )
        raise RequestError(text, param=name)
