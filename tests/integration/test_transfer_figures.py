"""`python -m tools.transfer` with real readers and a real owner, small enough to take no time."""

from pathlib import Path

import msgspec
import numpy as np
import pytest

from baton.kv_transfer.pools import HostPool
from baton.kv_transfer.transports.nixl_binding import is_installed
from baton.protocol.errors import ConfigError
from tools.transfer.__main__ import Row, TransferReport, main, transfer
from tools.transfer.marked_blocks import marks, wrong_blocks
from tools.transfer.settings import MIB, TransferSettings, parse

SMALL = TransferSettings(block_kib=(16, 64), blocks=(1, 8), reads=5, pool_mib=2, max_read_mib=1)


def small(**changes: object) -> TransferSettings:
    return msgspec.structs.replace(SMALL, **changes)


def by_way(report: TransferReport, way: str) -> list[Row]:
    return [row for row in report.rows if row.way == way]


def check_figures(rows: list[Row]) -> None:
    # Two block sizes, a single block in one pattern, several in three.
    kinds = {(row.kind.block_bytes >> 10, row.kind.num_blocks, row.kind.pattern) for row in rows}
    assert len(rows) == len(kinds) == 2 * (1 + 3)
    for row in rows:
        assert row.num_reads == 5
        assert 0 < row.p50_ms <= row.p99_ms
        assert row.best_gb_per_s >= row.gb_per_s > 0
        # The figures are rounded, the times to a tenth of a microsecond.
        expected = row.kind.read_bytes / row.p50_ms / 1e6
        assert row.gb_per_s == pytest.approx(expected, rel=0.05)


def test_shm_and_memcpy_take_turns_over_every_kind_of_read() -> None:
    told: list[Row] = []
    report = transfer(small(transports=("shm",)), told.extend)
    assert {row.way for row in report.rows} == {"memcpy", "shm"}
    check_figures(by_way(report, "shm"))
    check_figures(by_way(report, "memcpy"))
    assert all(row.of_memcpy == 1 for row in by_way(report, "memcpy"))
    assert all(row.of_memcpy > 0 for row in by_way(report, "shm"))
    assert told == report.rows


def test_reads_that_are_checked_take_turns_with_those_that_are_not() -> None:
    report = transfer(small(transports=("shm",), verify=True))
    assert {row.way for row in report.rows} == {"memcpy", "shm", "shm_verified", "sums"}
    for way in ("shm", "shm_verified", "sums"):
        check_figures(by_way(report, way))


def test_everything_that_works_here_is_taken_by_default() -> None:
    report = transfer(small(block_kib=(64,), blocks=(4,), patterns=("gather",), reads=1))
    ways = {row.way for row in report.rows}
    if is_installed():
        assert ways == {"memcpy", "shm", "nixl", "raw_nixl"}
    else:
        assert ways == {"memcpy", "shm"}
        assert any("not installed" in note for note in report.notes)


def test_a_read_that_does_not_fit_is_left_out_and_named() -> None:
    report = transfer(small(transports=("shm",), blocks=(1, 17), patterns=("run",)))
    assert {(row.kind.block_bytes >> 10, row.kind.num_blocks) for row in report.rows} == {
        (16, 1), (16, 17), (64, 1)
    }  # fmt: skip
    assert report.notes == ["larger than 1 MiB, left out: 17 x 64 KiB"]


def test_blocks_that_are_not_the_owners_are_found() -> None:
    pool = HostPool(8, MIB // 8)
    blocks = np.frombuffer(pool.buffer, np.uint8).reshape(8, -1)
    remote, local = np.array([5, 6, 7], np.int32), np.array([2, 0, 4], np.int32)
    blocks[local] = marks(remote)[:, None]
    assert wrong_blocks(pool, remote, local) == 0
    blocks[0, 640] = 0
    blocks[4] = marks(np.array([6], np.int32))
    assert wrong_blocks(pool, remote, local) == 2
    pool.close()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            ["--patterns", "zigzag"],
            "--patterns cannot be 'zigzag': choose one of run, gather, scattered",
        ),
        (["--block-kib", "0"], "--block-kib cannot be '0': expected a whole number >= 1"),
        (["--reads", "none"], "reads cannot be 'none': expected a whole number"),
        (["--rounds", "3"], "unknown flag --rounds"),
    ],
)
def test_a_wrong_flag_is_one_line(flags: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse(flags)
    assert said in raised.value.message
    assert "\n" not in raised.value.message


def test_the_report_is_written_and_read_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "transfer.json"
    flags = ["--block-kib", "16", "--blocks", "2", "--reads", "3", "--pool-mib", "1"]
    assert main([*flags, "--transports", "shm", "--json", str(file)]) == 0
    report = msgspec.json.decode(file.read_bytes(), type=TransferReport)
    assert report.schema == "baton.tools.transfer/1"
    assert [row.kind.pattern for row in by_way(report, "shm")] == ["run", "gather", "scattered"]
    assert str(tmp_path) not in " ".join(report.provenance.command_line)
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].split()[:5] == ["block", "KiB", "blocks", "pattern", "way"]
    assert len([line for line in printed if " shm " in line]) == 3
