"""The sampling parameters of a user, and the part of them that an engine needs.

`SamplingParams` is the public type (`baton.SamplingParams`). `Sampling` travels to the engines,
which never see text and therefore have no stop strings. A parameter that baton cannot honour is
refused, unless its value asks for nothing.
"""

import hashlib
import operator
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Literal

import msgspec
from msgspec import Meta
from msgspec.structs import force_setattr

from baton.protocol.blocks import HASH_BYTES, BlockHash
from baton.protocol.errors import RequestError
from baton.protocol.ids import MAX_COUNT, Count, Int64
from baton.protocol.parameters import About, Convert, integer, number, rows_of, wrong
from baton.protocol.pooling import Pooling

OutputKind = Literal["cumulative", "delta", "final"]
MAX_CHOICES = 128
SEED_BITS = 63
MAX_BIAS = 100.0
MAX_BIASES = 1024
MAX_LOGPROBS = 20
MAX_PATTERN_SIZE = 1024  # a node looks for a pattern at each token
Int32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
Natural = Annotated[int, Meta(ge=0)]
# Of a request's prompts together, those of likeliest tokens included.
MAX_PROMPT_LOGPROBS = 1 << 19


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
    # By id.
    bias: Annotated[tuple[tuple[Count, float], ...], Meta(max_length=MAX_BIASES)] = ()


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
        key = hashlib.blake2b(
            self.tenant_salt.encode("utf-8", "surrogatepass")
        ).digest()
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
    repetition_detection: "RepetitionDetectionParams | None" = None
    logprobs: Count | None = None  # of each token and of so many of the likeliest
    prompt_logprobs: Count | None = None  # the same of the prompt's tokens
    # The root of its blocks' hashes, so that only sequences with the same root share blocks.
    cache_root: Annotated[BlockHash, Meta(max_length=HASH_BYTES)] = b""
    lora: str = ""  # the adapter's name
    pooling: Pooling | None = None  # what is wanted of the prompt instead of tokens
    # Lower ones first, on nodes whose order of requests is by priority.
    priority: Int64 = 0

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
        return next(
            (name, value) for name, value in fields if value not in (None, False)
        )


class RepetitionDetectionParams(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True
):
    """Which repetition at the end of an output ends it. The names are vLLM's.

    A pattern is `min_pattern_size` to `max_pattern_size` tokens that come `min_count` times in a
    row. The smallest size 0 means 1, and the largest size 0 detects nothing. Raises a
    `RequestError` for sizes or a count that fit no pattern.
    """

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0

    def __post_init__(self) -> None:
        name = "repetition_detection"
        largest, smallest, count = (
            integer(name, value) for value in msgspec.structs.astuple(self)
        )
        problem = ""
        if not 0 <= smallest <= largest <= MAX_PATTERN_SIZE:
            problem = (
                f"pattern sizes of at least 0 and at most {MAX_PATTERN_SIZE}, of which "
                "max_pattern_size is the larger"
            )
        elif largest and not 2 <= count <= MAX_COUNT:
            problem = "a min_count of at least 2"
        if problem:
            raise RequestError(f"{name} needs {problem}", param=name)


