"""The sampling parameters of a user, and the part of them that an engine needs.

`SamplingParams` is the public type (`baton.SamplingParams`). `Sampling` travels to the engines,
which never see text and therefore have no stop strings. A parameter that baton cannot honour is
refused, unless its value asks for nothing.
"""

import hashlib
import operator
import reprlib
from collections.abc import Mapping
from enum import StrEnum
from numbers import Real
from typing import Annotated, Literal

import msgspec
from msgspec import Meta
from msgspec.structs import force_setattr

from baton.protocol.blocks import HASH_BYTES, BlockHash
from baton.protocol.errors import RequestError
from baton.protocol.ids import MAX_COUNT, Count, Int64
from baton.protocol.pooling import Pooling

OutputKind = Literal["cumulative", "delta", "final"]
MAX_CHOICES = 128
SEED_BITS = 63
MAX_BIAS = 100.0
MAX_BIASES = 1024
MAX_LOGPROBS = 20
MAX_PROMPT_LOGPROBS = 1 << 19  # of a request's prompts together, those of likeliest tokens included


class RequestOutputKind(StrEnum):
    """What each output of a request holds: all text so far, only the new text, or all at the end.

    The plain text of a kind is accepted wherever a kind is.
    """

    CUMULATIVE = "cumulative"
    DELTA = "delta"
    FINAL_ONLY = "final"


class Penalties(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is taken off the logits of tokens that came before, and `bias`, which is added."""

    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0
    bias: Annotated[tuple[tuple[Count, float], ...], Meta(max_length=MAX_BIASES)] = ()  # by id


class Scope(msgspec.Struct, frozen=True):
    """What requests must have in common to share cached blocks.

    An adapter's name stands for its weights: nodes with other weights never pair, and the name of
    one that was loaded at run time has their digest (`adapters.lora_version`).
    """

    lora: str = ""
    cache_salt: str = ""
    tenant_salt: str = ""  # that an operator gives to clients

    @property
    def root(self) -> BlockHash:
        """Return the root of the hashes of its blocks; empty without adapter and salts.

        Blake2's personalization keeps roots and blocks apart, whatever text a client sends.
        """
        if self == EVERYONE:
            return b""
        data = f"{self.lora}\0{self.cache_salt}".encode("utf-8", "surrogatepass")
        # A key of the hash, so that no salt of a client looks like it.
        key = hashlib.blake2b(self.tenant_salt.encode("utf-8", "surrogatepass")).digest()
        return hashlib.blake2b(
            data,
            digest_size=HASH_BYTES,
            key=key if self.tenant_salt else b"",
            person=b"cache_root",
        ).digest()


EVERYONE = Scope()


class Sampling(msgspec.Struct, frozen=True, omit_defaults=True):
    """How an engine samples and ends one sequence. The seed is always set."""

    seed: Int64
    max_tokens: Count
    min_tokens: Count = 0
    temperature: float = 1.0  # 0 is greedy
    top_k: Count = 0  # 0 keeps all
    top_p: float = 1.0
    min_p: float = 0.0
    stop_token_ids: tuple[Count, ...] = ()
    ignore_eos: bool = False
    grammar: str = ""  # of llguidance, which the output has to match
    allowed_token_ids: tuple[Count, ...] = ()  # empty allows all
    bad_words: tuple[tuple[Count, ...], ...] = ()  # sequences that must not come
    penalties: Penalties | None = None
    logprobs: Count | None = None  # of each token and of so many of the likeliest
    prompt_logprobs: Count | None = None  # the same of the prompt's tokens
    # The root of its blocks' hashes, so that only sequences with the same root share blocks.
    cache_root: Annotated[BlockHash, Meta(max_length=HASH_BYTES)] = b""
    lora: str = ""  # the adapter's name
    pooling: Pooling | None = None  # what is wanted of the prompt instead of tokens

    @property
    def needs_all_rows(self) -> bool:
        """Return whether the whole prompt is computed, even where blocks hold its prefix."""
        return self.prompt_logprobs is not None or self.pooling in ("mean", "cls")

    @property
    def depends_on_output(self) -> bool:
        """Return whether the next token's distribution is not a function of its logits alone."""
        return self.has_mask or self.penalties is not None

    @property
    def has_mask(self) -> bool:
        """Return whether some tokens may not come."""
        return bool(self.grammar or self.allowed_token_ids or self.bad_words)

    @property
    def needs_prompt(self) -> bool:
        """Return whether the next token depends on the prompt besides through its logits."""
        return self.penalties is not None and self.penalties.repetition != 1.0


class StructuredOutputsParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The form of a response's text: exactly one of the fields is set. The names are vLLM's.

    `json` is a schema or its text, `grammar` is in Lark's or GBNF's notation, and
    `structural_tag` limits the text after its triggers. Raises a `RequestError` otherwise.
    """

    json: str | dict[str, object] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, object] | None = None

    def __post_init__(self) -> None:
        given = [self.json, self.regex, self.choice, self.grammar, self.structural_tag]
        num_given = sum(value is not None for value in given) + bool(self.json_object)
        if num_given != 1 or "" in given:
            text = f"structured_outputs takes exactly one of {', '.join(self.__struct_fields__)}"
            raise RequestError(text, param="structured_outputs")

    @property
    def form(self) -> tuple[str, object]:
        """The name of the field that is set, and its value."""
        fields = msgspec.structs.asdict(self).items()
        return next((name, value) for name, value in fields if value not in (None, False))


class SamplingParams(msgspec.Struct, frozen=True):
    """The parameters that a user may set. Names, order and defaults are vLLM's.

    `max_tokens=None` generates until the model's length is full. `stop` takes a string or a list.
    The fields of `NEUTRAL` are not supported: they accept only the values that ask for nothing.
    Raises a `RequestError` that names the first field with a wrong type or a value out of range.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind | OutputKind = RequestOutputKind.CUMULATIVE
    truncate_prompt_tokens: int | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    structured_outputs: StructuredOutputsParams | None = None
    extra_args: dict[str, object] | None = None
    best_of: int | None = None
    use_beam_search: bool = False
    length_penalty: float = 1.0
    early_stopping: bool = False

    def __post_init__(self) -> None:
        if not all(map(operator.contains, _NEUTRAL_VALUES, _neutral_fields(self))):
            _refuse_unsupported(self)
        _set_types(self)
        _check_ranges(self)

    def clone(self, **changes: object) -> "SamplingParams":
        """Return a copy with `changes`. An object never changes, so it can also be shared."""
        return msgspec.structs.replace(self, **changes)

    @property
    def stop_strings(self) -> list[str]:
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else list(self.stop)


# Fields that baton does not support, and the values of each that ask for nothing.
NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "detokenize": (True,),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (None,),
    "extra_args": (None, {}),
    "use_beam_search": (False, None),
    "length_penalty": (1, None),
    "early_stopping": (False, None),
}
_NEUTRAL_VALUES = tuple(NEUTRAL.values())
_neutral_fields = operator.attrgetter(*NEUTRAL)

