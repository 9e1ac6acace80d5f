"""A process that tries Hopper's decode attention and what surrounds prefill, in the interpreter.

It prints, as JSON, what each part of `PARTS` found that its arguments name, or `plans N`, which
plans N random batches. `long` with a size of heads and names of `OPTIONS` compares decode over long
contexts with its torch form, and `long guesses` with a size of heads compares rows of sequences
with each row alone. One process for all saves the imports of the others.
"""

import itertools
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import msgspec
import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from baton.kernels import reference
from baton.kernels.hopper.attention import (
    latent_prefill,
    latent_proof,
    one_order_proof,
    prefill,
    prefill_proof,
)
from baton.kernels.hopper.attention.cases import difference, fault_in
from baton.kernels.hopper.attention.decode import one_decode_attention, plan_decode
from baton.kernels.hopper.attention.latent_prefill import PLAIN_DIM, TURNED_DIM
from baton.kernels.hopper.attention.prefill_plan import plan_prefill
from baton.kernels.proofs import (
    FP8_POOL,
    LATENT_PREFILL,
    ONE_ORDER,
    PREFILL,
    LatentDims,
    ModelShapes,
)
from baton.model.config.latent_config import LatentConfig
from baton.model.layers.attention import Batch, Chunk, DecodeRows, Scoring, Tables
from baton.model.layers.cuda_backend import CudaBackend
from baton.model.layers.latent_attention import LatentWeights, make_latent
from baton.model.layers.linear import Linear
from baton.model.layers.mlp import StackedExperts
from tests.support.hopper_stand_in import StandIn
from tests.support.interpret_kernels import Interpreting
from tests.support.one_order import Arithmetic, attend
from tools.gpu.kernel_cases import (
    LAYER,
    AttentionShape,
    attention_batch,
    in_fp8,
    rotation_table,
    rows_alone,
    rows_in_tiles,
)
from tools.gpu.kernel_cases import (
    Batch as Case,
)
from tools.gpu.kernels import DECODES

COUNTS = st.one_of(st.sampled_from([0, 1, 2, 16, 128]), st.integers(1, 400))
CACHED = st.one_of(st.just(0), st.integers(0, 1500))
# Around the borders of blocks, of tiles and of cuts.
QUICK = (385, 1, 0, 129, 256, 257)
OTHERS = (*QUICK, 700, 128, 16, 2, 127, 2048, 2049, 2177, 3000, 0, 8321)
PROGRAMS = (7, 1, 13)
# Contexts and their last rows, on both sides of borders of tiles, cuts and windows.
GUESSES = ((385, 4), (1, 1), (0, 0), (130, 5), (257, 3), (20, 17))
LONG_GUESSES = (
    *GUESSES,
    (258, 4),
    (457, 16),
    (513, 2),
    (2050, 5),
    (2305, 3),
    (8194, 4),
    (3, 3),
)
DEEPSEEK = LatentDims(512, 128, 64, 128)
LATENT = ModelShapes((), 16, 1, 576, 16, is_latent=True, latent=DEEPSEEK)
# Windows begin inside a tile, inside a cut and at its border; some contexts are shorter.
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 256},
    "sinks": {"has_sinks": True},
    "all": {"window": 200, "softcap": 3.0, "has_sinks": True},
}
# Heads that share a KV head, with an option.
GROUPS = (
    *((4, option) for option in OPTIONS),
    (1, "all"),
    (3, "sinks"),
    (8, "window"),
    (16, "all"),
)


