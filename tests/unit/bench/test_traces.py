"""Traces: what ships is what was published, bad rows have a line, prefixes survive scaling."""

import gzip
import itertools
import json
import lzma
import math
import statistics
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.bench.plan.arrivals import realised
from baton.bench.plan.replay import TraceOptions, prefix_tokens, repeated_share, replay
from baton.bench.plan.trace_files import SHIPPED, TraceRow, read_trace, trace_path
from baton.protocol.errors import ConfigError

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens\r
2023-11-16 18:15:46.6805900,374,44\r
2023-11-16 18:15:50.9951690,396,109"""
VOCABULARY = (300, 8000)


def mooncake(*rows: tuple[float, int, int, list[int]]) -> str:
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    return "\n".join(json.dumps(dict(zip(names, row, strict=True))) for row in rows)


def written(folder: Path, text: str, name: str = "trace") -> Path:
    path = folder / name
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("name", "num", "span_s", "inputs", "outputs", "repeated"),
    [
        ("azure-conv", 19_366, 3502, (1155, 1020), (211, 129), 0.0),
        ("azure-code", 8_819, 3436, (2048, 1469), (28, 13), 0.0),
        ("mooncake-conversation", 12_031, 3537, (12035, 6909), (343, 350), 0.374),
        ("mooncake-synthetic", 3_993, 1022, (15325, 11587), (149, 69), 0.651),
    ],
)
def test_a_shipped_trace_is_the_published_one(
    name: str,
    num: int,
    span_s: float,
    inputs: tuple[int, int],
    outputs: tuple[int, int],
    repeated: float,
) -> None:
    """The figures are those of the traces' descriptions."""
    rows = read_trace(trace_path(name))
    assert len(rows) == num
    assert rows[0].at_s == 0
    assert rows[-1].at_s == pytest.approx(span_s, abs=1)
    for lengths, (mean, median) in (
        ([row.input_tokens for row in rows], inputs),
        ([row.output_tokens for row in rows], outputs),
    ):
        assert statistics.fmean(lengths) == pytest.approx(mean, abs=0.5)
        assert statistics.median(lengths) == pytest.approx(median, abs=0.5)
    assert repeated_share(rows, 512) == pytest.approx(repeated, abs=0.002)


def test_every_shipped_trace_is_named_with_its_licence() -> None:
    folder = trace_path("azure-conv").parent
    about = (folder / "README.md").read_text()
    for name, file in SHIPPED.items():
        assert name in about
        assert file in about
        assert any(file in notice.read_text() for notice in folder.glob("LICENSE-*"))


def test_azure_rows_count_from_the_first(tmp_path: Path) -> None:
    first, second = read_trace(written(tmp_path, AZURE))
    assert first == TraceRow(0.0, 374, 44)
    assert second == TraceRow(pytest.approx(4.314579, abs=2e-6), 396, 109)


def test_azure_columns_are_found_by_name_and_zones_are_read(tmp_path: Path) -> None:
    text = (
        "GeneratedTokens,TIMESTAMP,ContextTokens\n"
        "3,2024-05-10 00:00:00+00:00,7\n\n4,2024-05-10 00:00:01.5+00:00,8\n"
    )
    assert read_trace(written(tmp_path, text)) == [TraceRow(0.0, 7, 3), TraceRow(1.5, 8, 4)]


def test_mooncake_rows_bring_blocks(tmp_path: Path) -> None:
    text = mooncake((500, 600, 9, [4, 7]), (2500, 512, 1, [4])) + "\n"
    rows = [TraceRow(0.0, 600, 9, (4, 7)), TraceRow(2.0, 512, 1, (4,))]
    assert read_trace(written(tmp_path, text)) == rows
    (tmp_path / "packed.xz").write_bytes(lzma.compress(text.encode()))
    (tmp_path / "packed.gz").write_bytes(gzip.compress(text.encode()))
    assert read_trace(tmp_path / "packed.xz") == rows
    assert read_trace(tmp_path / "packed.gz") == rows


