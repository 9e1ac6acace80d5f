"""The annotation of a setting: its help, its unit and its bounds.

The structs of settings use it, in this room and in the benchmark. `runtime.fields` reads it to make
flags, help texts and docs/config.md.
"""

from typing import Literal

from msgspec import Meta


def about(
    description: str,
    unit: str = "",
    *,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    kind: Literal["", "path", "repeated"] = "",
) -> Meta:
    """Return the annotation of one setting.

    The kind `path` is for a file or a folder, `repeated` for a list whose flag is given once per
    entry.
    """
    extra: dict[str, object] = {"unit": unit} if unit else {}
    if kind:
        extra["kind"] = kind
    if gt is not None:
        return Meta(description=description, gt=gt, le=le, extra=extra)
    return Meta(description=description, ge=ge, le=le, extra=extra)
