"""The rotary embedding that config.json describes, in the places and forms that folders have.

This module never imports torch.
"""

import math
from pathlib import Path
from typing import Annotated, Literal, get_args

import msgspec
from msgspec import Meta

from baton.model.config.reading import converted
from baton.model.families.family import NEVER, Family
from baton.protocol.errors import ConfigError

RopeScaling = Literal["default", "linear", "llama3", "yarn", "longrope", "proportional"]
ROPE_THETA = 10000.0
# There is a table of all positions, which fits a host's memory up to here.
MAX_POSITIONS = 1 << 26


_Share = Annotated[float, Meta(gt=0, le=1)]


class Rope(msgspec.Struct, frozen=True):
    """The rotary embedding. Each scaling uses some of the fields, with transformers' names."""

    theta: float
    scaling: RopeScaling = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0  # of all cosines and sines
    score_factor: float = 1.0  # of all scores, in latent attention
    turns: bool = True  # False: attention does not see positions
    # The share of each head that is rotated, its first numbers. Of a proportional embedding, these
    # are those of both halves, and the others turn by no angle.
    partial_rotary_factor: float = 1.0
    # Numbers 2i and 2i + 1 together, not i and i + half of them.
    rotates_neighbours: bool = False
    # Of longrope: how much slower each frequency turns, up to the original length and beyond it.
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()

    def rotated(self, head_dim: int) -> int:
        """Return how many numbers of a head are rotated."""
        if self.scaling == "proportional":
            return head_dim
        return int(head_dim * self.partial_rotary_factor)

    def is_long(self, num_positions: int) -> bool:
        """Return whether a node whose sequences have up to so many tokens takes `long_factor`.

        It does so for all sequences, as vLLM does, because a sequence that grows beyond the
        original length keeps the keys that it has, which do not fit queries of other angles.
        """
        original = self.original_max_position_embeddings
        return self.scaling == "longrope" and num_positions > original

    @property
    def num_positions(self) -> int:
        """Return to how many positions it stretches the model, as vLLM understands YaRN."""
        if self.scaling != "yarn":
            return 0
        return int(self.original_max_position_embeddings * self.factor)


UNROTATED = Rope(ROPE_THETA, turns=False)


class RawRope(msgspec.Struct):
    """The fields of config.json that describe the rotary embedding."""

    rope_theta: float | None = ROPE_THETA
    rope_local_base_freq: float = ROPE_THETA
    rope_scaling: dict[str, object] | None = None
    rope_parameters: dict[str, object] | None = None
    partial_rotary_factor: _Share | None = None
    rotary_dim: Annotated[int, Meta(gt=0)] | None = None  # of MiniMax
    head_dim: Annotated[int, Meta(gt=0)] | None = None
    original_max_position_embeddings: int | None = None
    max_position_embeddings: int = 0


class _Given(msgspec.Struct):
    """`rope_parameters` of transformers 5 or `rope_scaling` of older folders."""

    rope_theta: Annotated[float, Meta(gt=0)]
    rope_type: str
    factor: Annotated[float, Meta(gt=0)] | None = None
    low_freq_factor: Annotated[float, Meta(gt=0)] | None = None
    high_freq_factor: Annotated[float, Meta(gt=0)] | None = None
    original_max_position_embeddings: Annotated[int, Meta(gt=0)] | None = None
    partial_rotary_factor: _Share | None = None
    beta_fast: Annotated[float, Meta(ge=0)] | None = None
    beta_slow: Annotated[float, Meta(ge=0)] | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: Annotated[float, Meta(gt=0)] | None = None
    truncate: bool = True
    short_factor: tuple[Annotated[float, Meta(gt=0)], ...] = ()
    long_factor: tuple[Annotated[float, Meta(gt=0)], ...] = ()


def ropes_config(
    file: Path, family: Family, fields: dict[str, object]
) -> tuple[Rope, Rope | None]:
    """Return the rotary embedding, and that of layers with a window where it is another one."""
    raw = converted(file, fields, RawRope)
    if family.rotates == NEVER:
        return UNROTATED, None
    if family.rotates and fields.get(family.rotates) != "rope":
        return UNROTATED, None
    if family.windows is None or not family.windows.has_own_rope:
        return rope_config(file, family, raw), None
    by_kind = raw.rope_parameters or {}
    try:
        full, local = (
            msgspec.convert(by_kind.pop(f"{kind}_attention", {}), dict[str, object])
            for kind in ("full", "sliding")
        )
    except msgspec.ValidationError as error:
        raise ConfigError(f"{file}: rope_parameters: {error}") from None
    if by_kind:
        raise ConfigError(
            f"{file}: rope_parameters must be by kind of layer in {family.model_type}"
        )
    whole = rope_config(
        file, family, msgspec.structs.replace(raw, rope_parameters=full)
    )
    of_windows = RawRope(
        rope_theta=raw.rope_local_base_freq,
        rope_parameters=local,
        max_position_embeddings=raw.max_position_embeddings,
    )
    return whole, rope_config(file, family, of_windows)


def rope_config(file: Path, family: Family, raw: RawRope) -> Rope:
    """Return the rotary embedding. Raises `ConfigError`."""
    given, field = _read(file, family, raw)
    shares = {given.partial_rotary_factor, raw.partial_rotary_factor} - {None}
    if family.partial_rotary_factor is not None and raw.rotary_dim and raw.head_dim:
        shares.add(raw.rotary_dim / raw.head_dim)
    share = shares.pop() if shares else family.partial_rotary_factor or 1.0
    is_whole = (
        family.partial_rotary_factor is None and given.rope_type != "proportional"
    )
    if shares or (share != 1.0 and is_whole):
        what = f"other than 1 is not supported in {family.model_type}"
        if shares:
            what = "is there twice"
        raise ConfigError(f"{file}: {field}.partial_rotary_factor {what}")
    rope = _scaled(file, family, given, field, raw)
    return msgspec.structs.replace(
        rope, partial_rotary_factor=share, rotates_neighbours=family.rotates_neighbours
    )


