"""Writes config.md, metrics.md and the lists of fields.md and models.md from the code.

`python docs/generate.py [--check]`.

`make docs` runs it, and a test runs it with `--check`, so the pages cannot drift from the structs.
To change a page, change what the code says of its settings, metrics, fields and families.
"""

import sys
from collections.abc import Iterable
from pathlib import Path

from baton.model.families.table import FAMILIES
from baton.protocol.config import ClusterConfig
from baton.protocol.sampling import ROWS
from baton.router.http.api.responses_body import ResponseBody
from baton.router.http.api.schema import ChatBody, CompletionBody
from baton.router.http.metrics import ROUTER_FAMILIES
from baton.runtime.fields import fields_of
from baton.runtime.metrics import NODE_FAMILIES, Family
from baton.runtime.settings import flags_of

HERE = Path(__file__).resolve().parent
FAMILIES_BEGIN = "<!-- generated from model/families by `make docs` -->"
SAMPLING_BEGIN = "<!-- generated from protocol/sampling.py by `make docs` -->"
LIST_END = "<!-- end of the generated list -->"
BODIES = {"C": CompletionBody, "H": ChatBody, "R": ResponseBody}


def main(arguments: list[str]) -> int:
    pages = {
        HERE / "config.md": config_page(),
        HERE / "metrics.md": metrics_page(),
        HERE / "fields.md": fields_page((HERE / "fields.md").read_text()),
        HERE / "models.md": models_page((HERE / "models.md").read_text()),
    }
    stale = [
        path
        for path, text in pages.items()
        if not path.exists() or path.read_text() != text
    ]
    if "--check" in arguments:
        for path in stale:
            print(f"{path.name} is stale: run `make docs`", file=sys.stderr)
        return 1 if stale else 0
    for path in stale:
        path.write_text(pages[path])
    return 0


def config_page() -> str:
    lines = [
        "# Settings",
        "",
        "Generated from `protocol/config.py` by `make docs`; do not edit.",
        "",
        "Later sources win: the defaults below, a YAML file (`--config cluster.yaml`, sections as",
        "mappings), environment variables (`router.port` is `BATON_ROUTER_PORT`), flags,",
        "`--set section.field=value`. A command has flags for the sections that it uses:",
        "`--router-port` is `router.port`, and some have a short one. Other sources reach every",
        "setting. Lists are written with commas. Unknown names are refused, except those of",
        "variables. Defaults are in brackets, behind the names.",
    ]
    section: str | None = None
    for field in fields_of(ClusterConfig):
        if field.section != section:
            section = field.section
            lines += ["", f"## {section or 'cluster'}", ""]
        names = ", ".join(f"`{name}`" for name in (field.name, *flags_of(field)[:-1]))
        unit = f" {field.unit}" if field.unit else ""
        lines.append(f"- {names} ({field.shown_default}{unit}): {field.meaning}")
    return "\n".join(lines) + "\n"


def metrics_page() -> str:
    lines = [
        "# Metrics",
        "",
        "Generated from `router/http/metrics.py` and `runtime/metrics.py` by",
        "`make docs`; do not edit. [observability.md](observability.md) says how to use them.",
        "",
        "Every family has the label `model_name` besides those in braces. Where vLLM has one",
        "of the same meaning, it is named. Counters end in `_total`; what is not marked as a",
        "histogram is a gauge. A histogram `x` is scraped as `x_bucket`, `x_sum` and `x_count`.",
        "",
        "## Router",
        "",
        "On `GET /metrics` of every router, about the requests that it served.",
        "",
        *_list(ROUTER_FAMILIES),
        "",
        "## Nodes",
        "",
        "On the page of every router about all of its nodes, as of their last heartbeats, and",
        "on the page of each node that serves HTTP (`node.http`) about itself. Scrape routers or",
        "nodes, not both, if you add values. Counters start at 0 when a node starts.",
        "",
        *_list(NODE_FAMILIES),
        "",
        "## Process",
        "",
        "`process_cpu_seconds_total`, `process_resident_memory_bytes`,",
        "`process_virtual_memory_bytes`, `process_start_time_seconds`, `process_open_fds` and",
        "`process_max_fds` are those of the process that serves the page.",
    ]
    return "\n".join(lines) + "\n"


def models_page(page: str) -> str:
    """Return models.md with the list of baton's own families as their rows say."""
    rows = [
        "Families, their `architectures` in config.json, and `mtp` where a layer can draft:",
        "",
    ]
    for family in FAMILIES:
        names = dict.fromkeys((family.architecture, *family.wrappers))
        shown = ", ".join(f"`{name}`" for name in names)
        drafts = "" if family.draft is None else "; `mtp`"
        rows.append(f"- {family.title}: {shown}{drafts}")
    return _with_list(page, FAMILIES_BEGIN, rows)


def fields_page(page: str) -> str:
    """Return fields.md with the fields of sampling as protocol/sampling.py has them."""
    lines = []
    for row in ROWS:
        letters = [
            letter for letter in BODIES if row.name in BODIES[letter].__struct_fields__
        ]
        if letters and row.about.text:
            default = row.about.default or _shown(row.default)
            where = " ".join(letters)
            brackets = f"{where}, {default}" if default else where
            lines.append(f"- `{row.name}` ({brackets}): {row.about.text}")
    return _with_list(page, SAMPLING_BEGIN, lines)


def _shown(default: object) -> str:
    if default is None:
        return ""
    return str(default).lower() if isinstance(default, bool) else f"{default:g}"


def _with_list(page: str, begin: str, lines: list[str]) -> str:
    before, _, rest = page.partition(begin)
    _, _, after = rest.partition(LIST_END)
    entries = "\n".join(lines)
    return f"{before}{begin}\n{entries}\n{LIST_END}{after}"


def _list(families: Iterable[Family]) -> list[str]:
    rows = []
    for family in families:
        labels = ", ".join(family.labels)
        name = f"{family.full_name}{{{labels}}}" if labels else family.full_name
        kind = " histogram" if family.kind == "histogram" else ""
        vllm = f" (`{family.vllm}`)" if family.vllm else ""
        rows.append(f"- `{name}`{kind}: {family.meaning}{vllm}")
    return rows


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
