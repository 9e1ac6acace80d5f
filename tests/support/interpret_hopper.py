"""A process that tries Hopper's decode attention and what surrounds prefill, in the interpreter.

It prints, as JSON, what each part of `PARTS` found that its arguments name, or `plans N`, which
plans N random batches. `long` with a size of heads and names of `OPTIONS` compares decode over long
contexts with its torch form. One process for all saves the imports of the others.
"""

import json
import sys
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import msgspec
import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from baton.kernels.hopper.attention import one_order_proof, prefill, prefill_proof
from baton.kernels.hopper.attention.cases import fault_in
from baton.kernels.hopper.attention.decode import one_decode_attention, plan_decode
from baton.kernels.hopper.attention.prefill_plan import plan_prefill
from baton.kernels.proofs import ONE_ORDER, PREFILL, ModelShapes
from baton.model.layers.attention import Batch, Scoring, Tables
from baton.model.layers.cuda_backend import CudaBackend
from tests.support.hopper_stand_in import StandIn
from tests.support.interpret_kernels import Interpreting
from tests.support.one_order import Arithmetic, attend
from tools.gpu.kernel_cases import (
    LAYER,
    AttentionShape,
    attention_batch,
    rotation_table,
)
from tools.gpu.kernel_cases import (
    Batch as Case,
)

COUNTS = st.one_of(st.sampled_from([0, 1, 2, 16, 128]), st.integers(1, 400))
CACHED = st.one_of(st.just(0), st.integers(0, 1500))
# Around the borders of blocks, of tiles and of cuts.
QUICK = (385, 1, 0, 129, 256, 257)
OTHERS = (*QUICK, 700, 128, 16, 2, 127, 2048, 2049, 2177, 3000, 0, 8321)
PROGRAMS = (7, 1, 13)
# Windows begin inside a tile, inside a cut and at its border; some contexts are shorter.
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 256},
    "sinks": {"has_sinks": True},
    "all": {"window": 200, "softcap": 3.0, "has_sinks": True},
}


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
        plan_decode(
            lens, case.pool.shape[1], case.pool.shape[5], case.how[0], programs
        ),
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
    large = msgspec.structs.replace(ordered, head_dim=256, windows=())
    said["heads of 256"] = _said(one_order_proof, large)
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
    with patch.object(prefill, "launch_prefill", StandIn(MACHINE, faults)):
        return str(proof.prove(shapes, "cpu"))  # type: ignore[attr-defined]


def layers_beside_triton() -> dict[str, str]:
    """Return, by the name of a backend for Hopper, where its layers differ from Triton's.

    The step has two sequences that decode, a chunk, padding, and a chunk of a prompt's start.
    """
    contexts = (33, 20, 40, 0, 9)
    queries = (1, 1, 10, 0, 9)
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
        case.block_tables, case.context_lens, case.query_starts[2:] - 2, num_decoding=2
    )
    batch = Batch(positions, positions, slots.long(), (), tables)
    qkv = torch.randn(
        len(positions), 8 * 64, generator=torch.Generator().manual_seed(0)
    )
    found = {}
    for is_ordered in (False, True):
        outs = []
        for proven in (frozenset[str](), frozenset({PREFILL, ONE_ORDER})):
            backend = CudaBackend(
                case.pool.clone(),
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
    one_order_proof.LONG = 520
    one_order_proof.LAST = 9
    one_order_proof.CAPTURED = ((130, 30), (10, 25))
    one_order_proof.REPLAYED = ((150, 40), (30, 5))


def orders_of_sums() -> dict[str, object]:
    return {"all": compare(QUICK, 64, "all")}


PARTS: dict[str, Callable[[], object]] = {
    "proofs": said_by_proofs,
    "backend": layers_beside_triton,
    "orders": orders_of_sums,
}


def main() -> None:
    Interpreting()
    found: dict[str, object] = {}
    if sys.argv[1] == "long":
        for option in sys.argv[3:]:
            found[option] = compare(OTHERS, int(sys.argv[2]), option)
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
