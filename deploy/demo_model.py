"""The demo model that comes with baton, so that it runs without a download.

It has about a million parameters and is trained by `tools/demo_model`; docs/demo-model.md describes
the training text and what the model knows. `serve` uses the model in place; `baton demo-model`
copies it to a folder. This module needs neither torch nor transformers nor a network.
"""

import os
import secrets
import shutil
from pathlib import Path

from baton.protocol.errors import ConfigError

CHECKPOINT = Path(__file__).parent / "demo_checkpoint"
FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)


def write_demo_model(folder: Path) -> None:
    """Write the model to `folder`, all of it or nothing; a demo model already there stays.

    Raises `ConfigError` if `folder` holds something else or cannot be written.
    """
    if (folder / "config.json").is_file():
        return
    # The draft lies beside the target, so that the rename stays inside one file system.
    draft = folder.parent / f".{folder.name}.{os.getpid()}-{secrets.token_hex(4)}"
    try:
        draft.mkdir(parents=True)
        for name in FILES:
            shutil.copyfile(CHECKPOINT / name, draft / name)
        draft.rename(folder)
    except OSError as error:
        # Two processes may start at once; the one that renames second finds the work done.
        if not (folder / "config.json").is_file():
            raise ConfigError(f"cannot write the demo model to {folder}: {error}") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
