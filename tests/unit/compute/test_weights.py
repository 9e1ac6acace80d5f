"""Tensors are found in any number of files and told apart; random checkpoints are worth using."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.engine.compute.weights import Checkpoint, fingerprint
from baton.protocol.errors import ConfigError
from tests.support.checkpoints import model_folder, write_checkpoint

EMBEDDING = "model.embed_tokens.weight"


@pytest.mark.parametrize("shards", [1, 3])
def test_every_tensor_reads_as_it_was_saved(shards: int) -> None:
    checkpoint = Checkpoint(model_folder("qwen2", shards=shards))
    saved = load_file(model_folder("qwen2") / "model.safetensors")
    assert checkpoint.names() == saved.keys()
    for name, tensor in saved.items():
        assert torch.equal(checkpoint.read(name), tensor)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_part_is_the_part_of_the_whole(dtype: str) -> None:
    checkpoint = Checkpoint(model_folder("llama", dtype=dtype))
    whole = checkpoint.read(EMBEDDING)
    assert whole.dtype == getattr(torch, dtype)
    rows, columns = slice(100, 300), slice(32, 64)
    assert torch.equal(checkpoint.read(EMBEDDING, rows=rows), whole[rows])
    assert torch.equal(checkpoint.read(EMBEDDING, columns=columns), whole[:, columns])
    assert torch.equal(checkpoint.read(EMBEDDING, rows=rows, columns=columns), whole[rows, columns])
    norm = "model.norm.weight"
    assert torch.equal(checkpoint.read(norm, rows=columns), checkpoint.read(norm)[columns])


def test_damaged_folders_are_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"neither model\.safetensors"):
        Checkpoint(tmp_path)
    single = tmp_path / "model.safetensors"
    for content in (b"", b"short", (1 << 60).to_bytes(8, "little"), b"\x02" + bytes(7) + b"[]"):
        single.write_bytes(content)
        with pytest.raises(ConfigError, match="is not a safetensors file"):
            Checkpoint(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text("{}")
    with pytest.raises(ConfigError, match="weight_map"):
        Checkpoint(tmp_path)
    index.write_text(json.dumps({"weight_map": {"a": "model-2.safetensors"}}))
    with pytest.raises(ConfigError, match=r"model-2\.safetensors"):
        Checkpoint(tmp_path)


def test_a_file_that_lost_its_end_is_a_config_error(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m", "llama", num_layers=1)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-5000])
    with pytest.raises(ConfigError, match=r"model\.safetensors"):
        Checkpoint(folder).read(EMBEDDING)
    with pytest.raises(ConfigError, match=r"model\.safetensors"):
        fingerprint(folder, "float32")


def test_equal_models_have_one_fingerprint_however_they_are_stored(tmp_path: Path) -> None:
    one = fingerprint(model_folder("qwen3"), "float32")
    assert fingerprint(model_folder("qwen3", shards=3), "float32") == one
    copy = write_checkpoint(tmp_path / "copy", "qwen3")
    config = json.loads((copy / "config.json").read_text())
    config |= {"transformers_version": "9.9", "_name_or_path": "elsewhere"}
    (copy / "config.json").write_text(json.dumps(config))
    assert fingerprint(copy, "float32") == one


def test_models_of_equal_shape_have_other_fingerprints(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m", "qwen3")
    seen = {fingerprint(folder, "float32"), fingerprint(folder, "bfloat16")}
    seen.add(fingerprint(model_folder("qwen3", seed=1), "float32"))
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.2.mlp.up_proj.weight"] += 1e-3
    save_file(tensors, folder / "model.safetensors")
    seen.add(fingerprint(folder, "float32"))
    config = json.loads((folder / "config.json").read_text()) | {"rope_theta": 20000.0}
    (folder / "config.json").write_text(json.dumps(config))
    seen.add(fingerprint(folder, "float32"))
    assert len(seen) == 5
