"""Traces: what ships is what was published, bad rows have a line, prefixes survive scaling."""

import gzip
import itertools
import json
import lzma
import statistics
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from baton.bench.plan.plan import make_plan
from baton.bench.plan.traces import TraceRow, read_prompts, read_trace, replay
from baton.bench.settings import Workload
from baton.protocol.errors import ConfigError

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens\r
2023-11-16 18:15:46.6805900,374,44\r
2023-11-16 18:15:50.9951690,396,109"""


def mooncake(*rows: tuple[float, int, int, list[int]]) -> str:
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    return "\n".join(json.dumps(dict(zip(names, row, strict=True))) for row in rows)


def written(folder: Path, text: str) -> str:
    path = folder / "rows"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize(
    ("name", "num", "span_s", "inputs", "outputs"),
    [
        ("azure-conv", 19_366, 3502, (1155, 1020), (211, 129)),
        ("azure-code", 8_819, 3436, (2048, 1469), (28, 13)),
        ("mooncake-conversation", 12_031, 3537, (12035, 6909), (343, 350)),
        ("mooncake-synthetic", 3_993, 1022, (15325, 11587), (149, 69)),
    ],
)
def test_a_shipped_trace_is_the_published_one(name, num, span_s, inputs, outputs):
    """The figures are those of the traces' descriptions."""
    rows = read_trace(name)
    assert len(rows) == num
    assert rows[0].at_s == 0
    assert rows[-1].at_s == pytest.approx(span_s, abs=1)
    for lengths, (mean, median) in (
        ([row.input_tokens for row in rows], inputs),
        ([row.output_tokens for row in rows], outputs),
    ):
        assert statistics.fmean(lengths) == pytest.approx(mean, abs=0.5)
        assert statistics.median(lengths) == pytest.approx(median, abs=0.5)


def test_azure_rows_count_from_the_first_and_columns_go_by_name(tmp_path):
    first, second = read_trace(written(tmp_path, AZURE))
    assert first == TraceRow(0.0, 374, 44)
    assert second == TraceRow(pytest.approx(4.314579, abs=2e-6), 396, 109)
    text = (
        "GeneratedTokens,TIMESTAMP,ContextTokens\n"
        "3,2024-05-10 00:00:00,7\n\n4,2024-05-10 01:00:01.5+01:00,8\n"  # none is UTC
    )
    assert read_trace(written(tmp_path, text)) == [
        TraceRow(0.0, 7, 3),
        TraceRow(1.5, 8, 4),
    ]


def test_mooncake_rows_bring_blocks(tmp_path):
    text = mooncake((500, 600, 9, [4, 7]), (2500, 512, 1, [4])) + "\n"
    (tmp_path / "packed.xz").write_bytes(lzma.compress(text.encode()))
    (tmp_path / "packed.gz").write_bytes(gzip.compress(text.encode()))
    for path in (
        written(tmp_path, text),
        tmp_path / "packed.xz",
        tmp_path / "packed.gz",
    ):
        rows = [TraceRow(0.0, 600, 9, (4, 7)), TraceRow(2.0, 512, 1, (4,))]
        assert read_trace(str(path)) == rows


@pytest.mark.parametrize(
    ("text", "line", "why"),
    [
        (AZURE.replace("396", "many"), 3, "expected `int`.*ContextTokens"),
        (AZURE.replace("18:15:50", "18:15:40"), 3, "before the row above"),
        (
            AZURE.replace("ContextTokens", "Tokens"),
            2,
            "missing required field `ContextTokens`",
        ),
        ("\n\n", 1, "neither of the known traces"),
        (mooncake((0, 600, 9, [4])), 1, "1 hash_ids for 600 tokens.*make it 2"),
    ],
)
def test_a_malformed_row_of_a_trace_is_named_by_its_line(tmp_path, text, line, why):
    path = written(tmp_path, text)
    with pytest.raises(ConfigError, match=f"(?i){why}") as caught:
        read_trace(path)
    assert caught.value.message.startswith(f"{path}:{line}: ")
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ('{"prompt": ""}', "messages"),
        ('{"prompt": [1, -2]}', "expected `int` >= 0.*prompt"),
        ('{"prompt": "a"}', "at_s"),
    ],
)
def test_a_malformed_row_of_a_file_is_named_by_its_line(tmp_path, row, why):
    path = written(tmp_path, '{"prompt": "first", "at_s": 3}\n' + row)
    with pytest.raises(ConfigError, match=f"(?i){why}") as caught:
        read_prompts(Path(path))
    assert caught.value.message.startswith(f"{path}:2: ")


@st.composite
def traces(draw: st.DrawFn) -> list[TraceRow]:
    """Rows in order, several to a stamp, whose blocks form a tree as those of Mooncake do."""
    rows = []
    at_s = 0.0
    children = itertools.count()
    tree: dict[tuple[int, ...], list[int]] = {}
    for _ in range(draw(st.integers(1, 20))):
        at_s += draw(st.sampled_from((0.0, 0.0, 0.5, 3.0)))
        path: tuple[int, ...] = ()
        for _ in range(draw(st.integers(1, 4))):
            known = tree.setdefault(path, [])
            if not known or draw(st.booleans()):
                known.append(next(children))
            path += (draw(st.sampled_from(known)),)
        last = draw(st.integers(1, 512))
        rows.append(
            TraceRow(
                at_s, (len(path) - 1) * 512 + last, draw(st.integers(0, 900)), path
            )
        )
    return rows


OPTIONS = st.builds(
    Workload,
    time_scale=st.sampled_from((0.25, 1.0, 3.0)),
    length_scale=st.sampled_from((1 / 64, 0.1, 1.0, 1.5)),
)


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """The length of the start that both have."""
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(traces(), OPTIONS, st.integers(0, 2**40))
def test_equal_ids_at_the_front_are_equal_tokens_and_no_others(
    tmp_path, rows, options, seed
):
    text = mooncake(
        *(
            (1000 * row.at_s, row.input_tokens, row.output_tokens, [*row.hash_ids])
            for row in rows
        )
    )
    path = written(tmp_path, text)
    workload = msgspec.structs.replace(options, workload="trace", path=path, seed=seed)
    prompts = [one.prompt_ids for one in make_plan(workload, None).requests]
    played, block_tokens = replay(rows, options)
    for one, other in itertools.combinations(range(len(rows)), 2):
        blocks = common(played[one].hash_ids, played[other].hash_ids)
        shared = min(blocks * block_tokens, len(prompts[one]), len(prompts[other]))
        # Tokens after the last common block are equal by chance only.
        assert shared <= common(prompts[one], prompts[other]) < shared + 5
    assert all(300 <= token <= 8000 for prompt in prompts for token in prompt)
    assert [len(prompt) for prompt in prompts] == [row.input_tokens for row in played]
