"""`python -m tools.transfer` with real readers and a real owner, small enough to take no time."""

import msgspec
import pytest

from baton.kv_transfer.transports.nixl_binding import is_installed
from tools.transfer import Plan, TransferReport, main, transfer

SMALL = Plan(block_kib=(16, 64), blocks=(1, 8, 17), reads=5, pool_mib=2, max_read_mib=1)


def test_shm_and_memcpy_take_turns_over_every_kind_of_read_that_fits():
    report = transfer(SMALL)
    for way in ("memcpy", "shm"):
        rows = [row for row in report.rows if row.way == way]
        kinds = [(row.kind.block_bytes >> 10, row.kind.num_blocks) for row in rows]
        # Several blocks are read in three patterns; 17 blocks of 64 KiB are larger than 1 MiB.
        assert kinds == [
            (16, 1),
            *[(16, 8)] * 3,
            *[(16, 17)] * 3,
            (64, 1),
            *[(64, 8)] * 3,
        ]
        for row in rows:
            assert row.num_reads == 5
            assert 0 < row.p50_ms <= row.p99_ms
            expected = row.kind.read_bytes / row.p50_ms / 1e6
            # It is rounded.
            assert row.gb_per_s == pytest.approx(expected, rel=0.05, abs=0.001)
            assert row.of_memcpy == 1 if way == "memcpy" else row.of_memcpy > 0


@pytest.mark.skipif(not is_installed(), reason="the NIXL wheel is not installed")
def test_nixl_takes_turns_with_raw_nixl():
    report = transfer(
        Plan(
            block_kib=(64,),
            blocks=(4,),
            patterns=("gather",),
            transports=("shm", "nixl"),
            reads=1,
            pool_mib=2,
        )
    )
    assert {row.way for row in report.rows} == {"memcpy", "shm", "nixl", "raw_nixl"}


def test_the_report_is_written_and_read_back(tmp_path, capsys):
    file = tmp_path / "transfer.json"
    flags = ["--block-kib", "16", "--blocks", "2", "--reads", "3", "--pool-mib", "1"]
    assert main([*flags, "--transports", "shm", "--json", str(file)]) == 0
    report = msgspec.json.decode(file.read_bytes(), type=TransferReport)
    patterns = [row.kind.pattern for row in report.rows if row.way == "shm"]
    assert patterns == ["run", "gather", "scattered"]
    assert (
        len([line for line in capsys.readouterr().out.splitlines() if " shm " in line])
        == 3
    )
