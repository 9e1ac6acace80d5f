"""Find the model folder of a command, and check it before any process is started.

Without a path, the folder is that of the demo model that comes with baton (docs/install.md). A
name such as `Qwen/Qwen3-0.6B` that is no folder is one of the Hugging Face hub: its files come from
the hub's cache, or from the hub where it may be asked. A model that baton cannot compute is refused
here, in one line, before anything is loaded.
"""

import os
import re
from pathlib import Path

import msgspec

from baton.model.checkpoint.draft_files import check_drafts
from baton.model.checkpoint.lora_files import folders_of, read_adapters
from baton.model.checkpoint.weight_files import (
    INDEX,
    SINGLE,
    as_stored,
    check_tensors,
    tensors_of,
    weight_files,
)
from baton.model.config.decoder_config import DecoderConfig, read_decoder_config
from baton.model.config.tasks import read_tasks
from baton.model.config.transformers_config import (
    check_for_transformers,
    runs_in_transformers,
)
from baton.protocol.config import ClusterConfig, ModelImpl
from baton.protocol.errors import ConfigError
from baton.router.text.special_tokens import check_tokens, missing_tokenizer
from baton.runtime.fields import with_values
from baton.runtime.log import logger

DEMO_NAME = "demo"
CHECKPOINT = Path(__file__).parent / "demo_checkpoint"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# The files of a repository that baton reads, without weights in other formats.
HUB_FILES = ("*.json", "*.jinja")
HUB_WEIGHTS = "*.safetensors"
# Git leaves a file of some hundred bytes in place of a large file that was not fetched.
_LFS_POINTER = b"version https://git-lfs"

log = logger("model")


def with_model(config: ClusterConfig, *, needs_weights: bool = True) -> ClusterConfig:
    """Return `config` with an absolute, readable `model.path` and a `model.served_model_name`.

    Raises `ConfigError` for a folder that cannot be served. Routers do not need the weights.
    """
    if not config.model.path:
        folder = CHECKPOINT
        name = DEMO_NAME
        decoder: DecoderConfig | None = read_decoder_config(folder)
    else:
        folder, name = _folder_of(config.model.path, needs_weights=needs_weights)
        decoder, is_widened = _checked(folder, config.model.model_impl)
        _check_fetched(folder / "tokenizer.json")
        if needs_weights:
            _check_weights(folder)
            if decoder is not None:
                decoder = as_stored(folder, decoder)
                check_tensors(folder, decoder)
                config = _with_roles(config, folder, decoder)
            if is_widened and config.model.dtype == "auto":
                log.warning(
                    "the weights are float16, in which baton does not compute: they are widened to "
                    "float32 and take twice the memory, unless dtype is bfloat16 (--dtype bfloat16)"
                )
                # The processes that this one starts need not say it again.
                config = with_values(config, {"model.dtype": "float32"})
    if needs_weights:
        check_drafts(folder, decoder, config.engine)
    model = msgspec.structs.replace(
        config.model,
        path=str(folder),
        served_model_name=config.model.served_model_name or name,
        lora_modules=_adapters(config.model.lora_modules, decoder)
        if needs_weights
        else (),
    )
    return msgspec.structs.replace(config, model=model)


def _adapters(
    modules: tuple[str, ...], decoder: DecoderConfig | None
) -> tuple[str, ...]:
    """Return the adapters with absolute folders. Raises `ConfigError` for one that does not fit."""
    read_adapters(modules, decoder)
    return tuple(f"{name}={folder}" for name, folder in folders_of(modules).items())


def _folder_of(path: str, *, needs_weights: bool) -> tuple[Path, str]:
    """Return the folder and the name of the model."""
    folder = Path(path).expanduser().absolute()
    if folder.exists():
        return folder, folder.resolve().name
    if _HUB_NAME.fullmatch(path):
        return _from_hub(path, needs_weights=needs_weights), path
    raise ConfigError(
        f"model {folder} does not exist: name a Hugging Face folder on this host or a model of the "
        "hub (--model Qwen/Qwen3-0.6B), or leave --model out for the demo model"
    )


def _from_hub(name: str, *, needs_weights: bool) -> Path:
    """Return the folder of the hub's model in the hub's cache, fetched if it is not there."""
    # Importing it takes a quarter of a second, for which only users of the hub should wait.
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    hint = f"fetch it with `hf download {name}`, on a host that reaches the hub"
    try:
        patterns = [*HUB_FILES, *([HUB_WEIGHTS] if needs_weights else [])]
        return Path(snapshot_download(name, allow_patterns=patterns))
    except LocalEntryNotFoundError as error:
        why = (
            "HF_HUB_OFFLINE is set"
            if constants.HF_HUB_OFFLINE
            else "the hub cannot be reached"
        )
        cache = constants.HF_HUB_CACHE
        raise ConfigError(
            f"model {name} is not a folder here and not in the hub's cache {cache}, and {why}: "
            f"{hint}"
        ) from error
    except HfHubHTTPError as error:
        raise ConfigError(
            f"the hub does not give model {name}: {error.server_message}"
        ) from error


def _checked(folder: Path, model_impl: ModelImpl) -> tuple[DecoderConfig | None, bool]:
    """Return baton's own decoder, if it is one, and whether the weights are float16."""
    config = folder / "config.json"
    if not config.is_file():
        if folder.suffix == ".gguf" or any(folder.glob("*.gguf")):
            raise ConfigError(
                f"model {folder} is in the GGUF format, which baton does not read: take the "
                "model's Hugging Face folder with config.json and safetensors files"
            )
        raise ConfigError(
            f"model {folder} is not a Hugging Face folder: it has no config.json"
        )
    if not os.access(config, os.R_OK):
        raise ConfigError(
            f"model {folder} cannot be read: {config} is not readable by this user"
        )
    if runs_in_transformers(folder, model_impl):
        return None, check_for_transformers(folder)[1] == "float16"
    decoder = read_decoder_config(folder)
    return decoder, decoder.is_widened


def _with_roles(
    config: ClusterConfig, folder: Path, decoder: DecoderConfig
) -> ClusterConfig:
    """Return `config` with prefill nodes alone for a model that makes no tokens."""
    tasks = read_tasks(folder, decoder, config.model.convert).tasks
    if tasks.generates:
        return config
    return msgspec.structs.replace(config, prefill=max(1, config.prefill), decode=0)


def _check_weights(folder: Path) -> None:
    """Raise `ConfigError` unless every file of the weights exists and is not an LFS pointer."""
    if not any((folder / name).is_file() for name in (SINGLE, INDEX)):
        raise ConfigError(
            f"model {folder} has no {SINGLE}: baton reads weights from safetensors files"
        )
    for file in weight_files(folder):
        _check_fetched(file)
        tensors_of(file)


def check_tokenizer(folder: Path) -> None:
    """Raise `ConfigError` if a folder has no tokenizer.json, or one that lacks tokens."""
    if not (folder / "tokenizer.json").is_file():
        raise missing_tokenizer(folder)
    check_tokens(folder)


def _check_fetched(file: Path) -> None:
    """Raise `ConfigError` if a file cannot be read or is an LFS pointer; it may be missing."""
    if not file.is_file():
        return
    try:
        with file.open("rb") as opened:
            begin = opened.read(len(_LFS_POINTER))
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from error
    if begin == _LFS_POINTER:
        raise ConfigError(
            f"{file} is a Git LFS pointer and not the file itself: run `git lfs pull` in "
            f"{file.parent}"
        )
