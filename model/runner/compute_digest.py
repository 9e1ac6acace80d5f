"""What decides the bits of a rank's numbers, as a text that nodes compare.

Blocks are shared by nodes with equal texts, and a stream that goes on at such a node gets the
tokens that it would have got. So the text names all that a sum's order rests on: the kernels'
sources, the libraries' versions, the kind of GPU, and the ranks that share a sum.
"""

import functools
import hashlib
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
import torch.nn.functional as F

import baton.kernels.reference
import baton.model.layers.decoder
from baton.model.runner.runner import Runner

SOURCES = {".py", ".cu"}


def is_batch_invariant(runner: Runner) -> bool:
    """Return whether the bits of a token depend on its own sequence alone.

    What adapters add does not change that: its products have one order on every device.
    """
    decoder = runner.decoder
    is_invariant = decoder.is_batch_invariant and runner.backend.is_batch_invariant
    return is_invariant and decoder.ranks.is_batch_invariant


def has_two_orders(runner: Runner) -> bool:
    """Return whether a prompt's tokens have other bits than equal tokens of a response.

    Nobody asks that of a runner whose bits depend on the batch anyway.
    """
    return is_batch_invariant(runner) and runner.backend.has_two_orders


def compute_path(runner: Runner) -> str:
    """Return a text that is equal for ranks of one model that should compute the same bits."""
    digest = hashlib.blake2b(runner.backend.name.encode(), digest_size=6)
    digest.update(runner.decoder.source.encode())
    digest.update(own_sources().encode())
    digest.update(torch.__version__.encode())
    # Each product is a sum of this many parts.
    if (size := runner.decoder.ranks.size) > 1:
        digest.update(str(size).encode())
    # Where the matrices of joined layers begin depends on it.
    if runner.loras is not None and runner.loras.rank:
        digest.update(f"rank {runner.loras.rank}".encode())
    linears = list(runner.decoder.linears())
    if runner.device.type == "cuda":
        has_own_products = all(
            linear.ordered not in (None, F.linear) for linear in linears
        )
        digest.update(gpu_bits(runner.device, has_own_products=has_own_products))
    for part in sorted({linear.digest for linear in linears}):
        digest.update(part)
    return f"{runner.backend.name}-{digest.hexdigest()}"


def gpu_bits(device: torch.device, *, has_own_products: bool) -> bytes:
    """Return what decides a GPU's bits: its capability, and its name where a library multiplies.

    The library chooses among its kernels by the number of multiprocessors, too.
    """
    capability = torch.cuda.get_device_capability(device)
    words = [f"{capability}", _triton_version(), torch.version.cuda or ""]
    if not has_own_products:
        words.append(torch.cuda.get_device_name(device))
    return "\n".join(words).encode()


def _triton_version() -> str:
    try:
        return version("triton")
    except PackageNotFoundError:  # some vendors build it under another name
        return ""


@functools.cache
def own_sources() -> str:
    """Return a digest of the sources of the kernels and of what calls them in a layer."""
    packages = (baton.kernels.reference, baton.model.layers.decoder)
    folders = [Path(package.__file__ or "").parent for package in packages]
    return digest_of(folders)


def digest_of(folders: Iterable[Path]) -> str:
    """Return a digest of the sources in some folders, wherever these are."""
    digest = hashlib.blake2b(digest_size=16)
    for folder in folders:
        for file in sorted(folder.rglob("*")):
            if file.suffix in SOURCES:
                digest.update(f"{file.relative_to(folder)}\n".encode())
                digest.update(file.read_bytes())
    return digest.hexdigest()
