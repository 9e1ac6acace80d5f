"""Where a rank computes, and what it says when that is not the GPU."""

import msgspec
import pytest
import torch

from baton.engine import cuda_start, rank
from baton.engine.rank import plan_rank
from baton.kv_transfer.interfaces import PoolMemory
from baton.kv_transfer.transports import choice
from baton.kv_transfer.transports.choice import make_transports, reaches_of
from baton.protocol.config import CacheConfig, ClusterConfig, TransferConfig
from baton.protocol.errors import ConfigError, NodeError
from baton.protocol.ids import Epoch
from baton.protocol.messages import RankAddress
from tests.support.checkpoints import model_folder
from tests.support.compute import compute_config


def config_for(device: str, **model: int) -> ClusterConfig:
    config = compute_config(model_folder("qwen3", num_layers=1, **model))  # type: ignore[arg-type]
    engine = msgspec.structs.replace(config.engine, device=device)
    return msgspec.structs.replace(config, engine=engine, cache=CacheConfig())


@pytest.fixture
def with_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this machine look as if it had one GPU that works."""
    monkeypatch.setattr(rank, "num_gpus", lambda: 1)
    monkeypatch.setattr(rank, "why_no_gpu", lambda: "")


@pytest.mark.usefixtures("with_gpu")
def test_a_gpu_takes_longer_steps_and_its_pool_is_sized_later() -> None:
    plan = plan_rank(config_for("auto"), 1)
    assert plan.device == torch.device("cuda", 0)
    assert (plan.chunk_tokens, plan.max_num_seqs, plan.num_blocks) == (2048, 256, 0)
    on_cpu = plan_rank(config_for("cpu"), 1)
    assert (on_cpu.chunk_tokens, on_cpu.max_num_seqs) == (512, 64)


@pytest.mark.usefixtures("with_gpu")
@pytest.mark.parametrize(
    ("num_ranks", "model", "reason"),
    [(2, {}, "several ranks"), (1, {"head_dim": 48, "num_heads": 2}, "heads of 48")],
)
def test_what_gpus_lack_runs_on_the_cpu_and_says_why(
    num_ranks: int, model: dict[str, int], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert plan_rank(config_for("auto", **model), num_ranks).device.type == "cpu"
    (said,) = caplog.records
    assert reason in said.fields["reason"]  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=rf"engine\.device: .*{reason}"):
        plan_rank(config_for("cuda", **model), num_ranks)


def test_a_gpu_that_cannot_be_used_is_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def old_driver() -> None:
        raise RuntimeError(
            "The NVIDIA driver on your system is too old (found version 11040).\nMore"
        )

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", old_driver)
    monkeypatch.setattr(rank, "num_gpus", lambda: 1)
    monkeypatch.setattr(cuda_start, "num_gpus", lambda: 1)
    assert plan_rank(config_for("auto"), 1).device.type == "cpu"
    assert len(caplog.records) == 1
    with pytest.raises(ConfigError, match=r"nvidia-smi: The NVIDIA driver .* too old") as raised:
        plan_rank(config_for("cuda"), 1)
    assert "\n" not in raised.value.message


def test_memory_that_runs_out_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    gib = 1 << 30
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (gib, 80 * gib))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _device: 9 * gib)
    device = torch.device("cuda", 0)
    with (
        pytest.raises(NodeError, match=r"1\.0 of 80\.0 GiB are free and this node has 9\.0"),
        cuda_start.one_line_errors(device, "at the start"),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def test_without_nixl_a_gpu_serves_alone_and_a_split_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(choice, "is_installed", lambda: False)
    pool = PoolMemory(0, 4, 4096, "cuda:0")
    assert make_transports(pool, Epoch("e"), TransferConfig()) == []
    assert "pip install -e '.[nixl]'" in caplog.text
    one = reaches_of([RankAddress({})], TransferConfig())
    monkeypatch.setattr(choice.os, "getpid", lambda: 1)
    assert not set(one) & set(reaches_of([RankAddress({})], TransferConfig()))
    assert one, "an empty text would mean that any pair may try"


def test_a_pool_without_a_setting_takes_a_share_of_free_memory_and_no_more_than_is_of_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def blocks(available: int, shared_by: int = 1) -> int:
        monkeypatch.setattr("baton.engine.kv_cache.available_bytes", lambda: available)
        config = config_for("cpu")
        cache = CacheConfig(shared_by=shared_by)
        return plan_rank(msgspec.structs.replace(config, cache=cache), 1).num_blocks

    block_bytes = plan_rank(config_for("cpu"), 1).layout.block_bytes
    assert blocks(400 * block_bytes) == 100
    assert blocks(400 * block_bytes, shared_by=2) == 50
    assert blocks(1 << 50) == 64 * 8192 // 16
    with pytest.raises(ConfigError, match=r"raise cache\.memory_mib or free memory"):
        blocks(2 * block_bytes)
