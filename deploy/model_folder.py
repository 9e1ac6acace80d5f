"""Which model folder a command means, checked before any process is started.

The command line calls it for every command that has a model. Without a path it is the demo model,
written once per version into the user's cache. It never loads a model.
"""

import hashlib
import os
import tempfile
from pathlib import Path

import msgspec

from baton.protocol.config import ClusterConfig
from baton.protocol.errors import ConfigError

DEMO_NAME = "demo"


def with_model(config: ClusterConfig) -> ClusterConfig:
    """`config` with an absolute `model.path` that can be read and a `model.name`.

    Raises `ConfigError`.
    """
    if not config.model.path:
        folder, name = _demo_folder(), DEMO_NAME
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


def _demo_folder() -> Path:
    from baton.deploy import demo_model

    # Named after the code that makes it: a newer baton makes a folder of its own.
    version = hashlib.sha256(Path(demo_model.__file__).read_bytes()).hexdigest()[:8]
    folder = _cache() / f"demo-{version}"
    demo_model.write_demo_model(folder)
    return folder


def _cache() -> Path:
    """The user's cache folder, or one in the temporary folder where that cannot be written."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = root / "baton"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        folder = Path(tempfile.gettempdir()) / f"baton-cache-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        # Somebody else's folder under that name could hold somebody else's model.
        if folder.stat().st_uid != os.getuid():
            raise ConfigError(f"{folder} belongs to another user: set XDG_CACHE_HOME") from None
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"cannot write to {folder}: set XDG_CACHE_HOME")
    return folder
