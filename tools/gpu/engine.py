"""Measure steps of whole models in baton's own runner, with random weights made on the GPU.

This is a section of the GPU benchmark. Shapes are those of published models; the values do not
matter. A decode step is measured three times: launched operation by operation, replayed, and as it
is served, by the real scheduler with the next step launched before this one is collected
(`serving`). A step's time is the one that the runner reports: packing on the host, the decoder,
sampling and the wait for the device.
"""

from collections.abc import Sequence
from functools import partial
from itertools import groupby

import torch
from torch import Tensor

from baton.kernels.proofs import PRODUCTS, ModelShapes, possible
from baton.model.config.rope_config import Rope
from baton.model.layers.attention import Scoring
from baton.model.layers.decoder import Decoder, DecoderLayer
from baton.model.layers.linear import Linear, Product
from baton.model.layers.mlp import DenseMlp
from baton.model.layers.rotary import rope_table
from baton.model.runner.device_kernels import UNPROVEN, DeviceKernels, chosen
from baton.model.runner.kv_cache import KVCache, device_cache
from baton.model.runner.runner import Runner
from baton.model.runner.step_queue import CudaQueue, HostQueue, StepQueue, StepWork
from baton.model.sampling.sampler import Sampler
from baton.model.tensor_parallel import SingleRank
from baton.runtime.clock import monotonic
from tools.gpu import serving
from tools.gpu.cases import STEPS, StepCase
from tools.gpu.floors import NARROW_GROUP, Shape
from tools.gpu.rows import Measured, Unreached
from tools.gpu.section import Desk
from tools.gpu.serving import BLOCK_SIZE, MAX_PROMPT, decode, prefill

EPS = 1e-6
THETA = 1e6
WEIGHT_SCALE = 0.02
ROUNDS = 15
BUILD_S = 15.0  # a model is not begun if less time than this is left
SHARED_BLOCKS = 8320  # 128 sequences of 1k tokens
MAX_POSITIONS = 40_960  # of Qwen3; block tables on the device are as wide
SPARE_BYTES = 6 << 30  # memory for activations and logits beside weights and pool


def run(
    desk: Desk,
    steps: Sequence[StepCase] = STEPS,
    rounds: int = ROUNDS,
) -> None:
    """Run the section: models one after the other, each built once per size of pool."""
    torch.manual_seed(0)
    for model in _models(steps):
        shape = model[0].shape
        num_blocks = max(map(blocks_of, model))
        if desk.left_s() < BUILD_S:
            for case in model:
                desk.emit(Unreached(case.key))
            continue
        kernels = kernels_of(model[0], capability_of(desk.device))
        if lacking := _lacking(desk, model[0], num_blocks, kernels):
            for case in model:
                desk.emit(Measured(case.key, "ms", note=lacking))
            continue
        try:
            runner = build(shape, num_blocks, desk.device, kernels)
        except torch.OutOfMemoryError as error:
            for case in model:
                desk.emit(Measured(case.key, "ms", error=str(error)[:200]))
            continue
        _measure(desk, runner, model, rounds)
        del runner  # free its memory before the next runner is built


def _models(steps: Sequence[StepCase]) -> list[list[StepCase]]:
    """Group the cases that share a model and a pool; a very large pool serves one case alone."""

    def pool_of(case: StepCase) -> tuple[str, bool]:
        return case.model, blocks_of(case) > SHARED_BLOCKS

    return [list(cases) for _, cases in groupby(steps, pool_of)]


def _measure(
    desk: Desk, runner: Runner, model: Sequence[StepCase], rounds: int
) -> None:
    """Measure eager steps before the capture: from then on those that fit are replayed."""
    decoding = [case for case in model if case.kind == "decode"]
    prompts = [
        case
        for case in model
        if case.kind == "prefill"
        and (case.max_num_batched_tokens or case.context) <= MAX_PROMPT
    ]
    for case in model:
        if case.kind == "prefill":
            desk.measure(
                Measured(case.key, "ms"),
                partial(prefill, runner, case, case.key, rounds),
                10.0,
            )
            continue
        key = f"{case.key}, eager"
        desk.measure(Measured(key, "ms"), partial(decode, runner, case, key, rounds))
    if decoding and desk.has_time(f"graphs of {decoding[0].model}", 15.0):
        serving.run(desk, runner, decoding, prompts, rounds)


