"""The executor of one rank: what it says at its start, and which settings it refuses."""

import dataclasses

import msgspec
import pytest

from baton.engine.compute.linear import Linear
from baton.engine.compute.local_executor import InProcessExecutor
from baton.engine.compute.rank import compute_path, is_batch_invariant, plan_rank
from baton.kernels import cpu_library
from baton.kernels.cpu_library import has_bf16_products
from baton.protocol.config import CacheConfig, ClusterConfig, ModelConfig
from baton.protocol.errors import ConfigError
from baton.protocol.ids import Epoch
from tests.support.checkpoints import model_folder
from tests.support.compute import compute_config, loaded, no_progress


@pytest.fixture
def config() -> ClusterConfig:
    return compute_config(model_folder("qwen3", num_layers=2), num_blocks=32)


def test_a_node_says_how_it_computes(
    config: ClusterConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal for equal loads, and another for other products; true only if all parts keep bits."""
    with loaded(config) as one, loaded(config) as again:
        linears_keep = all(linear.is_batch_invariant for linear in one.decoder.linears())
        assert is_batch_invariant(one) == (linears_keep and one.backend.is_batch_invariant)
        assert compute_path(one) == compute_path(again)
        assert compute_path(one).startswith(f"{one.backend.name}-")
        layer = one.decoder.layers[1]
        unruled = dataclasses.replace(layer, down=Linear(layer.down.weight))
        one.decoder = dataclasses.replace(one.decoder, layers=(one.decoder.layers[0], unruled))
        assert not is_batch_invariant(one)
    other = compute_config(model_folder("qwen3", num_layers=2), "bfloat16", num_blocks=32)
    with loaded(config) as one, loaded(other) as lower:
        assert compute_path(one) != compute_path(lower)
    is_newer = has_bf16_products()
    monkeypatch.setattr(cpu_library, "has_bf16_products", lambda: False)
    with loaded(other) as older:
        assert (compute_path(older) != compute_path(lower)) == is_newer
        assert is_batch_invariant(older) == all(
            linear.is_batch_invariant for linear in older.decoder.linears()
        )


def test_blocks_come_from_memory_when_they_are_not_counted(config: ClusterConfig) -> None:
    config = msgspec.structs.replace(config, cache=CacheConfig(memory_mib=1))
    plan = plan_rank(config, 1)
    assert plan.num_blocks == (1 << 20) // plan.layout.block_bytes
    assert plan_rank(config, 2).num_blocks == plan.num_blocks


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": ModelConfig()}, "model.path"),
        ({"model": ModelConfig(path="/nowhere")}, "is not a folder"),
        ({"cache": CacheConfig(memory_mib=1, block_size=4096)}, "cache.memory_mib"),
    ],
)
def test_settings_that_cannot_work_are_refused(
    config: ClusterConfig, settings: dict[str, object], message: str
) -> None:
    executor = InProcessExecutor(msgspec.structs.replace(config, **settings), Epoch("epoch"))
    with pytest.raises(ConfigError, match=message):
        executor.start(no_progress)
    executor.close()