def _read(file: Path, family: Family, raw: RawRope) -> tuple[_Given, str]:
    """Return what the folder says, and the field that says it."""
    fields = ("rope_parameters", "rope_scaling")
    field = next((name for name in fields if getattr(raw, name)), "rotary embedding")
    if (
        raw.rope_parameters
        and raw.rope_scaling
        and raw.rope_parameters != raw.rope_scaling
    ):
        raise ConfigError(
            f"{file}: rope_scaling and rope_parameters differ: put the scaling into rope_parameters"
        )
    values: dict[str, object] = {"rope_theta": raw.rope_theta}
    values |= raw.rope_parameters or raw.rope_scaling or {}
    values.setdefault("rope_type", values.get("type", "default"))
    rope_type = values["rope_type"]
    if isinstance(rope_type, str):
        values["rope_type"] = family.rope_types.get(rope_type, rope_type)
    if any(isinstance(value, dict) for value in values.values()):
        raise ConfigError(f"{file}: {field} by kind of layer is not supported")
    try:
        return msgspec.convert(values, _Given), field
    except msgspec.ValidationError as error:
        raise ConfigError(f"{file}: {field}: {error}") from None


def _scaled(
    file: Path, family: Family, given: _Given, field: str, raw: RawRope
) -> Rope:
    base = given.rope_theta
    factor = given.factor
    is_scored = given.rope_type in {"default", "yarn"}
    if family.latent is not None and given.mscale_all_dim and not is_scored:
        raise ConfigError(f"{file}: {field}.mscale_all_dim is supported with yarn only")
    # transformers prefers the length beside the scaling to the one in it.
    original = (
        raw.original_max_position_embeddings or given.original_max_position_embeddings
    )
    original = original or raw.max_position_embeddings
    known = [*get_args(RopeScaling), "dynamic"]
    if not family.has_kinds:
        known.remove("proportional")
    if given.rope_type not in known:
        raise ConfigError(
            f"{file}: {field} of type {given.rope_type!r} is not supported, only {', '.join(known)}"
        )
    if (
        given.rope_type not in {"default", "longrope", "proportional"}
        and factor is None
    ):
        raise ConfigError(f"{file}: {field} of type {given.rope_type} needs a factor")
    match given.rope_type:
        # Dynamic angles are stretched beyond the model's length alone, which no node allows.
        case "default" | "dynamic":
            return Rope(base)
        case "linear":
            return Rope(base, "linear", factor or 1.0)
        case "proportional":
            return Rope(base, "proportional", factor or 1.0)
        case "llama3":
            low = given.low_freq_factor
            high = given.high_freq_factor
            if low is None or high is None:
                raise ConfigError(
                    f"{file}: {field} of type llama3 needs low_freq_factor and high_freq_factor"
                )
            if low >= high:
                raise ConfigError(
                    f"{file}: {field}.low_freq_factor must be below high_freq_factor"
                )
            return Rope(base, "llama3", factor or 1.0, low, high, original)
        case "yarn":
            if base <= 1:
                raise ConfigError(
                    f"{file}: {field} of type yarn needs a rope_theta above 1"
                )
            if not original * (factor or 1.0) <= MAX_POSITIONS:
                raise ConfigError(
                    f"{file}: {field} has more than {MAX_POSITIONS} positions"
                )
            return _yarn(given, factor or 1.0, original)
        case "longrope":
            if not (given.short_factor and given.long_factor):
                raise ConfigError(
                    f"{file}: {field} of type longrope needs short_factor and long_factor"
                )
            if original < 2:  # its logarithm divides
                raise ConfigError(
                    f"{file}: original_max_position_embeddings must be 2 or more"
                )
            return _longrope(
                given, factor or raw.max_position_embeddings / original, original
            )
        case other:
            raise AssertionError(f"{other} is a known type")


def _yarn(given: _Given, factor: float, original: int) -> Rope:
    """Return YaRN's fields, with the values that transformers infers for those left out."""

    def logarithm(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1.0 else 1.0

    attention_factor = given.attention_factor
    if attention_factor is None and given.mscale and given.mscale_all_dim:
        attention_factor = logarithm(given.mscale) / logarithm(given.mscale_all_dim)
    return Rope(
        given.rope_theta,
        "yarn",
        factor,
        original_max_position_embeddings=original,
        beta_fast=given.beta_fast or 32.0,
        beta_slow=given.beta_slow or 1.0,
        truncate=given.truncate,
        attention_factor=logarithm(1.0)
        if attention_factor is None
        else attention_factor,
        score_factor=logarithm(given.mscale_all_dim) ** 2
        if given.mscale_all_dim
        else 1.0,
    )


def _longrope(given: _Given, factor: float, original: int) -> Rope:
    attention_factor = given.attention_factor
    if attention_factor is None:
        attention_factor = math.sqrt(
            1 + math.log(max(factor, 1.0)) / math.log(original)
        )
    return Rope(
        given.rope_theta,
        "longrope",
        original_max_position_embeddings=original,
        attention_factor=attention_factor,
        short_factor=given.short_factor,
        long_factor=given.long_factor,
    )