_INTEGERS = ("n", "top_k", "min_tokens")
_INTEGERS_OR_NONE = ("seed", "max_tokens", "best_of", "logprobs", "prompt_logprobs")
_NUMBERS = (
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
_FLAGS = ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output")


def _refuse_unsupported(params: SamplingParams) -> None:
    defaults = dict(zip(params.__struct_fields__, params.__struct_defaults__, strict=True))
    for name, values in NEUTRAL.items():
        if getattr(params, name) not in values:
            text = f"{name} is not supported: leave it out or set it to {defaults[name]!r}"
            raise RequestError(text, code="unsupported", param=name)


def _set_types(params: SamplingParams) -> None:
    """Convert every field to its plain type, which messages need: numbers may come from numpy."""
    for name in _INTEGERS:
        if type(value := getattr(params, name)) is not int:
            force_setattr(params, name, _integer(name, value))
    for name in _INTEGERS_OR_NONE:
        if (value := getattr(params, name)) is not None and type(value) is not int:
            force_setattr(params, name, _integer(name, value))
    for name in _NUMBERS:
        if type(value := getattr(params, name)) not in (float, int):
            force_setattr(params, name, _number(name, value))
    for name in _FLAGS:
        if type(value := getattr(params, name)) is not bool:
            raise _wrong(name, "True or False", value)
    if params.stop is not None and not isinstance(params.stop, str):
        force_setattr(params, "stop", _texts("stop", params.stop))
    if params.stop_token_ids is not None:
        force_setattr(params, "stop_token_ids", _ids("stop_token_ids", params.stop_token_ids))
    if params.allowed_token_ids is not None:
        ids = _ids("allowed_token_ids", params.allowed_token_ids)
        force_setattr(params, "allowed_token_ids", ids)
    if params.bad_words is not None:
        force_setattr(params, "bad_words", _texts("bad_words", params.bad_words))
    if params.logit_bias is not None:
        force_setattr(params, "logit_bias", _biases(params.logit_bias))
    if type(params.output_kind) is not RequestOutputKind:
        force_setattr(params, "output_kind", _kind(params.output_kind))
    if (form := params.structured_outputs) is not None and type(
        form
    ) is not StructuredOutputsParams:
        force_setattr(params, "structured_outputs", _form(form))


def _integer(name: str, value: object) -> int:
    if not isinstance(value, bool) and hasattr(value, "__index__"):
        return operator.index(value)
    raise _wrong(name, "an integer", value)


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise _wrong(name, "a number", value)
    return float(value)


def _texts(name: str, values: object) -> list[str]:
    if isinstance(values, list | tuple) and all(isinstance(value, str) for value in values):
        return list(values)
    raise _wrong(name, "a string or a list of strings", values)


def _ids(name: str, values: object) -> list[int]:
    if not isinstance(values, list | tuple):
        raise _wrong(name, "a list of token ids", values)
    ids = [_integer(name, value) for value in values]
    if any(not 0 <= token_id <= MAX_COUNT for token_id in ids):
        text = f"{name} must be integers of at least 0 and at most {MAX_COUNT}"
        raise RequestError(text, param=name)
    return ids


def _biases(value: object) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise _wrong("logit_bias", "a mapping of token ids to numbers", value)
    try:
        biases = {int(key): _number("logit_bias", bias) for key, bias in value.items()}
    except (TypeError, ValueError) as error:
        raise _wrong("logit_bias", "a mapping of token ids to numbers", value) from error
    if len(biases) > MAX_BIASES:
        raise RequestError(f"logit_bias takes at most {MAX_BIASES} tokens", param="logit_bias")
    if any(not 0 <= token_id <= MAX_COUNT for token_id in biases):
        raise RequestError("the token ids of logit_bias must be at least 0", param="logit_bias")
    if any(not -MAX_BIAS <= bias <= MAX_BIAS for bias in biases.values()):
        text = f"the numbers of logit_bias must be at least {-MAX_BIAS:g} and at most {MAX_BIAS:g}"
        raise RequestError(text, param="logit_bias")
    return biases


def _kind(value: object) -> RequestOutputKind:
    for kind in RequestOutputKind:
        if value == kind:
            return kind
    raise _wrong("output_kind", "cumulative, delta or final", value)


def _form(value: object) -> StructuredOutputsParams:
    try:
        return msgspec.convert(value, StructuredOutputsParams)
    except msgspec.ValidationError as error:
        raise RequestError(f"structured_outputs: {error}", param="structured_outputs") from error


def _wrong(name: str, wanted: str, value: object) -> RequestError:
    return RequestError(f"{name} must be {wanted}, not {reprlib.repr(value)}", param=name)


def _check_ranges(params: SamplingParams) -> None:
    _in_range("n", params.n, 1, MAX_CHOICES)
    _in_range("temperature", params.temperature, 0.0, 100.0)
    _in_range("top_p", params.top_p, 0.0, 1.0, open_low=True)
    _in_range("min_p", params.min_p, 0.0, 1.0)
    _in_range("presence_penalty", params.presence_penalty, -2.0, 2.0)
    _in_range("frequency_penalty", params.frequency_penalty, -2.0, 2.0)
    _in_range("repetition_penalty", params.repetition_penalty, 0.0, 100.0, open_low=True)
    if not -1 <= params.top_k <= MAX_COUNT:
        text = f"top_k must be -1 or 0 (keep all) or positive, and at most {MAX_COUNT}"
        raise RequestError(text, param="top_k")
    if params.max_tokens is not None and params.max_tokens < 1:
        raise RequestError("max_tokens must be at least 1", param="max_tokens")
    _in_range("min_tokens", params.min_tokens, 0, MAX_COUNT)
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise RequestError("min_tokens must not exceed max_tokens", param="min_tokens")
    for name, number in (
        ("logprobs", params.logprobs),
        ("prompt_logprobs", params.prompt_logprobs),
    ):
        if number is not None:
            _in_range(name, number, 0, MAX_LOGPROBS)
    if params.seed is not None and not -(1 << SEED_BITS) <= params.seed < 1 << SEED_BITS:
        raise RequestError("seed must fit 64 bits", param="seed")
    if any(not text for text in params.stop_strings):
        raise RequestError("stop must not hold an empty string", param="stop")
    if params.allowed_token_ids is not None and not params.allowed_token_ids:
        text = "allowed_token_ids must not be empty: leave it out to allow all"
        raise RequestError(text, param="allowed_token_ids")
    if not all(map(str.strip, params.bad_words or ())):
        raise RequestError("bad_words must not hold an empty string", param="bad_words")
    if params.structured_outputs is not None and (params.min_tokens or params.ignore_eos):
        name = "min_tokens" if params.min_tokens else "ignore_eos"
        text = f"{name} cannot be used with structured_outputs or response_format: leave it out"
        raise RequestError(text, param=name)
    if params.best_of not in (None, params.n):
        text = "best_of is not supported: leave it out or set it to the value of n"
        raise RequestError(text, code="unsupported", param="best_of")


def _in_range(name: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    if not low <= value <= high or (open_low and value == low):
        edge = "above" if open_low else "at least"
        # An integer is shown with all of its digits, and 1.0 as 1.
        lowest = f"{low:.10g}"
        highest = f"{high:.10g}"
        raise RequestError(f"{name} must be {edge} {lowest} and at most {highest}", param=name)
