"""Prove kernels on a GPU before a step rests on them: `python -m baton.kernels.proofs`.

A kernel that may be wrong, hang or not compile on a GPU that it has not run on is a row of
`CANDIDATES`, whose module says what it cannot compute, and compares what it computes with a
reference and with itself. This process runs the comparisons, so that whoever started it can end it.
Its arguments are a `ProofRequest` and the descriptor to which it writes a `Proof` per line.
"""

import importlib
import os
import sys
from collections.abc import Sequence
from typing import NamedTuple, Protocol, cast

import msgspec

from baton.kernels.state_layout import StateShape
from baton.runtime.process import die_with_parent

FP8_POOL = "uint8"


class NarrowExperts(msgspec.Struct, frozen=True):
    """The experts of a layer whose codes may be kept, as they are on one rank."""

    num_experts: int
    linears: tuple[tuple[int, int], ...]  # outputs and inputs of each kind of layer
    codes: str  # as `ModelShapes.narrow`
    group: int


class LatentDims(NamedTuple):
    """The sizes of latent attention, with the names of config.json."""

    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int


class ModelShapes(msgspec.Struct, frozen=True):
    """What of a model decides which kernels can compute it. All numbers are those of one rank."""

    linears: tuple[tuple[int, int], ...]  # outputs and inputs of each kind of layer
    num_heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    dtype: str = "bfloat16"
    pool_dtype: str = "bfloat16"  # or `FP8_POOL`
    scale: float = 0.0
    softcap: float = 0.0
    windows: tuple[int, ...] = ()
    has_sinks: bool = False
    is_latent: bool = False
    latent: LatentDims | None = None  # of latent attention to all keys
    narrow: str = ""  # int4, int8, fp4 or fp8: what layers may keep
    narrow_group: int = 0  # inputs that share a scale; 0: all
    narrow_experts: NarrowExperts | None = None
    max_model_len: int = 0
    state: StateShape | None = None  # of each layer that keeps one
    state_kind: str = ""  # as `StateLayers` has it


class Proof(msgspec.Struct, frozen=True):
    """What came of one candidate. An empty `problem` says that it is proven."""

    name: str
    problem: str = ""


class Candidate(msgspec.Struct, frozen=True):
    """Kernels that are used where they are proven. `name` is shown, and enters the digest."""

    name: str
    module: str


class ProofRequest(msgspec.Struct, frozen=True):
    shapes: ModelShapes
    device: str
    candidates: tuple[Candidate, ...]


class ProvableKernels(Protocol):
    """The functions that a candidate's module has."""

    def missing_for(self, shapes: ModelShapes, capability: tuple[int, int]) -> str:
        """Return why these kernels cannot compute such a model; empty if they can."""
        ...

    def prove(self, shapes: ModelShapes, device: str) -> str:
        """Return the first fault that running them shows; empty if there is none."""
        ...


# Products whose bits do not depend on the number of rows, at the library's speed.
PRODUCTS = "hopper-products"
# Attention of prompts on warpgroups.
PREFILL = "hopper-prefill"
# Attention of prompts and of decode steps in one order of sums.
ONE_ORDER = "hopper-one-order"
# Latent attention of prompts to expanded keys and values.
LATENT_PREFILL = "hopper-latent-prefill"
# Products with weights of four and eight bits.
NARROW = "hopper-narrow-products"
# The same of experts.
NARROW_EXPERTS = "hopper-narrow-experts"
# Small kernels that start while the one before them ends; they compute what they compute otherwise.
OVERLAPS = "overlapped-launches"
# Layers that keep a state for each sequence; nothing takes their place.
STATES = "states"

CANDIDATES = (
    Candidate(PRODUCTS, "baton.kernels.hopper.products.product_proof"),
    Candidate(PREFILL, "baton.kernels.hopper.attention.prefill_proof"),
    Candidate(ONE_ORDER, "baton.kernels.hopper.attention.one_order_proof"),
    Candidate(LATENT_PREFILL, "baton.kernels.hopper.attention.latent_proof"),
    Candidate(NARROW, "baton.kernels.hopper.narrow.narrow_proof"),
    Candidate(NARROW_EXPERTS, "baton.kernels.hopper.narrow.expert_proof"),
    Candidate(OVERLAPS, "baton.kernels.hopper.overlap_proof"),
    Candidate(STATES, "baton.kernels.cuda.states.state_proof"),
)


def kernels_of(candidate: Candidate) -> ProvableKernels:
    return cast(ProvableKernels, importlib.import_module(candidate.module))


def possible(
    shapes: ModelShapes,
    capability: tuple[int, int],
    candidates: Sequence[Candidate] = CANDIDATES,
) -> tuple[Candidate, ...]:
    """Return the candidates that could compute such a model on such a GPU."""
    return tuple(
        candidate
        for candidate in candidates
        if not kernels_of(candidate).missing_for(shapes, capability)
    )


def prove(request: ProofRequest, candidate: Candidate) -> Proof:
    try:
        problem = kernels_of(candidate).prove(request.shapes, request.device)
    except Exception as error:  # noqa: BLE001  (a compiler and a driver can raise anything)
        problem = f"{error!r}"
    return Proof(candidate.name, " ".join(problem.split()))


def main() -> None:
    die_with_parent()
    request = msgspec.json.decode(sys.argv[1], type=ProofRequest)
    descriptor = int(sys.argv[2])
    for candidate in request.candidates:
        os.write(descriptor, msgspec.json.encode(prove(request, candidate)) + b"\n")


if __name__ == "__main__":
    main()