class SamplingParams(msgspec.Struct, frozen=True):
    """The parameters that a user may set. Names, order and defaults are vLLM's.

    `max_tokens=None` generates until the model's length is full. `stop` takes a string or a list.
    The fields of `NEUTRAL` are not supported: they accept only the values that ask for nothing.
    Raises a `RequestError` that names the first field with a wrong type or a value out of range.
    """

    n: Annotated[
        int, About("1 to 128 choices; at most 1024 with all prompts", ge=1, le=128)
    ] = 1
    presence_penalty: Annotated[
        float,
        About(
            "subtracted from the logit of a token that is in the output; -2 to 2",
            ge=-2,
            le=2,
            body=float,
        ),
    ] = 0.0
    frequency_penalty: Annotated[
        float,
        About(
            "the same, once for each time that the token came; -2 to 2",
            ge=-2,
            le=2,
            body=float,
        ),
    ] = 0.0
    repetition_penalty: Annotated[
        float,
        About(
            "divides positive logits, and multiplies others, of tokens in prompt or output",
            gt=0,
            le=100,
            body=float,
        ),
    ] = 1.0
    temperature: Annotated[float, About("0 is greedy", ge=0, le=100, body=float)] = 1.0
    top_p: Annotated[
        float,
        About(
            "sample from the likeliest tokens with this probability",
            gt=0,
            le=1,
            body=float,
        ),
    ] = 1.0
    top_k: Annotated[
        int,
        About(
            "sample from so many of the likeliest; 0 or -1: all",
            ge=-1,
            le=MAX_COUNT,
            body=Int32,
        ),
    ] = 0
    min_p: Annotated[
        float,
        About(
            "leave out tokens below this part of the highest probability",
            ge=0,
            le=1,
            body=float,
        ),
    ] = 0.0
    seed: Annotated[
        int | None,
        About("the same seed samples the same tokens", body=Int64, default="random"),
    ] = None
    stop: Annotated[
        str | list[str] | None,
        About(
            "a string or up to 64, each of up to 1024 characters, 4096 together; in chats they "
            "apply to content only",
        ),
    ] = None
    stop_token_ids: Annotated[
        list[int] | None,
        About(
            "up to 1024 token ids", body=Annotated[list[Count], Meta(max_length=1024)]
        ),
    ] = None
    ignore_eos: Annotated[
        bool, About("go on after the model's end token", body=bool)
    ] = False
    max_tokens: Annotated[
        int | None,
        About(
            "at least 1, or in C 0 with `echo`; cut to the room that the model has left",
            ge=1,
            default="16; H: what fits",
        ),
    ] = 16
    min_tokens: Annotated[
        int,
        About(
            "the response neither ends nor stops at a stop string before this many tokens",
            ge=0,
            le=MAX_COUNT,
        ),
    ] = 0
    priority: Annotated[
        int,
        About(
            "nodes with `--scheduling-policy priority` serve lower ones first, and those of equal "
            "priority as they came; other nodes ignore it",
            ge=-(2**31),
            le=2**31 - 1,
            body=Int32,
        ),
    ] = 0
    logprobs: Annotated[
        int | None,
        About(
            "log probabilities of each token and of the likeliest, up to 20, before penalties, "
            "masks and temperature; in H, tokens' `bytes` join to the content; in C, part of a "
            r"character is named `bytes:\xe6`",
            ge=0,
            le=MAX_LOGPROBS,
        ),
    ] = None
    prompt_logprobs: Annotated[
        int | None,
        About(
            "the same for the prompt's tokens, in vLLM's form; not streamed. `echo` with "
            "`logprobs` includes them, also in streams. Such prompts are computed whole; at most "
            "524,288 per response",
            ge=0,
            le=MAX_LOGPROBS,
        ),
    ] = None
    detokenize: Annotated[bool, About(only=(True,))] = True
    skip_special_tokens: Annotated[
        bool, About("leave special tokens out of the text", body=bool)
    ] = True
    spaces_between_special_tokens: Annotated[bool, About(only=(True,), body=bool)] = (
        True
    )
    include_stop_str_in_output: Annotated[
        bool, About("keep the stop string in the text", body=bool)
    ] = False
    output_kind: RequestOutputKind | OutputKind = RequestOutputKind.CUMULATIVE
    stream_interval: Annotated[
        int | None,
        About(
            "tokens of a choice per event; its first and its end come at once",
            ge=1,
            body=Int32,
        ),
    ] = None
    truncate_prompt_tokens: Annotated[
        int | None,
        About(only=(None,)),
    ] = None
    logit_bias: Annotated[
        dict[int, float] | None,
        About(
            "up to 1,024 token ids with -100 to 100, added to their logits before penalties",
            body=Annotated[dict[str, float], Meta(max_length=MAX_BIASES)],
        ),
    ] = None
    allowed_token_ids: Annotated[
        list[int] | None,
        About(
            "the only ids allowed, up to 65,536",
            body=Annotated[list[Natural], Meta(max_length=1 << 16)],
        ),
    ] = None
    bad_words: Annotated[
        list[str] | None, About("words never allowed, limited as `stop`")
    ] = None
    structured_outputs: Annotated[
        StructuredOutputsParams | None, About("see [forms](#forms)")
    ] = None
    extra_args: Annotated[dict[str, object] | None, About(only=(None, {}))] = None
    best_of: int | None = None
    use_beam_search: Annotated[bool, About(only=(False, None), body=bool)] = False
    length_penalty: Annotated[float, About(only=(1, None), body=float)] = 1.0
    early_stopping: Annotated[bool, About(only=(False, None))] = False
    repetition_detection: Annotated[
        RepetitionDetectionParams | None,
        About(
            "end an output with the `finish_reason` `repetition` once the same `min_pattern_size` "
            "to `max_pattern_size` tokens have come `min_count` times in a row; sizes up to 1024",
            body=dict[str, object],
        ),
    ] = None

    def __post_init__(self) -> None:
        if not all(map(operator.contains, _NEUTRAL_VALUES, _neutral_fields(self))):
            _refuse_unsupported(self)
        values = _checked_fields(self)
        for row, value, default in zip(
            _CHECKED_ROWS, values, _CHECKED_DEFAULTS, strict=True
        ):
            if value is not default:
                force_setattr(self, row.name, row.checked(value))
        _check_together(self)

    def clone(self, **changes: object) -> "SamplingParams":
        """Return a copy with `changes`. An object never changes, so it can also be shared."""
        return msgspec.structs.replace(self, **changes)

    @property
    def stop_strings(self) -> list[str]:
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else list(self.stop)


