"""Take keys, passwords and access tokens out of everything that a report shows.

It looks for secrets in three ways, since each one alone misses some: by the name of a value, by the
shape of a text, and by the very secrets that the caller used (a server may echo a key). This file
is pure.
"""

import re
from collections.abc import Iterable, Sequence

WITHHELD = "(withheld)"
# A shorter text is not treated as a secret, because it would match inside other words.
SHORTEST_SECRET = 4

_NAMES = r"api[_-]?key|authorization|passw(?:or)?d|secret|credential|cookie"
_NAME = re.compile(rf"{_NAMES}|token$", re.IGNORECASE)
_VALUE = r"""(?:"(?:[^"\\]|\\.)*"|'[^']*'|[^\s"',;&]+)"""
_SHAPES = tuple(
    (re.compile(shape, re.IGNORECASE), instead)
    for shape, instead in (
        # The user and the password of an address.
        (r"(\b[a-z][a-z0-9+.-]*://)[^/\s\"']+@", r"\1"),
        # A flag, a variable, a header or a key of JSON; "token: 5" is more often a count.
        (
            rf"(--[\w.-]*(?:{_NAMES}|token)[ =]|(?:{_NAMES})s?[\"']?\s*[=:]\s*|token[\"']\s*:\s*"
            rf"|token=)(?:(?:basic|bearer|token)\s+)?{_VALUE}",
            rf"\1{WITHHELD}",
        ),
        (rf"(\bbearer\s+){_VALUE}", rf"\1{WITHHELD}"),
        (r"\bsk-[\w-]{8,}|\bhf_\w{8,}", WITHHELD),
    )
)


def is_secret_name(name: str) -> bool:
    """Return whether a setting, header or flag of this name holds a secret."""
    return _NAME.search(name) is not None


def cut(text: str, secrets: Iterable[str]) -> str:
    """Return `text` without `secrets`, otherwise unchanged."""
    for secret in secrets:
        if len(secret) >= SHORTEST_SECRET:
            text = text.replace(secret, WITHHELD)
    return text


def clean_text(text: str, secrets: Iterable[str] = ()) -> str:
    """Return `text` without `secrets` and without what looks like a credential."""
    text = cut(text, secrets)
    for shape, instead in _SHAPES:
        text = shape.sub(instead, text)
    return text


def clean(value: object, secrets: Sequence[str] = ()) -> object:
    """Return plain data (as `msgspec.to_builtins` makes it) without secrets, to any depth."""
    match value:
        case str():
            return clean_text(value, secrets)
        case dict():
            return {
                clean_text(str(key), secrets): (inner and WITHHELD)
                if is_secret_name(str(key))
                else clean(inner, secrets)
                for key, inner in value.items()
            }
        case list() | tuple():
            words = [inner for inner in value if isinstance(inner, str)]
            if len(words) == len(value):
                return clean_words(words, secrets)  # it may be a command
            return [clean(inner, secrets) for inner in value]
        case _:
            return value


def clean_words(words: Sequence[str], secrets: Sequence[str] = ()) -> list[str]:
    """Return a command line without the X of `--api-key X`, `--api-key=X`, `--set a.api_key=X`."""
    cleaned: list[str] = []
    hide_next = False
    for word in words:
        name, equals, _ = word.partition("=")
        if hide_next:
            cleaned.append(WITHHELD)
        elif equals and is_secret_name(name):
            cleaned.append(f"{name}={WITHHELD}")
        else:
            cleaned.append(clean_text(word, secrets))
        hide_next = not hide_next and not equals and word.startswith("-") and is_secret_name(word)
    return cleaned
