"""The fields of a struct of parameters as rows: type, bounds, default, and what docs say."""

import reprlib
from collections.abc import Callable, Iterator, Mapping
from functools import reduce
from numbers import Real
from operator import index, or_
from types import NoneType
from typing import Annotated, get_args, get_origin, get_type_hints

import msgspec

from baton.protocol.errors import RequestError

# Takes the name of a field and its value, and returns the value in its plain type.
Convert = Callable[[str, object], object]


class About(msgspec.Struct, frozen=True):
    """What checks, bodies and docs/fields.md say of one field of `SamplingParams`.

    `text` is its meaning, and `default` what the page says of a default besides the field's own.
    `only` holds the values of a field that is not supported, all of which ask for nothing. `body`
    is the type that all bodies with sampling take; None if each of them declares the field.
    """

    text: str = ""
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    only: tuple[object, ...] = ()
    body: object = None
    default: str = ""

    @property
    def has_range(self) -> bool:
        return self.ge is not None or self.gt is not None

    def check_range(self, name: str, value: float) -> None:
        """Raise `RequestError` for a number out of range."""
        lowest = self.gt if self.ge is None else self.ge
        assert lowest is not None, "a field with a range has its lower end"
        is_high = self.le is not None and not value <= self.le
        if is_high or not value >= lowest or (self.ge is None and value == lowest):
            edge = "above" if self.ge is None else "at least"
            # An integer is shown with all of its digits, and 1.0 as 1.
            text = f"{name} must be {edge} {lowest:.10g}"
            text += "" if self.le is None else f" and at most {self.le:.10g}"
            raise RequestError(text, param=name)


class Row(msgspec.Struct, frozen=True):
    """One field of `SamplingParams`."""

    name: str
    default: object
    about: About
    is_optional: bool  # None is a value
    convert: Convert | None  # None for a field that is not supported

    def checked(self, value: object) -> object:
        """Return a value in its plain type, which messages need: it may come from numpy.

        Raises `RequestError`.
        """
        if self.convert is None or (value is None and self.is_optional):
            return value
        plain = self.convert(self.name, value)
        if self.about.has_range:
            assert isinstance(plain, (float, int)), "only numbers have ranges"
            self.about.check_range(self.name, plain)
        return plain


def integer(name: str, value: object) -> int:
    if not isinstance(value, bool) and hasattr(value, "__index__"):
        return index(value)
    raise wrong(name, "an integer", value)


def number(name: str, value: object) -> float:
    if type(value) is int or type(value) is float:
        return value
    if isinstance(value, bool) or not isinstance(value, Real):
        raise wrong(name, "a number", value)
    return float(value)


def flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise wrong(name, "True or False", value)
    return value


def texts(name: str, values: object) -> list[str]:
    if isinstance(values, list | tuple) and all(
        isinstance(value, str) for value in values
    ):
        return list(values)
    raise wrong(name, "a string or a list of strings", values)


def text_or_texts(name: str, value: object) -> str | list[str]:
    return value if isinstance(value, str) else texts(name, value)


def wrong(name: str, wanted: str, value: object) -> RequestError:
    return RequestError(
        f"{name} must be {wanted}, not {reprlib.repr(value)}", param=name
    )


CONVERTERS: Mapping[object, Convert] = {
    int: integer,
    float: number,
    bool: flag,
    list[str]: texts,
    str | list[str]: text_or_texts,
}


def rows_of(
    kind: type[msgspec.Struct], converters: Mapping[object, Convert]
) -> Iterator[Row]:
    """Yield a row for each field of a struct whose fields all have defaults.

    `converters` has those of types that are not in `CONVERTERS`.
    """
    known = {**CONVERTERS, **converters}
    hints = get_type_hints(kind, include_extras=True)
    for (name, hint), default in zip(
        hints.items(), kind.__struct_defaults__, strict=True
    ):
        plain, about = (
            get_args(hint) if get_origin(hint) is Annotated else (hint, About())
        )
        kinds = get_args(plain)
        is_optional = NoneType in kinds
        if is_optional:
            plain = reduce(or_, (kind for kind in kinds if kind is not NoneType))
        convert = None if about.only else known[plain]
        yield Row(name, default, about, is_optional, convert)
