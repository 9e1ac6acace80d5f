"""Bodies as structs, by one rule for the fields that no struct has.

A field that would change the output and is not supported is refused by its name, and so is one that
looks like a known name with a mistake in it. Any other unknown field is ignored, and its name is
counted. Bodies without unknown fields are decoded once, at no cost.
"""

import contextlib
import json
import re
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from typing import TypeVar

import msgspec
from msgspec import inspect

from baton.protocol.errors import RequestError
from baton.router.http.errors import invalid
from baton.runtime.log import clip

# A body may have so many unknown settings, and so many names of unknown fields are counted.
MAX_UNKNOWN_FIELDS = 32
# A name is taken for a mistake in another one if so few letters differ.
MAX_WRONG_LETTERS = 2
_MIN_LETTERS = 4  # two short names are never far apart
_MAX_LETTERS = 64

# A larger body without valid JSON is not read a second time to look for the mistake.
_MAX_SECOND_BYTES = 2 * 1024 * 1024
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"

# Names by which APIs ask for the same. Where one of them is sent, and is no field of the body, the
# error names the first that is.
SAME_PURPOSE: tuple[tuple[str, ...], ...] = (
    ("input", "messages", "prompt", "input_ids", "prompt_token_ids"),
    (
        "max_tokens",
        "max_completion_tokens",
        "max_output_tokens",
        "max_new_tokens",
        "max_tokens_to_sample",
    ),
    ("min_tokens", "min_new_tokens"),
    ("stop", "stop_sequences"),
    ("seed", "sampling_seed"),
    ("response_format", "text", "output_config", "output_format"),
    (
        "structured_outputs",
        "guided_json",
        "guided_regex",
        "guided_choice",
        "guided_grammar",
        "guided_whitespace_pattern",
        "json_schema",
        "regex",
        "ebnf",
        "structural_tag",
    ),
    ("tools", "functions"),
    ("tool_choice", "function_call"),
    ("chat_template_kwargs", "thinking", "enable_thinking"),
    ("reasoning_effort", "reasoning", "output_config"),
    ("instructions", "system"),
    ("logprobs", "return_logprob"),
    ("top_logprobs", "top_logprobs_num"),
    ("include_reasoning", "separate_reasoning"),
    ("model", "lora_request", "lora_path"),
)
# The sampling and output fields of the APIs of OpenAI, Anthropic, vLLM and SGLang.
OUTPUT_FIELDS = frozenset(
    (
        "add_generation_prompt",
        "add_special_tokens",
        "allowed_token_ids",
        "audio",
        "audio_data",
        "background",
        "bad_words",
        "best_of",
        "cache_salt",
        "chat_template",
        "container",
        "continue_final_message",
        "conversation",
        "custom_logit_processor",
        "custom_params",
        "documents",
        "early_stopping",
        "echo",
        "extra_body",
        "frequency_penalty",
        "ignore_eos",
        "image_data",
        "include",
        "include_stop_str_in_output",
        "input_embeds",
        "kv_transfer_params",
        "length_penalty",
        "logit_bias",
        "logits_processors",
        "logprob_start_len",
        "logprob_token_ids",
        "max_tool_calls",
        "mcp_servers",
        "media_io_kwargs",
        "min_p",
        "mm_processor_kwargs",
        "modalities",
        "n",
        "no_stop_trim",
        "parallel_tool_calls",
        "presence_penalty",
        "previous_response_id",
        "prompt_embeds",
        "prompt_logprobs",
        "repetition_detection",
        "repetition_penalty",
        "return_hidden_states",
        "return_routed_experts",
        "return_text_in_logprobs",
        "return_token_ids",
        "return_tokens_as_token_ids",
        "sampling_params",
        "session_params",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "stop_regex",
        "stop_token_ids",
        "stream",
        "stream_interval",
        "stream_options",
        "stream_reasoning",
        "suffix",
        "temperature",
        "thinking_budget",
        "thinking_token_budget",
        "top_a",
        "top_k",
        "top_p",
        "truncate_prompt_tokens",
        "truncation",
        "use_beam_search",
        "video_data",
        "vllm_xargs",
        "web_search_options",
    )
).union(*SAME_PURPOSE)
# What holds content in turns of other APIs.
_CONTENT_KEYS = (
    "images",
    "image_url",
    "videos",
    "audios",
    "files",
    "documents",
    "attachments",
)
_INDEX = re.compile(r"\[\d+\]")
_TOOLS = "tools["
_HISTORY = (b'"assistant"', b'"tool"')

