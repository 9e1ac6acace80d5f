"""`baton status` shows the processes of a cluster in the terminal, as the page `/` does.

The platform reports which processes run, and the routers report their states; either is enough. On
a terminal the table is live until Ctrl-C; elsewhere it is printed once. The command changes
nothing.
"""

import os
import ssl
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import msgspec
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from baton.deploy.cluster.arguments import Words
from baton.deploy.cluster.overview import Overview, RouterAnswer, RouterDocument, StatusRow
from baton.deploy.cluster.platform import Platform, PlatformOptions, ProcessStatus
from baton.deploy.cluster.platforms import platform_named
from baton.deploy.cluster.processes import ROUTERS, ClusterPlan, plan_of
from baton.deploy.cluster.reading import read_description
from baton.deploy.cluster.running import Deployment, read_deployment
from baton.deploy.cluster.table import lines_of
from baton.protocol.errors import ConfigError, NodeError
from baton.runtime.process import Interrupts
from baton.runtime.tls import client_context

PERIOD_S = 1.0
TIMEOUT_S = 2.0
KEY_VARIABLE = "BATON_API_KEY"
MAX_FAULT_CHARS = 60
HEAD = (
    "process", "role", "host", "state", "in service at", "running", "waiting", "KV", "handoffs",
    "per s", "mean", "", "last end", "last fault",
)  # fmt: skip
COLOURS = {
    "ready": "green", "running": "green", "lost": "red", "silent": "red", "stuck": "red",
    "failed": "red", "ended": "red",
}  # fmt: skip


class AskedRouter(msgspec.Struct, frozen=True):
    """The URL of a router to ask, and the API key to send."""

    name: str
    url: str
    api_key: str = ""


class ClusterView:
    """The current knowledge of one cluster: of its deployment, or of named routers."""

    def __init__(
        self, words: Words, folder: Path | None = None, deployment: Deployment | None = None
    ) -> None:
        """Without a deployment, only the routers that `words` name are asked.

        Raises `ConfigError` for certificates that cannot be read.
        """
        self._words = words
        self._trust = client_context(words.ca_file)
        self._folder = folder
        self._deployment = deployment
        self._platform: Platform | None = None
        if deployment is not None:
            self._platform = platform_named(deployment.platform, PlatformOptions(deployment.hosts))
        self._plan: ClusterPlan | None = None
        self._overview = Overview()
        self.problems: list[str] = []
        self.statuses: list[ProcessStatus] = []
        self.rows: list[StatusRow] = []

    @property
    def is_down(self) -> bool:
        """Return whether `baton down` has ended the deployment."""
        return self._folder is not None and read_deployment(self._folder) is None

    @property
    def is_well(self) -> bool:
        """Return whether every process runs; without a deployment, whether every router answers."""
        if self._deployment is None:
            return not self.problems
        return all(one.state == "running" for one in self.statuses)

    @property
    def summary(self) -> str:
        return self._overview.summary(self._deployment.name if self._deployment else "")

    def look(self) -> None:
        """Ask the platform and every router. Raises `NodeError` if the platform does not answer."""
        if self._platform is not None and self._folder is not None:
            self.statuses = self._platform.status(self._folder)
        routers = self._routers()
        with ThreadPoolExecutor(max(1, len(routers))) as threads:
            answers = list(threads.map(partial(ask, self._trust), routers))
        self._overview.take(answers)
        self.problems = [f"{one.name} at {one.url} {one.problem}" for one in answers if one.problem]
        self.rows = self._overview.rows(self.statuses)

    def _routers(self) -> list[AskedRouter]:
        own = self._own_routers()
        key = self._words.api_key or os.environ.get(KEY_VARIABLE, "")
        urls = [url.rstrip("/").removesuffix("/v1") for url in self._words.urls]
        if not urls:
            return [msgspec.structs.replace(one, api_key=key or one.api_key) for one in own]
        names = [one.name for one in self.statuses if one.role == "router"]
        if len(names) != len(urls):
            names = [url.partition("://")[2] for url in urls]
        key = key or next((one.api_key for one in own if one.api_key), "")
        return [AskedRouter(name, url, key) for name, url in zip(names, urls, strict=True)]

    def _own_routers(self) -> list[AskedRouter]:
        """Return the deployment's reachable routers, with the names in its file."""
        if self._deployment is None or self._platform is None or self._folder is None:
            return []
        if self._plan is None:
            try:
                description = read_description(Path(self._deployment.file))
                self._plan = plan_of(description, self._platform.places(description))
            except ConfigError:
                return []  # the file was changed or moved, but the platform still reports what runs
        plan = self._plan
        routers, urls = plan.pool(ROUTERS), self._platform.urls(plan, self._folder)
        return [
            AskedRouter(
                spec.name, url, spec.secret_env.get("BATON_ROUTER_API_KEYS", "").partition(",")[0]
            )
            for spec, url in zip(routers, urls, strict=False)
        ]