def blocks_of(case: StepCase) -> int:
    """Return the blocks of a case: one more for each sequence, which a scheduler keeps free."""
    return case.batch * (-(-case.context // BLOCK_SIZE) + 1)


def capability_of(device: torch.device) -> tuple[int, int]:
    if device.type != "cuda":
        return 0, 0
    return torch.cuda.get_device_capability(device)


def kernels_of(case: StepCase, capability: tuple[int, int]) -> DeviceKernels:
    """Return the kernels of a node that has proven all that it could; the self-test proves them."""
    shape = case.shape
    shapes = ModelShapes(
        (*shape.linears, (shape.vocab_size, shape.hidden_size)),
        shape.num_heads,
        shape.num_kv_heads,
        shape.head_dim,
        BLOCK_SIZE,
        windows=() if shape.window is None else (shape.window,),
        narrow=shape.narrow,
        narrow_group=NARROW_GROUP if shape.narrow else 0,
        max_model_len=MAX_POSITIONS,
    )
    proven = {candidate.name: True for candidate in possible(shapes, capability)}
    return chosen(case.deterministic, proven, 1)


def _lacking(
    desk: Desk, case: StepCase, num_blocks: int, kernels: DeviceKernels
) -> str:
    """Return why a model cannot be measured on this GPU; empty if it can."""
    shape = case.shape
    if case.deterministic == "auto" and not kernels.is_ordered:
        return "here the default is deterministic: false"
    pool = num_blocks * BLOCK_SIZE * shape.kv_bytes_per_token
    needed = shape.stored_bytes + pool + SPARE_BYTES
    free = desk.watch.free_bytes()
    if desk.device.type != "cuda" or needed <= free:
        return ""
    return f"needs {needed / 2**30:.0f} GiB, {free / 2**30:.0f} GiB are free"


def build(
    shape: Shape, num_blocks: int, device: torch.device, kernels: DeviceKernels
) -> Runner:
    """Return a runner over a random model and a random pool."""
    decoder = random_decoder(shape, torch.bfloat16, device, kernels)
    cache = device_cache(
        (
            num_blocks,
            shape.num_kv_heads,
            shape.num_layers,
            2,
            BLOCK_SIZE,
            shape.head_dim,
        ),
        torch.bfloat16,
        device,
    )
    cache.pool.normal_()  # reading zeros takes less power
    positions = min(num_blocks * BLOCK_SIZE, MAX_POSITIONS)
    return make_runner(shape, decoder, cache, positions, kernels)


def make_runner(
    shape: Shape,
    decoder: Decoder,
    cache: KVCache,
    positions: int,
    kernels: DeviceKernels,
) -> Runner:
    """Return a runner that is built like a rank's, without a checkpoint."""
    from baton.kernels.cuda.sampling import sample_tokens
    from baton.model.layers.cuda_backend import CudaBackend

    table = rope_table(Rope(THETA), shape.head_dim, positions)
    device = cache.pool.device
    queue: StepQueue = CudaQueue(device) if device.type == "cuda" else RepeatingQueue()
    backend = CudaBackend(
        cache.pool,
        shape.num_heads,
        [table],
        EPS,
        is_ordered=kernels.is_ordered,
        proven=kernels.proven,
    )
    return Runner(decoder, backend, cache, Sampler((), sample_tokens), queue, monotonic)


class RepeatingQueue(HostQueue):
    """A CPU that repeats captured work by calling it again, for tests of this section."""

    def capture(self, work: StepWork) -> StepWork:
        with torch.inference_mode():
            work()
        return work


def random_decoder(
    shape: Shape,
    dtype: torch.dtype,
    device: torch.device,
    kernels: DeviceKernels = UNPROVEN,
) -> Decoder:
    """Return a decoder with weights of the right sizes, drawn on `device`."""
    ordered = _ordered_product(device, kernels)

    def dense(rows: int, columns: int) -> Linear:
        weight = torch.empty(rows, columns, dtype=dtype, device=device)
        return Linear(weight.normal_(0.0, WEIGHT_SCALE), ordered=ordered)

    def linear(rows: int, columns: int) -> Linear:
        if not shape.narrow:
            return dense(rows, columns)
        from baton.kernels.hopper.narrow.narrow_proof import weights_of
        from tools.gpu.kernels import narrow_packing

        weight = next(weights_of(shape.narrow, NARROW_GROUP, rows, columns, device))
        packed = narrow_packing(device)(weight, device)
        assert packed is not None
        codes, product = packed
        return Linear(codes, ordered=product)

    def ones(*sizes: int) -> Tensor:
        return torch.ones(sizes, dtype=dtype, device=device)

    hidden = shape.hidden_size
    inner = shape.intermediate_size
    dim = shape.head_dim
    heads = shape.num_heads
    kv_heads = shape.num_kv_heads
    layers = tuple(
        DecoderLayer(
            attention_norm=ones(hidden),
            qkv=linear((heads + 2 * kv_heads) * dim, hidden),
            head_norms=ones(heads + kv_heads, dim) if shape.has_qk_norm else None,
            output=linear(hidden, heads * dim),
            mlp_norm=ones(hidden),
            mlp=DenseMlp(linear(2 * inner, hidden), linear(hidden, inner)),
            number=number,
            scoring=Scoring(dim**-0.5, shape.window),
        )
        for number in range(shape.num_layers)
    )
    head = dense(shape.vocab_size, hidden)
    embedding = head.weight
    if not shape.is_tied:
        embedding = dense(shape.vocab_size, hidden).weight
    return Decoder(embedding, layers, ones(hidden), head, False, EPS, SingleRank())


def _ordered_product(device: torch.device, kernels: DeviceKernels) -> Product | None:
    if not kernels.is_ordered:
        return None
    if PRODUCTS in kernels.proven:
        from baton.kernels.hopper.products.product import load_product

        return load_product(device)
    from baton.kernels.cuda.fixed_product import fixed_product

    return fixed_product