def _ids(name: str, values: object) -> list[int]:
    if not isinstance(values, list | tuple):
        raise wrong(name, "a list of token ids", values)
    ids = [integer(name, value) for value in values]
    if any(not 0 <= token_id <= MAX_COUNT for token_id in ids):
        text = f"{name} must be integers of at least 0 and at most {MAX_COUNT}"
        raise RequestError(text, param=name)
    return ids


def _biases(_: str, value: object) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise wrong("logit_bias", "a mapping of token ids to numbers", value)
    try:
        biases = {int(key): number("logit_bias", bias) for key, bias in value.items()}
    except (TypeError, ValueError) as error:
        raise wrong("logit_bias", "a mapping of token ids to numbers", value) from error
    if len(biases) > MAX_BIASES:
        raise RequestError(
            f"logit_bias takes at most {MAX_BIASES} tokens", param="logit_bias"
        )
    if any(not 0 <= token_id <= MAX_COUNT for token_id in biases):
        raise RequestError(
            "the token ids of logit_bias must be at least 0", param="logit_bias"
        )
    if any(not -MAX_BIAS <= bias <= MAX_BIAS for bias in biases.values()):
        text = f"the numbers of logit_bias must be at least {-MAX_BIAS:g} and at most {MAX_BIAS:g}"
        raise RequestError(text, param="logit_bias")
    return biases


def _kind(_: str, value: object) -> RequestOutputKind:
    for kind in RequestOutputKind:
        if value == kind:
            return kind
    raise wrong("output_kind", "cumulative, delta or final", value)


def _as(kind: type[msgspec.Struct]) -> Convert:
    """Return what makes an object of a body into a struct."""

    def convert(name: str, value: object) -> object:
        if isinstance(value, kind):
            return value
        try:
            return msgspec.convert(value, kind)
        except msgspec.ValidationError as error:
            raise RequestError(f"{name}: {error}", param=name) from error

    return convert


def _check_together(params: SamplingParams) -> None:
    """Raise `RequestError` for values that no row can judge alone."""
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise RequestError("min_tokens must not exceed max_tokens", param="min_tokens")
    if (
        params.seed is not None
        and not -(1 << SEED_BITS) <= params.seed < 1 << SEED_BITS
    ):
        raise RequestError("seed must fit 64 bits", param="seed")
    if any(not text for text in params.stop_strings):
        raise RequestError("stop must not hold an empty string", param="stop")
    if params.allowed_token_ids is not None and not params.allowed_token_ids:
        text = "allowed_token_ids must not be empty: leave it out to allow all"
        raise RequestError(text, param="allowed_token_ids")
    if not all(map(str.strip, params.bad_words or ())):
        raise RequestError("bad_words must not hold an empty string", param="bad_words")
    if params.structured_outputs is not None and (
        params.min_tokens or params.ignore_eos
    ):
        name = "min_tokens" if params.min_tokens else "ignore_eos"
        text = f"{name} cannot be used with structured_outputs or response_format: leave it out"
        raise RequestError(text, param=name)
    if params.best_of not in (None, params.n):
        text = "best_of is not supported: leave it out or set it to the value of n"
        raise RequestError(text, code="unsupported", param="best_of")


_CONVERTERS: Mapping[object, Convert] = {
    list[int]: _ids,
    dict[int, float]: _biases,
    RequestOutputKind | OutputKind: _kind,
    StructuredOutputsParams: _as(StructuredOutputsParams),
    RepetitionDetectionParams: _as(RepetitionDetectionParams),
}
ROWS = tuple(rows_of(SamplingParams, _CONVERTERS))
# Fields that baton does not support, and the values of each that ask for nothing.
NEUTRAL: Mapping[str, tuple[object, ...]] = {
    row.name: row.about.only for row in ROWS if row.about.only
}
_NEUTRAL_VALUES = tuple(NEUTRAL.values())
_neutral_fields = operator.attrgetter(*NEUTRAL)
_CHECKED_ROWS = tuple(row for row in ROWS if row.convert is not None)
_CHECKED_DEFAULTS = tuple(row.default for row in _CHECKED_ROWS)
_checked_fields = operator.attrgetter(*(row.name for row in _CHECKED_ROWS))


def _refuse_unsupported(params: SamplingParams) -> None:
    for row in ROWS:
        if row.about.only and getattr(params, row.name) not in row.about.only:
            text = f"{row.name} is not supported: leave it out or set it to {row.default!r}"
            raise RequestError(text, code="unsupported", param=row.name)