def show(view: ClusterView, words: Words) -> int:
    """Print the cluster, live if stdout is a terminal, and return the exit code."""
    if words.json or words.once or not sys.stdout.isatty():
        view.look()
        print(msgspec.json.encode(view.rows).decode() if words.json else plain(view))
        return 0 if view.is_well else 1
    return _show_live(view)


def plain(view: ClusterView) -> str:
    """Return the cluster as text for a pipe."""
    lines = [view.summary] if view.summary else []
    if view.rows:
        lines.append(lines_of(*_filled(cells(view.rows, time.time()))))
    return "\n".join([*lines, *view.problems])


def cells(rows: Sequence[StatusRow], now: float) -> list[tuple[str, ...]]:
    """Return the text of each row, by the columns of `HEAD`."""
    return [
        (
            row.name,
            row.role,
            row.host,
            _state_of(row),
            row.in_service_at,
            _number(row.num_running),
            _number(row.num_waiting),
            "" if row.kv_used is None else f"{100 * row.kv_used:.0f} %",
            _number(row.num_handoffs),
            "" if row.handoffs_per_s is None else f"{row.handoffs_per_s:.1f}",
            "" if row.handoff_s is None else f"{1e3 * row.handoff_s:.1f} ms",
            row.note,
            row.last_end,
            _fault(row, now),
        )
        for row in rows
    ]


def ask(trust: ssl.SSLContext, router: AskedRouter) -> RouterAnswer:
    """Return a router's answer at /status.json, or why there is none."""
    request = urllib.request.Request(f"{router.url}/status.json")
    if router.api_key:
        request.add_header("Authorization", f"Bearer {router.api_key}")
    problem = ""
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S, context=trust) as reply:
            document = msgspec.json.decode(reply.read(), type=RouterDocument)
            return RouterAnswer(router.name, router.url, document)
    except urllib.error.HTTPError as error:
        with error:
            problem = {
                401: f"asks for an API key: give one with --api-key, or in {KEY_VARIABLE}",
                404: "has no status page: router.page is off",
            }.get(error.code, f"answers {error.code}")
    except (OSError, msgspec.MsgspecError) as error:
        reason = getattr(error, "reason", error)
        if isinstance(reason, ssl.SSLCertVerificationError):
            why = f"its certificate is not trusted ({reason.verify_message}); name its authority "
            problem = f"cannot be asked: {why}with --ca-file"
        else:
            problem = f"does not answer: {getattr(reason, 'strerror', None) or reason}"
    return RouterAnswer(router.name, router.url, None, problem)


def _show_live(view: ClusterView) -> int:
    with Interrupts() as interrupts, Live(console=Console(), auto_refresh=False) as live:
        while not view.is_down:
            try:
                view.look()
                trouble = view.problems
            except NodeError as error:
                trouble = [error.message]
            live.update(_drawn(view, trouble), refresh=True)
            if interrupts.wait(PERIOD_S):
                return 0
    print("it is down")
    return 1


def _drawn(view: ClusterView, problems: Sequence[str]) -> Group:
    head, rows = _filled(cells(view.rows, time.time()))
    table = Table(box=None, header_style="dim", pad_edge=False)
    for title in head:
        is_number = title in ("running", "waiting", "KV", "handoffs", "per s", "mean")
        table.add_column(title, justify="right" if is_number else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(text, COLOURS.get(text, "")) for text in row))
    return Group(Text(view.summary), table, *(Text(one, "red") for one in problems))


def _filled(
    rows: Sequence[tuple[str, ...]],
) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the titles and rows of the columns in which some row has text."""
    kept = [i for i in range(len(HEAD)) if i < 2 or any(row[i] for row in rows)]
    return tuple(HEAD[i] for i in kept), [tuple(row[i] for i in kept) for row in rows]


def _state_of(row: StatusRow) -> str:
    """Return the state from the routers, unless the platform's state overrides it."""
    return row.health if row.health and row.state in ("", "running", "unknown") else row.state


def _number(value: int | None) -> str:
    return "" if value is None else str(value)


def _fault(row: StatusRow, now: float) -> str:
    if row.last_fault_at is None:
        return ""
    ago_s = max(0, round(now - row.last_fault_at))
    ago = f"{ago_s} s" if ago_s < 120 else f"{ago_s // 60} min"
    text = row.last_fault
    return f"{ago} ago, " + (
        text if len(text) <= MAX_FAULT_CHARS else f"{text[: MAX_FAULT_CHARS - 1]}…"
    )
