"""The metrics and labels that a PromQL expression names, as far as our own queries need it."""

import re

# Words of the language, and functions that the board and the alerts use.
WORDS = {
    "by", "sum", "min", "max", "rate", "increase", "histogram_quantile", "label_values",
}  # fmt: skip
_SELECTOR = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{([^}]*)\})?")
_MATCHER = re.compile(r'(\w+)\s*(=~|!~|!=|=)\s*"[^"]*"\s*')
_GROUPING = re.compile(r"\bby\s*\(([^)]*)\)")


def named(expression: str) -> tuple[dict[str, set[str]], set[str]]:
    """Return the labels that are matched, by metric, and the labels that results are grouped by.

    Raises `ValueError` for brackets that do not close and matchers that are none.
    """
    for opening, closing in ("()", "{}", "[]"):
        if expression.count(opening) != expression.count(closing):
            raise ValueError(f"unbalanced {opening}{closing}: {expression}")
    groups = {
        label.strip() for found in _GROUPING.finditer(expression) for label in found[1].split(",")
    }
    rest = re.sub(r"\[[^]]*\]", "", _GROUPING.sub("", expression))
    metrics: dict[str, set[str]] = {}
    for found in _SELECTOR.finditer(rest):
        if found[1] in WORDS:
            continue
        matchers = [part for part in _split(found[2] or "") if part]
        if not all(_MATCHER.fullmatch(part) for part in matchers):
            raise ValueError(f"cannot read {{{found[2]}}}")
        labels = {re.split("[=!]", part)[0].strip() for part in matchers}
        metrics.setdefault(found[1], set()).update(labels)
    return metrics, groups


def _split(matchers: str) -> list[str]:
    return [part.strip() for part in re.split(r",(?=\s*\w+\s*[=!])", matchers)]
