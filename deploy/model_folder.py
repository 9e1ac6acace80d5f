"""Find the model folder that a command means and check it before any process is started.

The command line calls `with_model` for every command that has a model. Without a path, the folder
is that of the demo model that comes with baton. A name such as `Qwen/Qwen3-0.6B` that is no folder
is one of the Hugging Face hub: its files come from the hub's cache, or from the hub where it may be
asked. This module never loads a model.
"""

import os
import re
from pathlib import Path

import msgspec

from baton.deploy.demo_model import CHECKPOINT
from baton.protocol.config import ClusterConfig
from baton.protocol.errors import ConfigError

DEMO_NAME = "demo"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# What baton reads of a repository: not the weights in other formats.
_HUB_FILES = ("*.json", "*.safetensors", "*.jinja")


def with_model(config: ClusterConfig) -> ClusterConfig:
    """Return `config` with an absolute `model.path` that can be read and a `model.name`.

    Raises `ConfigError` for a folder that cannot be served.
    """
    if not config.model.path:
        folder, name = CHECKPOINT, DEMO_NAME
    else:
        folder, name = _folder_of(config.model.path)
        _check(folder)
    model = msgspec.structs.replace(config.model, path=str(folder), name=config.model.name or name)
    return msgspec.structs.replace(config, model=model)


def _folder_of(path: str) -> tuple[Path, str]:
    """Return the folder and what the model is called."""
    folder = Path(path).expanduser().absolute()
    if folder.exists():
        return folder, folder.resolve().name
    if _HUB_NAME.fullmatch(path):
        return _from_hub(path), path
    raise ConfigError(
        f"model {folder} does not exist: name a Hugging Face folder on this host or a model of the "
        "hub (--model Qwen/Qwen3-0.6B), or leave --model out for the demo model"
    )


def _from_hub(name: str) -> Path:
    """Return the folder of the hub's model in the hub's cache, fetched if it is not there."""
    # It takes a quarter of a second to import, which only users of the hub should wait for.
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    hint = f"fetch it with `hf download {name}`, on a host that reaches the hub"
    try:
        return Path(snapshot_download(name, allow_patterns=list(_HUB_FILES)))
    except LocalEntryNotFoundError as error:
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "the hub cannot be reached"
        cache = constants.HF_HUB_CACHE
        raise ConfigError(
            f"model {name} is no folder here, nor in the hub's cache {cache}, and {why}: {hint}"
        ) from error
    except HfHubHTTPError as error:
        raise ConfigError(f"the hub does not give model {name}: {error.server_message}") from error


def _check(folder: Path) -> None:
    config = folder / "config.json"
    if not config.is_file():
        raise ConfigError(f"model {folder} is not a Hugging Face folder: it has no config.json")
    if not os.access(config, os.R_OK):
        raise ConfigError(f"model {folder} cannot be read: {config} is not readable by this user")
