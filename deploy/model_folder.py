"""Which model folder a command means, checked before any process is started.

The command line calls it for every command that has a model. Without a path it is the demo model
that comes with baton. It never loads a model.
"""

import os
from pathlib import Path

import msgspec

from baton.deploy.demo_model import CHECKPOINT
from baton.protocol.config import ClusterConfig
from baton.protocol.errors import ConfigError

DEMO_NAME = "demo"


def with_model(config: ClusterConfig) -> ClusterConfig:
    """`config` with an absolute `model.path` that can be read and a `model.name`.

    Raises `ConfigError`.
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
            f"model {folder} does not exist: name a Hugging Face folder on this host with --model, "
            "or none for the demo model"
        )
    config = folder / "config.json"
    if not config.is_file():
        raise ConfigError(f"model {folder} is no Hugging Face folder: it has no config.json")
    if not os.access(config, os.R_OK):
        raise ConfigError(f"model {folder} cannot be read: {config} is not readable by this user")
