"""Links lead somewhere, generated pages are current, and every setting is read by some code."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

from baton.protocol import messages
from baton.protocol.config import ClusterConfig
from baton.router.http.api.decoding import OUTPUT_FIELDS
from baton.router.http.api.pooling_bodies import EmbeddingBody, RerankBody, ScoreBody
from baton.router.http.api.responses_body import ResponseBody
from baton.router.http.api.schema import ChatBody, CompletionBody
from baton.router.http.api.tokens import DetokenizeBody, TokenizeBody
from baton.router.http.app import document
from baton.runtime.fields import fields_of
from tests.support.sources import REPOSITORY, name_of, sources, tree

LINK = re.compile(r"\]\(([^)\s]+)\)")
# Where a whole section is handed on under another name.
ALIASES = {"config", "settings"}


def test_links_lead_to_files_and_headings_that_exist():
    pages = [*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").rglob("*.md")]
    broken = [
        f"{name_of(page)}: {target}"
        for page in pages
        for target in LINK.findall(page.read_text())
        if "://" not in target and not is_there(page, target)
    ]
    assert not broken, "\n".join(broken)


def is_there(page: Path, target: str) -> bool:
    """Return whether a relative link of a page has its file, and its heading or anchor in that."""
    name, _, anchor = target.partition("#")
    path = page.parent / name if name else page
    if not anchor or path.suffix != ".md":
        return path.exists()
    text = path.read_text()
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    slugs = {
        re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        for heading in headings
    }
    return anchor in slugs or f'id="{anchor}"' in text


def test_the_picture_names_messages_that_exist():
    """Words in a line of names alone, such as `Offered, BlockRange, End`, are messages."""
    texts = re.findall(
        r">([^<]+)</text>", (REPOSITORY / "docs/architecture.svg").read_text()
    )
    lines = [text for text in texts if re.fullmatch(r"[A-Z]\w+(, [A-Z]\w+)*", text)]
    names = {name for line in lines for name in line.split(", ")}
    assert {"Prefill", "Decode", "End"} <= names
    assert all(hasattr(messages, name) for name in names), names


def test_generated_pages_are_current():
    done = subprocess.run(
        [sys.executable, "docs/generate.py", "--check"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_every_field_of_every_body_is_explained_where_it_is_and_nowhere_else():
    page = (REPOSITORY / "docs" / "fields.md").read_text()
    endpoints = (REPOSITORY / "docs" / "api.md").read_text()
    bodies = {"C": CompletionBody, "H": ChatBody, "R": ResponseBody, "T": TokenizeBody}
    known = {
        (letter, name)
        for letter, body in (*bodies.items(), ("D", DetokenizeBody))
        for name in body.__struct_fields__
    }
    rows = [
        (name, letters.split())
        for pattern in (
            r"^- (`[^(]*`) \(([CHRTD ]+)[,)]",
            r"^\| (`[^|]*`) \| ([CHRTD ]+) \|",
        )
        for names, letters in re.findall(pattern, page, re.MULTILINE)
        for name in re.findall(r"`(\w+)`", names)
    ]
    assert {(letter, name) for name, letters in rows for letter in letters} == known
    _, _, others = page.partition("## Fields of other APIs")
    others, _, _ = others.partition("## Chats")
    cells = re.findall(r"^\| (`[^|]*`) \|", others, re.MULTILINE)
    refused = {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}
    assert refused
    assert refused <= OUTPUT_FIELDS - {name for _, name in known}
    for path in json.loads(document())["paths"]:
        assert path.partition("{")[0].rstrip("/") in endpoints


def test_every_field_of_the_bodies_that_pool_is_explained():
    page = (REPOSITORY / "docs" / "fields.md").read_text()
    bodies = {"E": EmbeddingBody, "S": ScoreBody, "K": RerankBody}
    known = {
        (letter, name)
        for letter, body in bodies.items()
        for name in body.__struct_fields__
    }
    rows = re.findall(r"^- (`[^(]*`) \(([ESK ]+)", page, re.MULTILINE)
    explained = {
        (letter, name)
        for names, letters in rows
        for name in re.findall(r"`(\w+)`", names)
        for letter in letters.split()
    }
    assert explained == known


def test_every_setting_is_read_somewhere():
    read: set[tuple[str, str]] = set()
    for path in sources():
        if name_of(path) == "protocol/config.py":
            continue
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Attribute) and isinstance(
                node.value, ast.Attribute | ast.Name
            ):
                holder = (
                    node.value.attr
                    if isinstance(node.value, ast.Attribute)
                    else node.value.id
                )
                read.add((holder.lstrip("_"), node.attr))
    unread = [
        field.name
        for field in fields_of(ClusterConfig)
        if not any(
            (holder, field.key) in read for holder in {*ALIASES, field.section} - {""}
        )
    ]
    assert not unread, "settings that no code reads"
