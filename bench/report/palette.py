"""The colours of a report: one set for the page and the drawings, in a light and a dark scheme.

Each colour of the light scheme is the name of its variable in inline SVG, so no two are equal.
"""

INK, MUTED, GRID, SERIOUS = "#1d2530", "#667080", "#dfe4ea", "#b93a32"
CATEGORIES = (
    "#2f6fb3", "#cf7a2c", "#228b7b", "#7f5fb6", "#c14f70", "#7f8429", "#5a7691", "#8d6345",
    "#b8951f", "#a784b4",
)  # fmt: skip
# From few to many of one quantity.
SEQUENCE = (
    "#9cc3e6", "#7fb0dc", "#639dd1", "#4a8ac5", "#3777b6", "#2a65a2", "#1f538c", "#164275",
)  # fmt: skip

DARK_INK, DARK_MUTED, DARK_GRID, DARK_SERIOUS = "#e4e8ee", "#98a3b3", "#313a47", "#f0857b"
DARK_CATEGORIES = (
    "#6fabe8", "#eaa05c", "#56c2b0", "#b59be6", "#ee8ba8", "#bfc262", "#9fb7cd", "#cda283",
    "#e2c556", "#d3b6dd",
)  # fmt: skip
DARK_SEQUENCE = (
    "#3c668f", "#4474a1", "#4e83b4", "#5b93c7", "#6ea4d7", "#88b6e3", "#a7caed", "#cbe0f6",
)  # fmt: skip

_NAMES = (
    "--ink", "--muted", "--grid", "--serious",
    *(f"--c{index}" for index in range(len(CATEGORIES))),
    *(f"--s{index}" for index in range(len(SEQUENCE))),
)  # fmt: skip
LIGHT = dict(zip(_NAMES, (INK, MUTED, GRID, SERIOUS, *CATEGORIES, *SEQUENCE), strict=True))
DARK = dict(
    zip(
        _NAMES,
        (DARK_INK, DARK_MUTED, DARK_GRID, DARK_SERIOUS, *DARK_CATEGORIES, *DARK_SEQUENCE),
        strict=True,
    )
)
# Colour in a drawing -> variable in a page.
VARIABLES = {colour: name for name, colour in LIGHT.items()}
