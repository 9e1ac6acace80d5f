"""Where no kernels can be had, plain torch computes the same, and the node says so."""

import sys
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from baton.model.layers.attention import PlainBackend
from baton.model.layers.cpu_backend import CpuBackend
from baton.node.scheduling.plan import StepPlan
from baton.protocol.config import ClusterConfig, KernelChoice
from baton.protocol.errors import ConfigError
from baton.protocol.sampling import Sampling
from tests.support.checkpoints import model_folder
from tests.support.compute import Text, compute_config, loaded, logits, random_tokens

NOISY = Sampling(seed=3, max_tokens=99, temperature=2.0, top_p=0.99)


def without_compiler(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setitem(sys.modules, "baton.kernels.cpu.compile", None)


def with_kernels(config: ClusterConfig, wanted: KernelChoice) -> ClusterConfig:
    return replace(config, engine=replace(config.engine, kernels=wanted))


@pytest.mark.parametrize("wanted", ["torch", "auto"])
def test_plain_torch_computes_what_the_kernels_compute(
    monkeypatch, tmp_path, caplog, wanted
):
    """Prompts, chunks and decode steps in one batch, through a window, over garbage."""
    folder = model_folder("mistral", num_layers=2, num_kv_heads=2, sliding_window=140)
    config = compute_config(folder, "float32")
    tokens = random_tokens(300)
    texts = [Text("a", tokens, range(19)), Text("b", tokens[:90], range(30, 36))]
    results = []
    drawn = []
    for is_plain in (False, True):
        if is_plain and wanted == "auto":
            without_compiler(monkeypatch, tmp_path)
        with loaded(with_kernels(config, wanted if is_plain else "compiled")) as runner:
            assert isinstance(runner.backend, PlainBackend if is_plain else CpuBackend)
            assert runner.backend.is_batch_invariant is not is_plain
            runner.cache.pool.fill_(float("nan"))
            a, b = texts
            parts = logits(runner, a.chunk(0, 200))
            parts += logits(runner, a.chunk(200, 299), b.chunk(0, 90))
            parts += logits(runner, b.chunk(89, 90), a.chunk(299, 300))
            results.append(torch.cat(parts))
            chunk = replace(
                a.chunk(299, 300, sample=True), sampling=NOISY, samples=tuple(range(40))
            )
            drawn.append(runner.execute(StepPlan(1, (chunk,))).tokens)
    said = [record for record in caplog.records if "plain torch" in record.getMessage()]
    assert len(said) == (wanted == "auto")
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-4)
    assert drawn[1] == drawn[0]
    assert len(set(drawn[0][0])) > 20


def test_kernels_that_are_wanted_and_cannot_be_had_are_an_error(monkeypatch, tmp_path):
    without_compiler(monkeypatch, tmp_path)
    config = with_kernels(
        compute_config(model_folder("qwen3", num_layers=2)), "compiled"
    )
    with pytest.raises(ConfigError, match="numba cannot compile"), loaded(config):
        pass
