"""Where no kernels can be had, plain torch computes the same, and the node says so."""

import sys
from pathlib import Path

import pytest
import torch

from baton.engine.attention.cpu import CpuBackend
from baton.engine.attention.plain import PlainBackend
from tests.support.checkpoints import model_folder
from tests.support.compute import Text, compute_config, loaded, logits, random_tokens


def test_plain_torch_computes_what_the_kernels_compute(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Prompts, chunks and decode steps in one batch, through a window, over garbage."""
    folder = model_folder("mistral", num_layers=2, num_kv_heads=2, sliding_window=140)
    tokens = random_tokens(300)
    texts = [Text("a", tokens, range(19)), Text("b", tokens[:90], range(30, 36))]
    results = []
    for is_plain in (False, True):
        if is_plain:
            monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
            monkeypatch.setitem(sys.modules, "baton.kernels.cpu_compile", None)
        with loaded(compute_config(folder, "float32")) as runner:
            assert isinstance(runner.backend, PlainBackend if is_plain else CpuBackend)
            assert runner.backend.is_batch_invariant is not is_plain
            runner.cache.pool.fill_(float("nan"))
            a, b = texts
            parts = logits(runner, a.chunk(0, 200))
            parts += logits(runner, a.chunk(200, 299), b.chunk(0, 90))
            parts += logits(runner, b.chunk(89, 90), a.chunk(299, 300))
            results.append(torch.cat(parts))
    said = [record for record in caplog.records if "plain torch" in record.getMessage()]
    assert len(said) == 1
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-4)
