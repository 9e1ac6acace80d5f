"""A process that launches the steps of a rank on a GPU, as its backend makes them, without a GPU.

Triton's own binder decides for each call, by types, alignment and the values of its arguments,
which variant of a kernel it takes. Here a driver without a device stands under it, and a hook notes
the variant where Triton would compile. Everything lies on `meta`, where nothing can be read.
`tests/unit/model/test_cuda_backend.py` starts this one. It prints as JSON the variants after the
warm-up, those that 200 random batches add, and what the launches of these batches did.
"""

import json
import random
from collections import Counter
from dataclasses import replace

import msgspec
import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget

from baton.kernels.cuda.fixed_product import fixed_product
from baton.kernels.cuda.grouped_product import grouped_product
from baton.kernels.cuda.sampling import sample_tokens
from baton.kernels.cuda.states.state_proof import StateTrial
from baton.kernels.cuda.token_counts import penalize_counted
from baton.kernels.proofs import LATENT_PREFILL, ONE_ORDER, OVERLAPS, PREFILL
from baton.kernels.state_layout import StateShape, state_layout
from baton.model.config.latent_config import LatentConfig
from baton.model.config.rope_config import Rope
from baton.model.layers.attention import IndexPool, Keys, WideHeads
from baton.model.layers.cuda_backend import CudaBackend
from baton.model.layers.decoder import Decoder
from baton.model.layers.key_index import KeyIndex
from baton.model.layers.latent_attention import LatentAttention
from baton.model.layers.linear import Linear
from baton.model.layers.mlp import DenseMlp, StackedExperts
from baton.model.layers.rotary import rope_table
from baton.model.runner.compute_digest import is_batch_invariant
from baton.model.runner.cuda_start import buckets_up_to, prepare, with_guesses
from baton.model.runner.kv_cache import KVCache
from baton.model.runner.runner import Runner
from baton.model.sampling.device_counts import DeviceCounts
from baton.model.sampling.sampler import Sampler
from baton.node.scheduling.plan import Slice, StepPlan
from baton.protocol.ids import Key, RequestId
from baton.protocol.sampling import Penalties, Sampling
from baton.runtime.clock import monotonic
from tests.support.graph_stand_in import (
    RecordingQueue,
    Watch,
    with_experts,
)
from tools.gpu.drafts import random_head
from tools.gpu.engine import random_decoder
from tools.gpu.floors import Shape

# The heads of Qwen3-8B; what only linear layers see is small.
SHAPE = Shape("thin", 256, 96, 2, 32, 8, 128, 640, is_tied=True)
LATENT = LatentConfig(None, 512, 128, 64, 128, is_interleaved=True)
INDEX_HEADS = 64
INDEX_DIM = 128
NUM_CHOSEN = 2048
STATE = StateShape(2, 8, 4, 128, 128, 2048, 4)
# As Gemma 4's, beside 8 KV heads of 128.
WIDE = WideHeads(kv_heads=2, head_dim=512, num_layers=1, num_before=1)
CHUNK_SIZE = 64
NUM_BLOCKS = 48
BLOCK_SIZE = 16
MAX_LEN = 4096
MAX_SEQS = 64
NUM_DRAFTS = 3
NUM_BATCHES = 200
HOPPER = frozenset({PREFILL, ONE_ORDER, OVERLAPS})