_NOTHING = (b"null", b"false", b"[]", b"{}", b'""')
# The other values that ask for nothing.
_DEFAULTS: Mapping[str, tuple[bytes, ...]] = {
    "n": (b"1",),
    "best_of": (b"1",),
    "presence_penalty": (b"0", b"0.0"),
    "frequency_penalty": (b"0", b"0.0"),
    "repetition_penalty": (b"1", b"1.0"),
    "separate_reasoning": (b"true",),
    "stream_reasoning": (b"true",),
    "skip_special_tokens": (b"true",),
    "spaces_between_special_tokens": (b"true",),
}

S = TypeVar("S", bound=msgspec.Struct)
_Fields = dict[str, msgspec.Raw]


def decoded(decoder: msgspec.json.Decoder[S], data: bytes) -> tuple[S, list[str]]:
    """Return the body and the names of the fields that are ignored. Raises `RequestError`.

    Null means the default in every field.
    """
    data = data.removeprefix(_BYTE_ORDER_MARK)
    try:
        try:
            return decoder.decode(data), []
        except msgspec.ValidationError as error:
            data.decode()  # fields that are left out have to be text, too
            cleaning = _Cleaning()
            try:
                cleaned = cleaning.of(data, decoder.type, "", is_setting=True)
            except RecursionError:
                raise error from None  # it names the field
            return decoder.decode(cleaned), cleaning.ignored
    except msgspec.ValidationError as error:
        raise invalid(str(error), decoder.type) from None
    except RecursionError:
        text = "the body is nested too deeply"
        raise RequestError(text, code="invalid_json") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _malformed(str(error), data) from None


def converted(
    place: str,
    value: Mapping[str, object],
    kind: type[S],
    ignored: list[str] | None = None,
) -> S:
    """Return an object as a struct. Raises `RequestError`, whose field is at `place`.

    With `ignored`, unknown fields are left out, and their names appended to it.
    """
    fields = {name: field for name, field in value.items() if field is not None}
    if ignored is not None:
        unknown = fields.keys() - set(kind.__struct_fields__)
        if place.startswith(_TOOLS):
            _check_spelling(unknown, kind, place)
        for name in unknown:
            del fields[name]
            count(ignored, _joined(_INDEX.sub("", place), name))
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise invalid(str(error), kind, place) from None


def count(ignored: list[str], name: str) -> None:
    """Append the name of an ignored field once."""
    if len(ignored) < MAX_UNKNOWN_FIELDS and name not in ignored:
        ignored.append(clip(name))


class _Cleaning:
    """Leaves out the fields of one body that are null or unknown, and may be."""

    def __init__(self) -> None:
        self.ignored: list[str] = []

    def of(
        self, data: bytes, kind: type[msgspec.Struct], path: str, *, is_setting: bool
    ) -> bytes:
        """Return the JSON of an object that a struct of `kind` takes.

        `path` names the object in the body. What is no setting is a tool or a turn. Clients have
        turns from elsewhere, so only their keys with content are looked at.
        """
        try:
            fields = msgspec.json.decode(data, type=_Fields)
        except msgspec.DecodeError:
            return data  # the decoder of the body says what is wrong
        known: dict[str, msgspec.Raw] = {}
        unknown: dict[str, bytes] = {}
        for name, value in fields.items():
            if bytes(value) == b"null":
                continue
            if name in kind.__struct_fields__:
                known[name] = value
            else:
                unknown[name] = bytes(value)
        if is_setting:
            _check_settings(unknown, kind, path)
        elif path.startswith(_TOOLS):
            _check_spelling(unknown, kind, path)
        else:
            _check_content(fields, unknown, path)
        for name in unknown:
            count(self.ignored, _joined(_INDEX.sub("", path), name))
        for name, (inner, is_list) in _structs_in(kind).items():
            if name not in known:
                continue
            field = bytes(known[name])
            inner_path = _joined(path, name)
            if is_list:
                cleaned = self._of_list(field, inner, inner_path)
            else:
                cleaned = self.of(field, inner, inner_path, is_setting=is_setting)
            known[name] = msgspec.Raw(cleaned)
        return msgspec.json.encode(known)

    def _of_list(self, data: bytes, kind: type[msgspec.Struct], path: str) -> bytes:
        try:
            items = msgspec.json.decode(data, type=list[msgspec.Raw])
        except msgspec.DecodeError:
            return data
        cleaned = [
            msgspec.Raw(
                self.of(bytes(item), kind, f"{path}[{index}]", is_setting=False)
            )
            for index, item in enumerate(items)
        ]
        return msgspec.json.encode(cleaned)


