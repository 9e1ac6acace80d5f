"""Which model a command means, and what `serve` says about itself."""

import ast
import json
import os
import shlex
import shutil
from pathlib import Path

import pytest
from huggingface_hub import constants

from baton.deploy.model_folder import CHECKPOINT, check_tokenizer, with_model
from baton.deploy.serve import greeting
from baton.protocol.config import ClusterConfig, EngineConfig, ModelConfig
from baton.protocol.errors import ConfigError
from tests.support.pooling_folders import embedding_folder


def model_of(path: str, name: str = "") -> ModelConfig:
    return with_model(
        ClusterConfig(model=ModelConfig(path=path, served_model_name=name))
    ).model


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "tiny-model"
    write_model(made)
    return made


def write_model(folder: Path) -> None:
    folder.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(CHECKPOINT / name, folder / name)


def test_a_model_is_called_like_its_folder(folder):
    assert model_of(str(folder)) == ModelConfig(
        path=str(folder), served_model_name="tiny-model"
    )


def test_a_model_that_makes_no_tokens_gets_prefill_nodes_alone():
    folder = embedding_folder("llama", num_layers=1)
    for prefill in (0, 3):
        given = ClusterConfig(
            model=ModelConfig(path=str(folder)), prefill=prefill, decode=2
        )
        found = with_model(given)
        assert (found.prefill, found.decode) == (max(1, prefill), 0)
    with pytest.raises(ConfigError, match="makes no tokens"):
        with_model(ClusterConfig(model=ModelConfig(path=str(folder), convert="none")))


def test_drafts_that_a_model_cannot_have_are_refused_before_anything_starts(tmp_path):
    for path in ("", str(CHECKPOINT)):
        model = ModelConfig(path=path)
        for method, why in (
            ("mtp", "no layer that baton can draft with"),
            ("eagle3", "config.json"),
        ):
            engine = EngineConfig(
                num_speculative_tokens=2,
                speculative_method=method,
                speculative_model=str(tmp_path),
            )
            with pytest.raises(ConfigError, match=why):
                with_model(ClusterConfig(model=model, engine=engine))
            with_model(ClusterConfig(model=model, engine=engine), needs_weights=False)


def test_what_is_no_model_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        model_of(str(tmp_path / "gone"))
    with pytest.raises(ConfigError, match=r"no config\.json"):
        model_of(str(tmp_path))
    (tmp_path / "small.Q4_K_M.gguf").touch()
    for path in (tmp_path, tmp_path / "small.Q4_K_M.gguf"):
        with pytest.raises(ConfigError, match="GGUF"):
            model_of(str(path))


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_float16_weights_are_said_to_be_widened(folder, dtype, caplog):
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_bytes()), "dtype": "float16"}))
    found = with_model(ClusterConfig(model=ModelConfig(path=str(folder), dtype=dtype)))
    with_model(found)  # as a process that this one starts
    assert caplog.text.count("widened to float32") == (dtype == "auto")
    assert found.model.dtype == ("float32" if dtype == "auto" else dtype)


def test_files_that_are_not_there_are_refused_and_a_router_needs_no_weights(
    folder, tmp_path
):
    weights = folder / "model.safetensors"
    for file in (folder / "tokenizer.json", weights):
        whole = file.read_bytes() if file.is_file() else b""
        file.write_bytes(
            b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
        )
        with pytest.raises(
            ConfigError, match=rf"{file.name} is a Git LFS pointer.*git lfs pull"
        ):
            model_of(str(folder))
        file.write_bytes(whole)
    shutil.copyfile(CHECKPOINT / weights.name, weights)
    os.truncate(weights, weights.stat().st_size - 1)
    with pytest.raises(
        ConfigError, match=r"ends before tensor .* does: fetch the file again"
    ):
        model_of(str(folder))
    weights.unlink()
    with pytest.raises(ConfigError, match=r"model\.safetensors"):
        model_of(str(folder))
    index = folder / "model.safetensors.index.json"
    index.write_text(
        json.dumps({"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}})
    )
    (folder / "1.safetensors").touch()
    with pytest.raises(ConfigError, match=r"names 2\.safetensors, which"):
        model_of(str(folder))
    index.write_text("[]")
    with pytest.raises(ConfigError, match=r"index\.json: Expected `object`"):
        model_of(str(folder))
    config = ClusterConfig(model=ModelConfig(path=str(folder)))
    assert (
        with_model(config, needs_weights=False).model.served_model_name == "tiny-model"
    )
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        check_tokenizer(tmp_path)
    check_tokenizer(CHECKPOINT)


def test_a_model_of_the_hub_is_taken_from_its_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        ConfigError, match=r"HF_HUB_OFFLINE is set: fetch it with `hf download"
    ):
        model_of("some/model")
    repository = tmp_path / "models--some--model"
    snapshot = repository / "snapshots" / ("0" * 40)
    write_model(snapshot)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(snapshot.name)
    assert model_of("some/model") == ModelConfig(
        path=str(snapshot), served_model_name="some/model"
    )


@pytest.mark.parametrize("wants_key", [False, True])
def test_the_greeting_survives_a_strange_model_name(wants_key):
    text = greeting("http://127.0.0.1:8000", 'it\'s a "model"', wants_key=wants_key)
    lines = text.splitlines()
    (curl,) = [line for line in lines if line.startswith("curl ")]
    words = shlex.split(curl)
    assert ("Authorization: Bearer YOUR_KEY" in words) == wants_key
    assert ('api_key="YOUR_KEY"' in text) == wants_key
    assert json.loads(words[words.index("-d") + 1])["model"] == 'it\'s a "model"'
    start = next(i for i, line in enumerate(lines) if line.startswith("from openai"))
    ast.parse("\n".join(lines[start:]))
