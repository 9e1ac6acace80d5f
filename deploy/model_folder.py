"""Find the model folder that a command means and check it before any process is started.

The command line calls `with_model` for every command that has a model. Without a path, the folder
is that of the demo model that comes with baton. This module never loads a model.
"""

import os
from pathlib import Path

import msgspec

from baton.deploy.demo_model import CHECKPOINT
from baton.protocol.config import ClusterConfig
from baton.protocol.errors import ConfigError

DEMO_NAME = "demo"


def with_model(config: ClusterConfig) -> ClusterConfig:
    """Return `config` with an absolute `model.path` that can be read and a `model.name`.

    Raises `ConfigError` for a folder that cannot be served.
    """
    if not config.model.path:
        folder, name = CHECKPOINT, DEMO_NAME
    else:
        folder = Path(config.model.path).expanduser().absolute()
        name = folder.resolve().name
        _check(folder)
    model = msgspec.structs.replace(config.model, path=str(folder), name=config.model.name or name)
    return msgspec.structs.replace(config, model=model)


def _check(folder: Path) -> None:
    if not folder.exists():
        raise ConfigError(
            f"model {folder} does not exist: name a Hugging Face folder on this host, or leave the "
            "model out for the demo model"
        )
    config = folder / "config.json"
    if not config.is_file():
        raise ConfigError(f"model {folder} is not a Hugging Face folder: it has no config.json")
    if not os.access(config, os.R_OK):
        raise ConfigError(f"model {folder} cannot be read: {config} is not readable by this user")
