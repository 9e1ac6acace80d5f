"""Takes keys, passwords and tokens of access out of whatever a report shows.

Used by `provenance.py` and `report/`. Three nets, since one alone has holes: values under a name
that says what they are, text that has the shape of a credential, and the very secrets that the
caller used (a server may echo a key that it refused). Pure: no files, no environment.
"""

import re
from collections.abc import Iterable, Sequence

WITHHELD = "(withheld)"
# Shorter than this is no secret, but would be found inside of other words.
SHORTEST_SECRET = 4

_NAME = re.compile(
    r"api[_-]?key|authorization|passw(?:or)?d|secret|credential|cookie"
    r"|(?:^|[_.-])(?:(?:access|api|auth|bearer|hf|refresh|session)[_-]?)?token$",
    re.IGNORECASE,
)
_SHAPES = (
    # The user and password of an address.
    (re.compile(r"(\b[a-z][a-z0-9+.-]*://)[^/\s\"']+@", re.IGNORECASE), r"\1"),
    # In JSON, where a value may hold spaces.
    (
        re.compile(
            r"(\"[\w.-]*(?:api[_-]?key|authorization|passw(?:or)?d|secret|credentials?|cookie|token)"
            r"\"\s*:\s*)\"(?:[^\"\\]|\\.)*\"",
            re.IGNORECASE,
        ),
        rf'\1"{WITHHELD}"',
    ),
    (
        re.compile(
            r"(authorization[\"']?\s*[:=]\s*[\"']?)(?:[a-z]+\s+)?[^\s\"',;]+", re.IGNORECASE
        ),
        rf"\1{WITHHELD}",
    ),
    (re.compile(r"(\bbearer\s+)[^\s\"',;]+", re.IGNORECASE), rf"\1{WITHHELD}"),
    (
        re.compile(
            r"(--[\w.-]*(?:api[_-]key|password|secret|token)[ =])(?:\"[^\"]*\"|'[^']*'|\S+)"
        ),
        rf"\1{WITHHELD}",
    ),
    (re.compile(r"((?:\b|_)token=)[^\s\"'&,;]+", re.IGNORECASE), rf"\1{WITHHELD}"),
    (re.compile(r"\bsk-[\w-]{8,}|\bhf_\w{8,}"), WITHHELD),
    (
        re.compile(
            r"(api[_-]?key|passw(?:or)?d|secret|(?:access|auth|refresh|session)_token|[?&]token)"
            r"([\"']?\s*[=:]\s*[\"']?)[^\s\"'&,;]+",
            re.IGNORECASE,
        ),
        rf"\1\2{WITHHELD}",
    ),
)


def is_secret_name(name: str) -> bool:
    """Whether a setting, header or flag of this name holds a secret."""
    return _NAME.search(name) is not None


def cut(text: str, secrets: Iterable[str]) -> str:
    """`text` without `secrets`, and otherwise as it was."""
    for secret in secrets:
        if len(secret) >= SHORTEST_SECRET:
            text = text.replace(secret, WITHHELD)
    return text


def clean_text(text: str, secrets: Iterable[str] = ()) -> str:
    """`text` without `secrets` and without what looks like a credential."""
    text = cut(text, secrets)
    for shape, instead in _SHAPES:
        text = shape.sub(instead, text)
    return text


def clean(value: object, secrets: Sequence[str] = ()) -> object:
    """Plain data (as `msgspec.to_builtins` makes it) without secrets, to any depth."""
    match value:
        case str():
            return clean_text(value, secrets)
        case dict():
            return {
                clean_text(str(key), secrets): WITHHELD
                if is_secret_name(str(key)) and inner not in (None, "", (), [])
                else clean(inner, secrets)
                for key, inner in value.items()
            }
        case list() | tuple() if value and all(isinstance(inner, str) for inner in value):
            return clean_words(value, secrets)  # it may be a command
        case list() | tuple():
            return [clean(inner, secrets) for inner in value]
        case _:
            return value


def without_secrets(value: object) -> object:
    """As `clean`, but secrets leave no trace: a run with a key is the same run without."""
    match value:
        case str():
            return clean_text(value)
        case dict():
            return {
                str(key): without_secrets(inner)
                for key, inner in value.items()
                if not is_secret_name(str(key))
            }
        case list() | tuple():
            return [without_secrets(inner) for inner in value]
        case _:
            return value


def clean_words(words: Sequence[str], secrets: Sequence[str] = ()) -> list[str]:
    """A command line without secrets: `--api-key X`, `--api-key=X`, `--set a.api_key=X`."""
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