class NoDriver:
    """What the binder asks of a driver."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


class Variants:
    """Notes each variant that Triton would compile, and lets it compile none."""

    def __init__(self) -> None:
        self.found: dict[tuple[str, str], None] = {}

    def note(self, *, key: object, fn: object, **_: object) -> bool:
        self.found[str(getattr(fn, "name", fn)).rpartition(".")[2], str(key)] = None
        return True


def runner(
    queue: RecordingQueue,
    kind: str,
    *,
    is_ordered: bool,
    proven: frozenset[str] = frozenset(),
) -> Runner:
    """Build a rank of a `kind`: dense, latent, sparse, states, kinds, drafts or fp8."""
    is_latent = kind in {"latent", "sparse"}
    is_sparse = kind == "sparse"
    has_states = kind == "states"
    dtype = torch.bfloat16
    device = queue.device
    num_layers = SHAPE.num_layers + (kind == "drafts")
    stored = (SHAPE.num_kv_heads, num_layers, 2, BLOCK_SIZE, SHAPE.head_dim)
    if is_latent:
        stored = (1, SHAPE.num_layers, 1, BLOCK_SIZE, LATENT.row_dim)
    pool = torch.empty((NUM_BLOCKS, *stored), dtype=dtype, device=device)
    if kind == "fp8":
        stored = (*stored[:-1], SHAPE.head_dim + 1)
        pool = torch.empty((NUM_BLOCKS, *stored), dtype=torch.uint8, device=device)
    states = None
    if has_states:
        block_bytes = pool.stride(0) * pool.element_size()
        states = state_layout(STATE, 1, block_bytes, pool.element_size())
    cache = KVCache(pool, np.zeros(NUM_BLOCKS, np.uint32), states)
    rotated = LATENT.qk_rope_head_dim if is_latent else SHAPE.head_dim
    table = rope_table(Rope(1e6), rotated, MAX_LEN)
    keys = torch.empty(
        (NUM_BLOCKS, 1, SHAPE.num_layers, 1, BLOCK_SIZE, INDEX_DIM),
        dtype=dtype,
        device=device,
    )
    index = IndexPool(keys, INDEX_HEADS, NUM_CHOSEN) if is_sparse else None
    backend = CudaBackend(
        cache.pool,
        SHAPE.num_heads,
        [table, rope_table(Rope(1e6), WIDE.head_dim, MAX_LEN)],
        1e-6,
        is_ordered=is_ordered,
        index=index,
        states=states,
        wide=WIDE if kind == "kinds" else None,
        proven=proven,
    )
    decoder = random_decoder(SHAPE, dtype, device)
    if is_ordered:
        decoder = with_ordered_products(decoder)
    if is_latent:
        decoder = with_latent_attention(
            decoder,
            device,
            is_sparse=is_sparse,
            expands=backend.expands_prompts,
        )
    if has_states:
        decoder = with_a_state(decoder, device)
    if kind == "kinds":
        decoder = with_kinds(decoder, device)
    decoder = with_experts(decoder, grouped_product, 16)
    counts = DeviceCounts(MAX_SEQS, SHAPE.vocab_size, device, penalize_counted)
    sampler = Sampler((2,), sample_tokens, counts=counts)
    rank = Runner(decoder, backend, cache, sampler, queue, monotonic)
    if kind == "drafts":
        rank.draft_with(random_head(decoder, feeds_normed=False), NUM_DRAFTS)
    return rank


def with_ordered_products(decoder: Decoder) -> Decoder:
    """As if the library kept the bits of no weight."""

    def ordered(linear: Linear) -> Linear:
        return replace(linear, ordered=fixed_product)

    layers = tuple(
        replace(
            layer,
            qkv=ordered(layer.qkv),
            output=ordered(layer.output),
            mlp=DenseMlp(*map(ordered, layer.mlp.linears())),
        )
        for layer in decoder.layers
    )
    return replace(decoder, layers=layers, head=ordered(decoder.head))


def with_latent_attention(
    decoder: Decoder, device: torch.device, *, is_sparse: bool, expands: bool
) -> Decoder:
    def empty(*sizes: int) -> torch.Tensor:
        return torch.empty(sizes, dtype=torch.bfloat16, device=device)

    heads = SHAPE.num_heads
    rank = LATENT.kv_lora_rank
    queries = heads * LATENT.qk_head_dim
    index_dim = INDEX_DIM if is_sparse else 0
    first = Linear(empty(queries + LATENT.row_dim + index_dim, SHAPE.hidden_size))
    keys = StackedExperts(empty(heads, rank, LATENT.qk_nope_head_dim), grouped_product)
    values = StackedExperts(empty(heads, LATENT.v_head_dim, rank), grouped_product)
    index = KeyIndex(
        number=0,
        num_heads=INDEX_HEADS,
        head_dim=INDEX_DIM,
        queries=Linear(empty(INDEX_HEADS * INDEX_DIM, queries)),
        key_norm=empty(2, INDEX_DIM).float(),
        weights=Linear(empty(INDEX_HEADS, SHAPE.hidden_size).float()),
    )
    width = LATENT.qk_nope_head_dim + LATENT.v_head_dim
    latent = LatentAttention(
        LATENT,
        heads,
        None,
        None,
        empty(rank),
        keys,
        values,
        None,
        Linear(empty(heads * width, rank)) if expands else None,
    )
    kinds = {"qkv": first, "head_norms": None}
    layers = tuple(
        replace(
            layer,
            latent=replace(
                latent, index=replace(index, number=number) if is_sparse else None
            ),
            **kinds,  # type: ignore[arg-type]
        )
        for number, layer in enumerate(decoder.layers)
    )
    return replace(decoder, layers=layers)


def with_a_state(decoder: Decoder, device: torch.device) -> Decoder:
    """The first layer keeps a state."""
    weights = StateTrial(STATE, "delta", 1, "cpu").weights
    gates = weights.gates
    assert gates is not None

    def empty(like: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(like, device=device)

    weights = replace(
        weights,
        taps=empty(weights.taps),
        norm=empty(weights.norm),
        gates=replace(gates, rates=empty(gates.rates), biases=empty(gates.biases)),
    )
    heads = STATE.num_groups * STATE.num_heads
    width = heads * STATE.value_dim
    rows = STATE.num_groups * STATE.num_channels + width + 2 * heads
    sizes = (rows, SHAPE.hidden_size), (SHAPE.hidden_size, width)
    inputs, output = (
        Linear(torch.empty(size, dtype=torch.bfloat16, device=device)) for size in sizes
    )
    first, *others = decoder.layers
    first = replace(first, qkv=inputs, output=output, head_norms=None, state=weights)
    return replace(decoder, layers=(first, *others))


def with_kinds(decoder: Decoder, device: torch.device) -> Decoder:
    """The first layer attends within chunks, and the second has wide heads."""

    def linear(*size: int) -> Linear:
        return Linear(torch.empty(size, dtype=torch.bfloat16, device=device))

    first, second = decoder.layers
    heads = SHAPE.num_heads + 2 * WIDE.kv_heads
    wide = replace(
        second,
        number=0,
        qkv=linear(heads * WIDE.head_dim, SHAPE.hidden_size),
        output=linear(SHAPE.hidden_size, SHAPE.num_heads * WIDE.head_dim),
        head_norms=None,
        keys=Keys(rotation=1, are_wide=True),
    )
    return replace(
        decoder, layers=(replace(first, keys=Keys(chunk_size=CHUNK_SIZE)), wide)
    )


def batch(luck: random.Random, step: int, kind: str, state_blocks: int) -> StepPlan:
    """Return a step of sequences that decode, prompts at any place, or both."""
    slices = slices_of(luck, step, state_blocks)
    if kind == "drafts":
        slices = [drafting(luck, part) for part in slices]
    return StepPlan(step, tuple(slices))


def drafting(luck: random.Random, part: Slice) -> Slice:
    """Let a sequence that decodes have guesses and ask for drafts."""
    is_response = part.start == part.num_prompt_tokens
    if not is_response or not part.start or len(part.samples) != 1:
        return part
    return msgspec.structs.replace(
        part,
        num_guesses=part.length - 1,
        num_drafts=luck.randint(0, NUM_DRAFTS),
        block_table=(*part.block_table, 0),
    )


def slices_of(luck: random.Random, step: int, state_blocks: int) -> list[Slice]:
    num_decoding = luck.choice((0, 1, 1, 2, 5, 16, 33, MAX_SEQS))
    num_guessing = luck.choice((0, 0, 0, 9))
    lengths = [1] * num_decoding
    lengths += [luck.randint(2, 1 + NUM_DRAFTS) for _ in range(num_guessing)]
    num_responses = len(lengths)
    lengths += [luck.randint(2, 90) for _ in range(luck.randint(0, 3))]
    slices = []
    for number, length in enumerate(lengths or [1]):
        start = luck.randint(0, MAX_LEN - length - 1)
        blocks = -(-(start + length) // BLOCK_SIZE)
        sampling = Sampling(
            seed=luck.randint(0, 9),
            max_tokens=9,
            temperature=luck.choice((0.0, 0.7, 1.0)),
            top_k=luck.choice((0, 1, 50)),
            top_p=luck.choice((1.0, 0.9)),
            min_p=luck.choice((0.0, 0.1)),
            min_tokens=luck.choice((0, 4)),
            stop_token_ids=tuple(range(3, 3 + luck.randint(0, 5))),
            penalties=luck.choice((None, Penalties(repetition=1.1, bias=((7, 1.0),)))),
        )
        samples = luck.choice(((0,), (0,), (0, 1, 2), ())) if length > 1 else (0,)
        slices.append(
            Slice(
                Key(RequestId(f"{step}-{number}")),
                start,
                length,
                tuple(luck.randint(0, 639) for _ in range(length)),
                tuple(luck.randrange(NUM_BLOCKS) for _ in range(blocks)),
                samples,
                sampling if samples else None,
                start if number < num_responses else start + length,
                past=(5, 5) if samples else None,
                state=tuple(luck.randrange(NUM_BLOCKS) for _ in range(state_blocks)),
            )
        )
    return slices


def steps_of(
    kind: str = "dense",
    *,
    is_ordered: bool = False,
    with_graphs: bool = False,
    proven: frozenset[str] = frozenset(),
) -> dict[str, object]:
    """Warm a rank up, launch random batches, and return what was seen."""
    variants = Variants()
    triton.knobs.runtime.jit_cache_hook = variants.note
    queue = RecordingQueue("meta")
    rank = runner(queue, kind, is_ordered=is_ordered, proven=proven)
    states = rank.cache.states
    state_blocks = 0 if states is None else states.num_blocks
    buckets = buckets_up_to(MAX_SEQS, 2048) if with_graphs else ()
    if kind == "drafts":
        buckets = with_guesses(buckets, NUM_DRAFTS, has_head=True)
    prepare(rank, buckets, lambda *_: None)
    while rank.has_uncaptured:  # a capture copies inputs of its own
        rank.capture_next()
    after_warm_up = set(variants.found)
    luck = random.Random(0)
    copies = set()
    replayed = set()
    converted = set()
    for step in range(NUM_BATCHES):
        before = queue.num_replays
        with Watch() as watch:
            rank.launch(batch(luck, step, kind, state_blocks))
        rank.collect()
        copies.add(watch.num_copies_to_device)
        converted.update({"to", "_to_copy"} & set(watch.names))
        if queue.num_replays > before:
            replayed.update(watch.names)
    return {
        "warm_up": Counter(name for name, _ in after_warm_up),
        "added": sorted(set(variants.found) - after_warm_up),
        "copies": sorted(copies),
        "num_replays": queue.num_replays,
        "replayed": sorted(replayed),
        "converted": sorted(converted),
        "is_batch_invariant": is_batch_invariant(rank),
    }


def main() -> None:
    torch.set_num_threads(1)
    triton.runtime.driver.set_active(NoDriver())
    said = {
        # A capture would compile what it takes, so only without graphs has the warm-up to be whole.
        "eager": steps_of(),
        "ordered": steps_of(is_ordered=True),
        "latent": steps_of("latent"),
        "latent expanded": steps_of("latent", proven=frozenset({LATENT_PREFILL})),
        "sparse": steps_of("sparse"),
        "states": steps_of("states"),
        "kinds": steps_of("kinds"),
        "hopper": steps_of(proven=HOPPER),
        "hopper ordered": steps_of(is_ordered=True, proven=HOPPER),
        "hopper fp8": steps_of("fp8", is_ordered=True, proven=HOPPER),
        "drafts": steps_of("drafts"),
        "hopper drafts": steps_of("drafts", proven=HOPPER),
        "drafts graphs": steps_of("drafts", with_graphs=True),
        "graphs": steps_of(with_graphs=True),
        "kinds graphs": steps_of("kinds", with_graphs=True),
        "latent graphs": steps_of("latent", with_graphs=True),
        "states graphs": steps_of("states", with_graphs=True),
        "sparse graphs": steps_of("sparse", with_graphs=True),
    }
    print(json.dumps(said))


if __name__ == "__main__":
    main()
