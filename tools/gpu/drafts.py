"""Check that drafts change no token: eager, replayed, and beside the same model without any.

Decoder and head are random and have one order of sums, so that a token's bits do not depend on how
many tokens a step computes.
"""

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from baton.decode_node.scheduler import DecodeScheduler
from baton.model.layers.decoder import Decoder
from baton.model.layers.draft_head import NextnHead
from baton.model.layers.linear import Linear
from baton.model.layers.mlp import DenseMlp
from baton.model.runner.cuda_start import buckets_up_to, with_guesses
from baton.model.runner.device_kernels import DeviceKernels
from baton.model.runner.kv_cache import device_cache
from baton.model.runner.packing import PackedStep
from baton.model.runner.runner import Runner
from baton.node.scheduling.block_pool import BlockPool
from baton.node.scheduling.scheduler import NodeLimits
from baton.protocol.config import EngineConfig
from baton.protocol.ids import Key, RequestId
from baton.protocol.messages import Decode, Tokens
from baton.protocol.sampling import Sampling
from tools.gpu.cases import StepCase
from tools.gpu.engine import capability_of, kernels_of, make_runner, random_decoder
from tools.gpu.floors import Shape
from tools.gpu.rows import Check
from tools.gpu.section import Desk
from tools.gpu.serving import BLOCK_SIZE

NUM_DRAFTS = 3
NUM_SEQUENCES = 2
NUM_BLOCKS = 8
PROMPT_TOKENS = 9
MAX_TOKENS = 8
DRAFTS_CHANGE_NOTHING = "tokens with drafts, eager and replayed, are those without"


class Served(NamedTuple):
    tokens: dict[Key, list[int]]
    drafts: list[tuple[int, ...]]
    num_right: int
    num_replays: int


def run(desk: Desk, shape: Shape) -> None:
    key = f"{DRAFTS_CHANGE_NOTHING}, {shape.name}"
    desk.check(key, partial(_compare, key, shape, desk.device), 20.0)


def _compare(key: str, shape: Shape, device: torch.device) -> Check:
    torch.manual_seed(0)
    case = StepCase(shape, "decode", 1, BLOCK_SIZE, deterministic="true")
    kernels = kernels_of(case, capability_of(device))
    decoder = random_decoder(shape, torch.bfloat16, device, kernels)
    head = random_head(decoder, feeds_normed=False)

    def runner() -> Runner:
        return _runner(shape, decoder, kernels, device)

    none = _served(runner(), has_head=False)
    eager = runner()
    eager.draft_with(head, NUM_DRAFTS)
    captured = runner()
    captured.draft_with(head, NUM_DRAFTS)
    buckets = buckets_up_to(NUM_SEQUENCES)[-1:]
    captured.capture(with_guesses(buckets, NUM_DRAFTS, has_head=True), lambda *_: None)
    ours = _served(eager)
    replayed = _served(captured)
    is_equal = none.tokens == ours.tokens == replayed.tokens
    detail = f"{ours.num_right} drafts were right, {replayed.num_replays} steps were replayed"
    if not is_equal:
        detail = "tokens differ"
    elif ours.drafts != replayed.drafts:
        detail = "drafts differ"
    has_passed = is_equal and ours.drafts == replayed.drafts
    has_tried = bool(ours.num_right and replayed.num_replays)
    return Check(key, has_passed and has_tried, detail)


def _runner(
    shape: Shape, decoder: Decoder, kernels: DeviceKernels, device: torch.device
) -> Runner:
    """Return a runner whose pool has one more layer, for the head."""
    layers = shape.num_layers + 1
    sizes = (NUM_BLOCKS, shape.num_kv_heads, layers, 2, BLOCK_SIZE, shape.head_dim)
    cache = device_cache(sizes, torch.bfloat16, device)
    cache.pool.zero_()
    positions = NUM_BLOCKS * BLOCK_SIZE
    return make_runner(shape, decoder, cache, positions, kernels)


def _served(runner: Runner, *, has_head: bool = True) -> Served:
    """Let some sequences decode, each at a temperature at which most drafts are right."""
    engine = EngineConfig()
    if has_head:
        engine = EngineConfig(
            num_speculative_tokens=NUM_DRAFTS, speculative_method="mtp"
        )
    limits = NodeLimits(64, NUM_SEQUENCES, NUM_BLOCKS * BLOCK_SIZE, engine=engine)
    pool = BlockPool(NUM_BLOCKS, BLOCK_SIZE)
    scheduler = DecodeScheduler(pool, limits)
    for number in range(NUM_SEQUENCES):
        tokens = [3 + (7 * place + number) % 90 for place in range(PROMPT_TOKENS)]
        sampling = Sampling(
            seed=number, max_tokens=MAX_TOKENS, temperature=2.0, ignore_eos=True
        )
        key = Key(RequestId(f"drafts-{number}"))
        scheduler.add(0.0, 0, Decode(key, tokens, PROMPT_TOKENS, sampling))
    said: dict[Key, list[int]] = {}
    drafts: list[tuple[int, ...]] = []
    replays = _counted_replays(runner)
    while (plan := scheduler.plan(0.0)) is not None:
        result = runner.execute(plan)
        drafts += [own for _, own in result.drafts]
        scheduler.settle(0.0, plan, result)
        for _, message in scheduler.outputs.take_router_messages():
            for entry in message.entries if isinstance(message, Tokens) else ():
                said.setdefault(entry.key, []).extend(entry.token_ids)
    return Served(said, drafts, pool.counts.spec_decode_accepted_tokens, len(replays))


def _counted_replays(runner: Runner) -> list[PackedStep]:
    """Return the steps that the runner replays from now on."""
    steps: list[PackedStep] = []
    graphs = runner._graphs
    if graphs is None:
        return steps
    replay = graphs.replay

    def noting(step: PackedStep) -> tuple[Tensor, Tensor, Tensor]:
        steps.append(step)
        return replay(step)

    graphs.replay = noting  # type: ignore[method-assign]
    return steps


def random_head(decoder: Decoder, *, feeds_normed: bool) -> NextnHead:
    """Return a head behind the layers of a random decoder, with weights of its own."""
    like = decoder.layers[0]
    number = len(decoder.layers)
    torch.manual_seed(4)

    def linear(source: Linear) -> Linear:
        return replace(source, weight=torch.randn_like(source.weight) * 0.16)

    assert like.mlp is not None
    gate_up, down = map(linear, like.mlp.linears())
    layer = replace(
        like,
        qkv=linear(like.qkv),
        output=linear(like.output),
        mlp=DenseMlp(gate_up, down),
        number=number,
    )
    norm = torch.rand_like(decoder.final_norm) + 0.5
    joint = torch.randn(len(norm), 2 * len(norm), dtype=norm.dtype, device=norm.device)
    return NextnHead(
        embedding_norm=norm,
        hidden_norm=norm.flip(0),
        joint=Linear(joint * 0.16),
        decoder=replace(decoder, layers=(layer,)),
        feeds_normed=feeds_normed,
    )