@pytest.mark.parametrize(
    ("text", "line", "why"),
    [
        (AZURE.replace("396", "many"), 3, "lengths many, 109 are not whole numbers"),
        (AZURE.replace("396,", ""), 3, "2 cells, 3 columns"),
        (AZURE.replace(",44", ",44,5"), 2, "4 cells, 3 columns"),
        (AZURE.replace("18:15:50", "18:15:40"), 3, "before that of the row above"),
        (AZURE.replace("18:15:50.9951690", "noon"), 3, "no stamp"),
        (AZURE.replace("50.9951690", "50+00:00"), 3, "no stamp"),
        (AZURE.replace("374", "0"), 2, "0 input tokens"),
        (AZURE.replace("374", "9" * 30), 2, "input tokens"),
        (AZURE.replace("ContextTokens", "Tokens"), 1, "has no ContextTokens"),
        ("a,b,c\n1,2,3", 1, "neither of the known traces"),
        (mooncake((0, 600, 9, [4])), 1, "1 hash_ids for 600 tokens.*make it 2"),
        (mooncake((0, 5, 9, [4]), (5, 5, 9, [-4])), 2, "a hash id is below 0"),
        (mooncake((5, 5, 9, [4]), (4, 5, 9, [4])), 2, "before that of the row above"),
        (mooncake((0, 5, -9, [4])), 1, "-9 output tokens"),
        (mooncake((0, 5, 9, [4])) + "\n{}", 2, "missing required field"),
        (mooncake((0, 5, 9, [4])).replace("9", '"x"'), 1, "output_length"),
        (mooncake((0, 5, 9, [4])) + '\n{"timestamp": 1', 2, "truncated"),
        (mooncake((0, 5, 9, [4]), (7, 5, 9, [4])).replace("7", "1e999"), 2, "out of range|no time"),
    ],
)
def test_a_malformed_row_is_named_by_its_line(
    tmp_path: Path, text: str, line: int, why: str
) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ConfigError, match=why) as caught:
        read_trace(path)
    assert caught.value.message.startswith(f"{path}:{line}: ")
    assert "\n" not in caught.value.message


def test_a_file_that_is_no_trace_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cut.gz").write_bytes(gzip.compress(AZURE.encode())[:-12])
    (tmp_path / "plain.xz").write_text(AZURE)
    (tmp_path / "bytes").write_bytes(b"TIMESTAMP\xff\xfe")
    for name in ("cut.gz", "plain.xz", "bytes"):
        with pytest.raises(ConfigError, match="damaged"):
            read_trace(tmp_path / name)
    with pytest.raises(ConfigError, match="is empty"):
        read_trace(written(tmp_path, "\n\n"))
    with pytest.raises(ConfigError, match="has no rows"):
        read_trace(written(tmp_path, AZURE.splitlines()[0]))
    with pytest.raises(ConfigError, match=r"cannot be read.*azure-conv"):
        read_trace(tmp_path / "absent")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(tmp_path)


@st.composite
def traces(draw: st.DrawFn) -> list[TraceRow]:
    """Rows in order, several to a stamp, whose blocks form a tree as those of Mooncake do."""
    rows, at_s, children = [], 0.0, itertools.count()
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
        rows.append(TraceRow(at_s, (len(path) - 1) * 512 + last, draw(st.integers(0, 900)), path))
    return rows


OPTIONS = st.builds(
    TraceOptions,
    start_s=st.just(0.0),
    time_scale=st.sampled_from((0.25, 1.0, 3.0)),
    spread_s=st.sampled_from((0.0, 0.25, 3.0)),
    length_scale=st.sampled_from((1 / 64, 0.1, 1.0, 1.5)),
    max_input=st.sampled_from((0, 30, 700)),
    max_output=st.sampled_from((0, 12)),
)


@settings(deadline=None)
@given(traces(), OPTIONS)
def test_a_replay_keeps_order_bounds_and_prefix(
    rows: list[TraceRow], options: TraceOptions
) -> None:
    played = replay(rows, options)
    at = [row.at_s for row in played.rows]
    assert len(at) == len(rows)
    assert at == sorted(at)
    assert at[0] == 0
    for row in played.rows:
        assert 1 <= row.input_tokens <= (options.max_input or math.inf)
        assert 1 <= row.output_tokens <= (options.max_output or math.inf)
        assert len(row.hash_ids) == math.ceil(row.input_tokens / played.block_tokens)


