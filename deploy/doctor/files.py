"""Check the model and the key of one host, and compute digests with which hosts are compared."""

import hashlib
from pathlib import Path

import msgspec

from baton.deploy.doctor.facts import FileFacts
from baton.deploy.model_folder import with_model
from baton.protocol.config import ClusterConfig, KeysConfig, ModelConfig
from baton.protocol.errors import ConfigError
from baton.runtime.channels.keys import load_keys

DIGEST_BYTES = 6
SAMPLE_BYTES = 1 << 16


def model_facts(model: ModelConfig) -> FileFacts:
    """Return the facts of a model; an empty path means no model."""
    if not model.path:
        return FileFacts()
    try:
        found = with_model(msgspec.structs.replace(ClusterConfig(), model=model)).model
        return FileFacts(found.path, _folder_digest(Path(found.path)))
    except ConfigError as error:
        return FileFacts(model.path, failure=error.message)
    except OSError as error:
        return FileFacts(model.path, failure=f"cannot read the model: {error}")


def key_facts(keys: KeysConfig) -> FileFacts:
    """Return the facts of the cluster's key. Its digest reveals nothing of the key."""
    if not keys.file:
        return FileFacts()
    try:
        first = load_keys(keys).first
    except ConfigError as error:
        return FileFacts(keys.file, failure=error.message)
    assert first is not None, "a file without a key is refused"
    digest = hashlib.blake2b(first.public, digest_size=DIGEST_BYTES)
    return FileFacts(keys.file, digest.hexdigest())


def _folder_digest(folder: Path) -> str:
    """Return a digest of the names, sizes and first bytes of the model files that baton reads.

    It takes milliseconds for a model of any size. Nodes compare more when they join.
    """
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for path in sorted([*folder.glob("*.json"), *folder.glob("*.safetensors")]):
        digest.update(f"\0{path.name} {path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()