@st.composite
def batches(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Contexts and queries of some sequences; what is padding has neither."""
    queries = draw(st.lists(COUNTS, min_size=1, max_size=6))
    contexts = tuple(count + draw(CACHED) if count else 0 for count in queries)
    return contexts, tuple(queries)


def check_plans(num_examples: int) -> None:
    @settings(
        max_examples=num_examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[*HealthCheck],
    )
    @given(
        batches(),
        st.tuples(st.sampled_from([1, 2, 3, 8]), st.sampled_from([1, 2, 4, 7])),
        st.tuples(st.sampled_from([64, 128]), st.sampled_from([64, 128])),
        st.booleans(),
        st.sampled_from([None, 1, 100, 256]),
        st.tuples(st.sampled_from([1, 4, 7, 132]), st.sampled_from([0, 100])),
    )
    def check(
        batch: tuple[tuple[int, ...], tuple[int, ...]],
        heads: tuple[int, int],
        tile: tuple[int, int],
        is_packed: bool,
        window: int | None,
        sizes: tuple[int, int],
    ) -> None:
        contexts, queries = batch
        kv_heads, group = heads
        rows, keys = tile
        num_programs, padding = sizes
        pack = 1 << (group - 1).bit_length() if is_packed else 1
        starts = torch.tensor([0, *queries]).cumsum(0).int()
        plan = plan_prefill(
            starts,
            torch.tensor(contexts, dtype=torch.int32),
            sum(queries) + padding,
            kv_heads,
            group,
            1 if is_packed else group,
            rows // pack,
            keys,
            1 << 14,
            num_programs,
            window,
        )
        seen = items_of(plan, num_programs, rows // pack, keys, window)
        wanted = {
            (token, head, sequence, contexts[sequence] - count + token - start)
            for sequence, (start, count) in enumerate(
                zip(starts.tolist(), queries, strict=False)
            )
            for token in range(start, start + count)
            for head in range(0, kv_heads * group, group if is_packed else 1)
        }
        assert sorted(seen) == sorted(wanted), "each row once"

    check()


def items_of(
    plan: torch.Tensor, num_programs: int, rows: int, keys: int, window: int | None
) -> list[tuple[int, int, int, int]]:
    """Return token, head, sequence and position of all rows; each sees its keys, and few others."""
    bounds = plan.view(-1).tolist()
    items = plan.tolist()
    taken = set()
    seen = []
    for program in range(num_programs):
        for number in range(*bounds[2 * program : 2 * program + 2]):
            assert number not in taken, "no two programs share an item"
            taken.add(number)
            token, first_position, own, begin, end, head, row, context = items[number]
            assert 0 < own <= rows
            assert first_position + own <= context
            for step in range(own):
                position = first_position + step
                oldest = max(position - window + 1, 0) if window else 0
                assert begin * keys <= oldest <= position < end * keys
                seen.append((token + step, head, row, position))
            first = max(first_position - window + 1, 0) if window else 0
            assert begin == first // keys, "no tile is taken in vain"
            assert end == -(-(first_position + own) // keys)
    return seen


def dot(a: Tensor, b: Tensor) -> Tensor:
    """Multiply as `interpret_kernels.dot`, where a row's bits do not depend on its tile."""
    products = a.numpy()[:, :, np.newaxis] * b.numpy()[np.newaxis]
    return torch.from_numpy(products.sum(axis=1, dtype=np.float32))


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return (a.double() * b.double() + c.double()).float()


def exp2(x: Tensor) -> Tensor:
    return torch.from_numpy(np.exp2(x.numpy()))


MACHINE = Arithmetic(dot, exp2, fma)


def decode(case: Case, rows: list[int], programs: int) -> Tensor:
    picked = torch.tensor(rows)
    lens = case.context_lens[picked]
    return one_decode_attention(
        case.q[picked],
        case.pool,
        LAYER,
        case.block_tables[picked],
        lens,
        plan_decode(case.q, case.pool, lens, case.how[0], programs),
        case.scale,
        *case.how,
    )


def with_other_bits(case: Case, contexts: tuple[int, ...], out: Tensor) -> int:
    """Return how many outputs differ in bits from those that the specification has."""
    kv_heads = case.pool.shape[1]
    group = case.q.shape[1] // kv_heads
    differing = 0
    for row, length in enumerate(contexts):
        if not length:
            differing += int(out[row].count_nonzero())
            continue
        blocks = case.block_tables[row, : -(-length // case.pool.shape[4])].long()
        kv = case.pool[blocks, :, LAYER].permute(2, 1, 0, 3, 4).flatten(2, 3)
        for head in range(kv_heads):
            own = slice(head * group, (head + 1) * group)
            positions = torch.full((group,), length - 1)
            k, v = kv[:, head, :length]
            window, softcap, sinks = case.how
            scoring = Scoring(
                case.scale, window, softcap, None if sinks is None else sinks[own]
            )
            want = attend(case.q[row, own], k, v, positions, scoring, MACHINE)
            differing += int((want != out[row, own]).sum())
    return differing


def compare(contexts: tuple[int, ...], head_dim: int, option: str) -> dict[str, object]:
    """Return how many outputs were compared, and how many have other bits than `one_order` says.

    `changed` are the other plans and batches that changed the bits of a row. Slots that no sequence
    owns hold NaN.
    """
    shape = AttentionShape(
        contexts,
        (1,) * len(contexts),
        6,
        2,
        head_dim,
        dtype=torch.bfloat16,
        **OPTIONS[option],
    )
    case = attention_batch(shape, "cpu")
    everything = list(range(len(contexts)))
    out = decode(case, everything, 7)
    changed = [
        f"{programs} programs"
        for programs in PROGRAMS[1:]
        if not torch.equal(decode(case, everything, programs), out)
    ]
    for rows in ([4], everything[::-1]):
        if not torch.equal(decode(case, rows, 6), out[rows]):
            changed.append(f"rows {rows}")
    return {
        "compared": out.numel(),
        "differing": with_other_bits(case, contexts, out),
        "changed": changed,
    }


def said_by_proofs() -> dict[str, str]:
    """Return what each proof says of a right kernel and of wrong ones."""
    options = ModelShapes(
        (),
        3,
        1,
        64,
        16,
        "float16",
        "float16",
        softcap=30.0,
        windows=(50,),
        has_sinks=True,
    )
    ordered = msgspec.structs.replace(options, dtype="bfloat16", pool_dtype="bfloat16")
    said = {
        "options": _said(prefill_proof, options),
        "one order": _said(one_order_proof, ordered),
    }
    narrow = {
        "FP8": (prefill_proof, msgspec.structs.replace(options, pool_dtype=FP8_POOL)),
        "FP8, one order": (
            one_order_proof,
            msgspec.structs.replace(ordered, head_dim=80, pool_dtype=FP8_POOL),
        ),
    }
    for name, (proof, shapes) in narrow.items():
        said[name] = _said(proof, shapes)
    said["forgets exponents, FP8"] = _said(*narrow["FP8"], "forgets exponents")
    name = "widens apart, FP8, one order"
    said[name] = _said(*narrow["FP8, one order"], "widens apart")
    large = msgspec.structs.replace(ordered, head_dim=256, windows=())
    said["heads of 256"] = _said(one_order_proof, large)
    latent = msgspec.structs.replace(
        LATENT, num_heads=2, latent=DEEPSEEK._replace(kv_lora_rank=64)
    )
    said["latent"] = _said(latent_proof, latent)
    fault = "forgets the keys before"
    said[fault] = _said(latent_proof, latent, fault)
    for fault in ("reads past the end", "rounds apart", "forgets the window"):
        said[fault] = _said(prefill_proof, options, fault)
    # Decode is right in all of these.
    with patch.object(one_order_proof, "_decode_fault", _no_fault):
        with patch.object(one_order_proof, "captured", _frozen):
            said["replays what it has computed"] = _said(one_order_proof, ordered)
        with patch.object(one_order_proof, "_replay_fault", _no_fault):
            for fault in ("rounds apart", "forgets the window"):
                name = f"{fault}, in one order"
                said[name] = _said(one_order_proof, ordered, fault)
    return said


def _no_fault(*_of: object) -> str:
    return ""


def _frozen(work: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    out = work()
    return lambda: out


def _said(proof: object, shapes: ModelShapes, *faults: str) -> str:
    kernel = StandIn(MACHINE, faults)
    with (
        patch.object(prefill, "launch_prefill", kernel),
        patch.object(latent_prefill, "launch_prefill", kernel),
    ):
        return str(proof.prove(shapes, "cpu"))  # type: ignore[attr-defined]


def layers_beside_triton() -> dict[str, str]:
    """Return, by the name of a backend for Hopper, where its layers differ from Triton's.

    The step has two sequences that decode, one of them with guesses, a chunk, padding, and a chunk
    of a prompt's start.
    """
    contexts = (33, 20, 40, 0, 9)
    queries = (1, 4, 10, 0, 9)
    shape = AttentionShape(contexts, queries, 4, 2, 64, dtype=torch.bfloat16)
    case = attention_batch(shape, "cpu")
    positions = torch.cat(
        [
            torch.arange(context - count, context)
            for context, count in zip(contexts, queries, strict=True)
        ]
    )
    rows = torch.arange(len(queries)).repeat_interleave(torch.tensor(queries))
    slots = case.block_tables[rows, positions // 16] * 16 + positions % 16
    tables = Tables(
        case.block_tables,
        case.context_lens,
        case.query_starts[2:] - 5,
        num_decoding=2,
        decode_starts=case.query_starts[:3],
        num_more_rows=3,
    )
    batch = Batch(positions, positions, slots.long(), (), tables)
    qkv = torch.randn(
        len(positions), 8 * 64, generator=torch.Generator().manual_seed(0)
    )
    found = {}
    kinds = itertools.product((False, True), (case.pool, in_fp8(case.pool)[0]))
    for is_ordered, pool in kinds:
        outs = []
        for proven in (frozenset[str](), frozenset({PREFILL, ONE_ORDER})):
            backend = CudaBackend(
                pool.clone(),
                4,
                [rotation_table(128, 64)],
                1e-6,
                is_ordered=is_ordered,
                proven=proven,
            )
            with patch.object(prefill, "launch_prefill", StandIn(MACHINE)):
                backend.begin(batch)
                outs.append(
                    torch.stack(
                        [backend.attend(n, qkv.bfloat16(), None) for n in range(2)]
                    )
                )
        found[backend.name] = fault_in(outs[1], outs[0])
    return found


class LatentSteps:
    """Steps of a layer with latent attention, whose prompts a backend may expand."""

    def __init__(self) -> None:
        self._luck = torch.Generator().manual_seed(0)
        sizes = LatentConfig(None, 64, PLAIN_DIM, TURNED_DIM, PLAIN_DIM, False)
        width = 2 * PLAIN_DIM
        weights = LatentWeights(
            q_down=None,
            q_norm=None,
            q_up=self.numbers(2, sizes.qk_head_dim, 1),
            row_down=self.numbers(sizes.row_dim, 1),
            row_norm=torch.ones(sizes.kv_lora_rank),
            row_up=self.numbers(2, width, sizes.kv_lora_rank) / 8,
            of_index=None,
        )
        _, self.latent = make_latent(
            sizes,
            weights,
            lambda weight: Linear(weight, ordered=in_fp64),
            lambda parts: StackedExperts(
                torch.stack([*parts]), reference.grouped_product
            ),
            expands=True,
        )
        self.width = 2 * sizes.qk_head_dim + sizes.row_dim
        self.pool = self.numbers(20, 1, 2, 1, 16, sizes.row_dim)

    def numbers(self, *size: int) -> Tensor:
        return torch.randn(size, generator=self._luck).bfloat16()

    def step(
        self, x: Tensor, spans: list[tuple[int, int, int]], proven: frozenset[str]
    ) -> Tensor:
        """Return values of tokens `start:end` of prompts of so many tokens, `[*, 2, PLAIN_DIM]`.

        Sequence `i` has the blocks from `4 i + 1` on. The pool keeps the rows of the step.
        """
        rotation = [rotation_table(128, TURNED_DIM)]
        backend = CudaBackend(self.pool, 2, rotation, 1e-6, proven=proven)
        chunks = []
        positions: list[int] = []
        slots: list[int] = []
        for number, (start, end, num_prompt_tokens) in enumerate(spans):
            blocks = tuple(range(4 * number + 1, 4 * number + 5))
            chunks.append(
                Chunk(
                    len(positions),
                    start,
                    end - start,
                    blocks,
                    num_prompt_tokens=num_prompt_tokens,
                )
            )
            positions += range(start, end)
            slots += [blocks[n // 16] * 16 + n % 16 for n in range(start, end)]
        decoding = next(
            (n for n, one in enumerate(chunks) if one.length > 1), len(chunks)
        )
        starts = [one.row - decoding for one in chunks[decoding:]]
        starts.append(len(positions) - decoding)
        tables = Tables(
            torch.tensor([one.block_table for one in chunks], dtype=torch.int32),
            torch.tensor([one.end for one in chunks], dtype=torch.int32),
            torch.tensor(starts, dtype=torch.int32),
            decoding,
        )
        where = torch.tensor(positions), torch.tensor(slots)
        backend.begin(Batch(where[0], *where, tuple(chunks), tables))
        packed = self.latent.packed(x, x, backend)
        backend.expansion = self.latent
        with patch.object(latent_prefill, "launch_prefill", StandIn(MACHINE)):
            out = backend.attend(1, packed, None)
        if backend.absorbed_rows is None:
            out = self.latent.expanded(out)
        return out.view(len(x), 2, PLAIN_DIM)


def in_fp64(x: Tensor, weight: Tensor) -> Tensor:
    return (x.double() @ weight.double().T).to(x.dtype)


def latent_steps() -> dict[str, object]:
    """Return where expanded steps differ from absorbed ones, and from themselves in other chunks.

    Sequences decode, compute one token of a prompt, a part of one, the end of one, and a response
    that is computed again.
    """
    steps = LatentSteps()
    proven = frozenset({LATENT_PREFILL})
    spans = [(32, 33, 20), (19, 20, 40), (10, 40, 60), (5, 30, 30), (10, 20, 15)]
    x = steps.numbers(sum(end - start for start, end, _ in spans), steps.width)
    absorbed = steps.step(x, spans, frozenset())
    expanded = steps.step(x, spans, proven)
    rows = torch.cat((torch.arange(1, 32), torch.arange(32, 56), torch.arange(57, 61)))
    is_prompt = torch.zeros(len(x), dtype=torch.bool)
    is_prompt[rows] = True
    changed = (expanded != absorbed).flatten(1).any(1)
    # In one chunk, and token by token.
    whole = steps.step(x[:20], [(10, 30, 31)], proven)
    alone = torch.cat(
        [steps.step(x[n : n + 1], [(10 + n, 11 + n, 31)], proven) for n in range(20)]
    )
    return {
        "beside absorbed": fault_in(expanded, absorbed),
        "changed": bool((changed == is_prompt).all()),
        "token by token": difference(alone, whole),
    }


def make_small() -> None:
    """Let the proofs take shorter contexts, since the interpreter is slow."""
    prefill_proof.BATCHES = (
        ((1, 129), (1, 129)),
        ((150, 40, 0), (3, 1, 0)),
    )
    prefill_proof.PROMPT = one_order_proof.PROMPT = 260
    prefill_proof.CHUNKS = (0, 3, 130, 260)
    one_order_proof.BORDERS = (128, 256)
    one_order_proof.LENGTHS = (130, 1, 0, 257)
    one_order_proof.PROGRAMS = (7,)
    one_order_proof.GUESSES = (130, 257, 3)
    one_order_proof.LONG = 520
    one_order_proof.LAST = 9
    one_order_proof.CAPTURED = ((130, 30), (10, 25))
    one_order_proof.REPLAYED = ((150, 40), (30, 5))
    latent_proof.BATCHES = (((1, 129, 300), (1, 129, 40)),)
    latent_proof.PROMPT = 390
    latent_proof.CHUNKS = (0, 3, 130, 390)
    latent_proof.SPLIT = 128


def orders_of_sums() -> dict[str, object]:
    return {"all": compare(QUICK, 64, "all")}


def rows_together(
    sequences: tuple[tuple[int, int], ...], group: int, head_dim: int, option: str
) -> dict[str, object]:
    """Return in how many outputs rows that share tiles differ from each row alone.

    `sequences` have a context and a number of rows. Rows of padding give zeros.
    """
    contexts, counts = zip(*sequences, strict=True)
    shape = AttentionShape(
        contexts,
        counts,
        2 * group,
        2,
        head_dim,
        dtype=torch.bfloat16,
        **OPTIONS[option],
    )
    case = attention_batch(shape, "cpu")
    num_rows = len(case.q)
    owners, lens = rows_alone(shape, "cpu")
    alone = attended(case, case.q, DecodeRows(case.block_tables[owners], lens, None), 7)
    wanted = reference.paged_decode_attention(
        case.q,
        case.pool,
        LAYER,
        case.block_tables[owners],
        lens,
        case.scale,
        *case.how,
    )
    assert not fault_in(alone, wanted)
    q = torch.cat((case.q, case.q[:3]))
    rows = rows_in_tiles(case, len(q))
    differing = 0
    for programs in PROGRAMS:
        out = attended(case, q, rows, programs)
        differing += int((out[:num_rows] != alone).sum())
        differing += int(out[num_rows:].count_nonzero())
    return {"compared": alone.numel(), "differing": differing, "changed": []}


def attended(case: Case, q: Tensor, rows: DecodeRows, programs: int) -> Tensor:
    window = case.how[0]
    lens = rows.context_lens
    plan = plan_decode(q, case.pool, lens, window, programs, rows.starts)
    return one_decode_attention(
        q,
        case.pool,
        LAYER,
        rows.blocks,
        lens,
        plan,
        case.scale,
        *case.how,
        rows.starts,
    )


def rows_of_guesses() -> dict[str, object]:
    return {
        "four heads": rows_together(GUESSES, 4, 64, "all"),
        "one head": rows_together(GUESSES, 1, 64, "window"),
        "three heads": rows_together(GUESSES, 3, 128, "sinks"),
    }


def measured_decode() -> dict[str, str]:
    """Return, by its name, what is wrong with each form that the benchmark measures over FP8."""
    shape = AttentionShape((300, 129, 70), (1, 1, 1), 8, 2, 128, dtype=torch.bfloat16)
    case = attention_batch(shape, "cpu")
    case = replace(case, pool=in_fp8(case.pool)[0])
    wanted = reference.paged_decode_attention(
        case.q,
        case.pool,
        LAYER,
        case.block_tables,
        case.context_lens,
        case.scale,
        *case.how,
    )
    return {
        form: fault_in(call(case, LAYER)(), wanted) for form, call in DECODES.items()
    }


PARTS: dict[str, Callable[[], object]] = {
    "proofs": said_by_proofs,
    "backend": layers_beside_triton,
    "orders": orders_of_sums,
    "guesses": rows_of_guesses,
    "measured": measured_decode,
    "latent": latent_steps,
}


def main() -> None:
    Interpreting()
    found: dict[str, object] = {}
    if sys.argv[1] == "long":
        for option in sys.argv[3:]:
            found[option] = compare(OTHERS, int(sys.argv[2]), option)
        print(json.dumps(found))
        return
    if sys.argv[1] == "long guesses":
        for group, option in GROUPS:
            found[f"{group}, {option}"] = rows_together(
                LONG_GUESSES, group, int(sys.argv[2]), option
            )
        print(json.dumps(found))
        return
    make_small()
    words = iter(sys.argv[1:])
    for word in words:
        if word == "plans":
            check_plans(int(next(words)))
        else:
            found[word] = PARTS[word]()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