@settings(deadline=None)
@given(traces(), OPTIONS)
def test_a_shorter_replay_begins_a_longer_one(rows: list[TraceRow], options: TraceOptions) -> None:
    longer = replay(rows, options).rows
    limit = max(1, len(rows) // 2)
    assert replay(rows, options, limit=limit).rows == longer[:limit]


@settings(deadline=None)
@given(traces(), OPTIONS, st.integers(0, 2**40))
def test_equal_ids_at_the_front_are_equal_tokens_and_no_others(
    rows: list[TraceRow], options: TraceOptions, seed: int
) -> None:
    played = replay(rows, options)
    prompts = [
        prefix_tokens(
            row.hash_ids, row.input_tokens, VOCABULARY, block_tokens=played.block_tokens, seed=seed
        )
        for row in played.rows
    ]
    for one, other in itertools.combinations(range(len(rows)), 2):
        ids = zip(played.rows[one].hash_ids, played.rows[other].hash_ids, strict=False)
        blocks = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], ids))
        tokens = zip(prompts[one], prompts[other], strict=False)
        common = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], tokens))
        shared = min(blocks * played.block_tokens, len(prompts[one]), len(prompts[other]))
        # Tokens after the last common block are equal by chance only.
        assert shared <= common < shared + 5
    assert all(300 <= token <= 8000 for prompt in prompts for token in prompt)
    assert [len(prompt) for prompt in prompts] == [row.input_tokens for row in played.rows]


def test_rows_of_one_stamp_are_spread_up_to_the_next_stamp() -> None:
    stamps = (0, 0, 0, 3, 3, 3.5, 3.5)
    rows = [TraceRow(at_s, 5, 5) for at_s in stamps]
    raw = [row.at_s for row in replay(rows, TraceOptions()).rows]
    assert raw == list(stamps)
    spread = [row.at_s for row in replay(rows, TraceOptions(spread_s=3)).rows]
    assert spread == [0, 1, 2, 3, 3.25, 3.5, 5]
    narrow = [row.at_s for row in replay(rows, TraceOptions(spread_s=0.3)).rows]
    assert narrow == pytest.approx([0, 0.1, 0.2, 3, 3.15, 3.5, 3.65])


def test_spreading_makes_the_quantised_trace_smooth() -> None:
    rows = read_trace(trace_path("mooncake-conversation"))
    raw, spread = (
        realised([row.at_s for row in replay(rows, TraceOptions(spread_s=width_s)).rows])
        for width_s in (0, 3)
    )
    assert raw.cv is not None
    assert spread.cv is not None
    assert raw.rate == pytest.approx(3.4, abs=0.01)
    assert spread.rate == pytest.approx(raw.rate, rel=0.001)
    assert raw.cv > 2.9
    assert spread.cv < 0.5


def test_a_start_skips_rows_and_counts_from_the_first_that_is_left() -> None:
    rows = [TraceRow(at_s, 5, 5) for at_s in (0.0, 4.0, 9.0)]
    played = replay(rows, TraceOptions(start_s=3, time_scale=2))
    assert [row.at_s for row in played.rows] == [0, 10]
    assert "the trace's first 3 s are left out" in played.notes
    assert "the trace's times are stretched by 2" in played.notes
    with pytest.raises(ConfigError, match="no rows from 10 s on"):
        replay(rows, TraceOptions(start_s=10))


def test_what_was_clamped_and_scaled_is_said() -> None:
    rows = [TraceRow(0.0, 512, 80, (1,)), TraceRow(1.0, 1024, 8, (1, 2)), TraceRow(2.0, 99, 0)]
    notes = "\n".join(replay(rows, TraceOptions(length_scale=0.5, max_input=300)).notes)
    assert "lengths are scaled by 0.5" in notes
    assert "blocks of 256 tokens, which scales inputs by 0.5" in notes
    assert "1 of 3 inputs were clamped to 1 to 300 tokens" in notes
    assert "1 of 3 outputs were clamped to 1 or more tokens" in notes
    assert not [note for note in replay(rows[:2], TraceOptions()).notes if "clamped" in note]


def test_blocks_too_small_to_differ_are_refused() -> None:
    with pytest.raises(ConfigError, match="equal by chance"):
        prefix_tokens((1,), 2, VOCABULARY, block_tokens=2, seed=0)
    with pytest.raises(ConfigError, match="equal by chance"):
        prefix_tokens((1,), 9, (5, 5), block_tokens=512, seed=0)