def _check_settings(
    unknown: Mapping[str, bytes], kind: type[msgspec.Struct], path: str
) -> None:
    """Raise `RequestError` for the first unknown setting that may not be ignored."""
    if len(unknown) > MAX_UNKNOWN_FIELDS:
        text = f"the body has more than {MAX_UNKNOWN_FIELDS} unknown fields"
        raise RequestError(text, param=clip(next(iter(unknown))))
    for name, value in unknown.items():
        if name not in OUTPUT_FIELDS:
            continue
        others = _others_of(name, kind.__struct_fields__)
        asks_for_nothing = value in _NOTHING or value in _DEFAULTS.get(name, ())
        if others or not asks_for_nothing:
            advice = f" here; use {' or '.join(others)}" if others else ""
            text = f"{name} is not supported{advice}"
            raise RequestError(text, code="unsupported", param=_joined(path, name))
    _check_spelling(unknown.keys() - OUTPUT_FIELDS, kind, path)


def _others_of(name: str, known: Collection[str]) -> list[str]:
    """Return the known fields that ask for the same as `name`, one for each of its purposes."""
    others = []
    for group in SAME_PURPOSE:
        same = [other for other in group if other in known]
        if name in group and same:
            others.append(same[0])
    return others


def _check_spelling(
    names: Collection[str], kind: type[msgspec.Struct], path: str
) -> None:
    """Raise `RequestError` for an unknown name that looks like a known one with a mistake."""
    for name in names:
        meant = _meant_by(name, kind.__struct_fields__)
        if meant is not None:
            text = f"there is no field {name}; did you mean {meant}?"
            raise RequestError(text, param=_joined(path, name))


def _check_content(fields: _Fields, unknown: Mapping[str, bytes], path: str) -> None:
    """Raise `RequestError` for content of a turn that the model would not see."""
    role = fields.get("role")
    if role is None or bytes(role) in _HISTORY:
        return
    for name in _CONTENT_KEYS:
        if unknown.get(name, b"null") not in _NOTHING:
            text = f"{name} of a turn is not supported; only text is"
            raise RequestError(text, code="unsupported", param=f"{path}.{name}")


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _meant_by(name: str, known: Collection[str]) -> str | None:
    """Return the known name that `name` is with a mistake or two; None if there is none."""
    if not _MIN_LETTERS <= len(name) <= _MAX_LETTERS:
        return None
    for other in known:
        if len(other) < _MIN_LETTERS or abs(len(name) - len(other)) > MAX_WRONG_LETTERS:
            continue
        # Most names differ in too many letters, whatever their order.
        if len(set(name) ^ set(other)) > 2 * MAX_WRONG_LETTERS:
            continue
        if _wrong_letters(name, other) <= MAX_WRONG_LETTERS:
            return other
    return None


def _wrong_letters(name: str, other: str) -> int:
    """Return the Levenshtein distance: how many letters to add, leave out or change."""
    above = list(range(len(other) + 1))
    for row, letter in enumerate(name, 1):
        current = [row]
        for column, other_letter in enumerate(other, 1):
            changed = above[column - 1] + (letter != other_letter)
            current.append(min(changed, above[column] + 1, current[-1] + 1))
        above = current
    return above[-1]


@cache
def _structs_in(
    kind: type[msgspec.Struct],
) -> Mapping[str, tuple[type[msgspec.Struct], bool]]:
    """Return the fields with structs that refuse unknown fields, and whether each is a list."""
    info = inspect.type_info(kind)
    assert isinstance(info, inspect.StructType)
    structs: dict[str, tuple[type[msgspec.Struct], bool]] = {}
    for field in info.fields:
        for part in _members_of(field.type):
            is_list = isinstance(part, inspect.ListType)
            inner = part.item_type if isinstance(part, inspect.ListType) else part
            for member in _members_of(inner):
                if (
                    isinstance(member, inspect.StructType)
                    and member.forbid_unknown_fields
                ):
                    structs[field.encode_name] = (member.cls, is_list)
    return structs


def _members_of(info: inspect.Type) -> Iterator[inspect.Type]:
    match info:
        case inspect.UnionType():
            for member in info.types:
                yield from _members_of(member)
        case inspect.Metadata():
            yield from _members_of(info.type)
        case _:
            yield info


def _malformed(error: str, data: bytes) -> RequestError:
    """Return the error for a body that is no JSON, with the field if others read it as JSON."""
    # Some encoders write NaN, Infinity and halves of characters, which are not JSON.
    lenient = None
    with contextlib.suppress(ValueError, RecursionError):
        lenient = json.loads(data) if len(data) <= _MAX_SECOND_BYTES else None
    for name, value in lenient.items() if isinstance(lenient, dict) else ():
        try:
            json.dumps({name: value}, allow_nan=False, ensure_ascii=False).encode()
        except ValueError as mistake:
            what = "is not Unicode text: a character has only one of its two surrogates"
            if not isinstance(mistake, UnicodeEncodeError):
                what = "must be finite: NaN and Infinity are not JSON"
            shown = clip(name.encode("ascii", "backslashreplace").decode())
            return RequestError(f"{shown} {what}", param=shown)
    return RequestError(
        f"the body is not valid JSON: {clip(error)}", code="invalid_json"
    )
