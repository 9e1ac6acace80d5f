"""Which model a command means, and what `serve` says about itself."""

import ast
import json
import shlex
from pathlib import Path

import pytest
from huggingface_hub import constants

from baton.deploy.demo_model import CHECKPOINT
from baton.deploy.model_folder import with_model
from baton.deploy.serve import greeting
from baton.protocol.config import ClusterConfig, ModelConfig
from baton.protocol.errors import ConfigError


def model_of(path: str, name: str = "") -> ModelConfig:
    return with_model(ClusterConfig(model=ModelConfig(path=path, name=name))).model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "tiny-model"
    made.mkdir()
    (made / "config.json").write_text("{}")
    return made


def test_a_model_is_called_like_its_folder(folder: Path) -> None:
    assert model_of(str(folder)) == ModelConfig(path=str(folder), name="tiny-model")
    assert model_of(f"{folder}/") == ModelConfig(path=str(folder), name="tiny-model")


def test_a_name_of_ones_own_stays(folder: Path) -> None:
    assert model_of(str(folder), "mine").name == "mine"


def test_a_relative_path_becomes_absolute(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Children may run elsewhere."""
    monkeypatch.chdir(folder.parent)
    assert model_of("tiny-model").path == str(folder)


def test_a_home_folder_is_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder.parent))
    assert model_of("~/tiny-model").path == str(folder)


def test_no_model_means_the_one_that_comes_with_baton() -> None:
    assert model_of("") == ModelConfig(path=str(CHECKPOINT), name="demo")
    assert (CHECKPOINT / "config.json").is_file()


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        model_of(str(tmp_path / "gone"))
    with pytest.raises(ConfigError, match=r"no config\.json"):
        model_of(str(tmp_path))


def test_a_model_of_the_hub_is_taken_from_its_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=r"HF_HUB_OFFLINE is set: fetch it with `hf download"):
        model_of("some/model")
    repository = tmp_path / "models--some--model"
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(snapshot.name)
    assert model_of("some/model") == ModelConfig(path=str(snapshot), name="some/model")


def test_the_greeting_survives_a_strange_model_name() -> None:
    lines = greeting("http://127.0.0.1:8000", 'it\'s a "model"').splitlines()
    (curl,) = [line for line in lines if line.startswith("curl ")]
    words = shlex.split(curl)
    assert json.loads(words[words.index("-d") + 1])["model"] == 'it\'s a "model"'
    start = next(i for i, line in enumerate(lines) if line.startswith("from openai"))
    ast.parse("\n".join(lines[start:]))
