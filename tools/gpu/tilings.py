"""Compile the tilings of the attention kernels, and find the fastest ones on this GPU.

Without arguments it compiles the rows of kernels/tilings.py for Hopper, which needs no GPU. With
`--candidates` it compiles other rows too, and on a GPU measures those that do not spill and prints
the fastest row of each type and head size, to paste into the table.
"""

import argparse
import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

import torch

from baton.kernels.decode_attention import paged_decode_attention
from baton.kernels.prefill_attention import paged_prefill_attention
from baton.kernels.tilings import BF16, DECODE, FP32, PREFILL, DecodeTiling, PrefillTiling, Row
from tools.gpu.batches import Batch, Heads, Layout, paged_batch
from tools.gpu.cubins import Cubin, compiled
from tools.gpu.timing import Stopwatch

HEADS, KV_HEADS = 32, 8
LAYERS = 2
# Contexts of a decode batch, and of a prompt, that are measured.
DECODED, PROMPT = (4096,) * 32, 8192
Tiling = DecodeTiling | PrefillTiling
Tilings = dict[Row, DecodeTiling] | dict[Row, PrefillTiling]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.gpu.tilings", description=__doc__)
    parser.add_argument("--candidates", action="store_true", help="try other rows than the table's")
    given = parser.parse_args()
    watch = Stopwatch(torch.device("cuda")) if torch.cuda.is_available() else None
    for name, table in (("decode", DECODE), ("prefill", PREFILL)):
        for row in list(table):
            _try(name, table, row, watch if given.candidates else None, given.candidates)


def _try(
    name: str, table: Tilings, row: Row, watch: Stopwatch | None, has_candidates: bool
) -> None:
    """Print what a row's candidates compile to and take, the table's own first; then the best."""
    own: Tiling = table[row]
    found: list[tuple[float, Tiling]] = []
    for tiling in dict.fromkeys([own, *(candidates(own) if has_candidates else ())]):
        table[row] = tiling
        try:
            kernel = compiled(launch(name, row))[0]
            seconds = _seconds(watch, name, row) if watch and not kernel.local_bytes else None
        finally:
            table[row] = own  # type: ignore[assignment]
        print(line(name, row, tiling, kernel, seconds), flush=True)
        if seconds is not None:
            found.append((seconds, tiling))
    if found:
        best = min(found, key=lambda entry: entry[0])[1]
        number_type, head_dim = _row_names(row)
        values = ", ".join(map(str, dataclasses.astuple(best)))
        print(f"    ({number_type}, {head_dim}): {type(best).__name__}({values}),", flush=True)


def candidates(own: Tiling) -> Iterator[Tiling]:
    """Yield what may be faster than a row of the table."""
    if isinstance(own, DecodeTiling):
        for keys, num_warps, num_stages, blocks in product(
            (own.keys // 2, own.keys, 2 * own.keys), (4, 8), (2, 3, 4), (2, 3, 4)
        ):
            yield DecodeTiling(max(keys, 16), num_warps, num_stages, blocks)
        return
    for (queries, keys, num_warps), num_stages, ahead in product(
        ((128, 64, 8), (64, 64, 4), (128, 32, 8), (64, 32, 4), (64, 128, 4), (128, 128, 8)),
        (2, 3), (True, False),
    ):  # fmt: skip
        yield PrefillTiling(queries, keys, num_warps, num_stages, ahead)


def line(name: str, row: Row, tiling: Tiling, kernel: Cubin, seconds: float | None) -> str:
    number_type, head_dim = _row_names(row)
    shape = " ".join(f"{key}={value}" for key, value in dataclasses.asdict(tiling).items())
    time = "" if seconds is None else f"  {1e6 * seconds:.1f} µs"
    spilled = f"  SPILLS {kernel.local_bytes} bytes" if kernel.local_bytes else ""
    return (
        f"{name} {number_type} {head_dim:3d}  {shape}: {kernel.registers} registers, "
        f"{kernel.shared_bytes} shared bytes, {kernel.blocks} blocks per multiprocessor, "
        f"{kernel.wgmma} wgmma, {kernel.mma} mma{spilled}{time}"
    )


def launch(
    name: str, row: Row, window: int | None = None, *, ordered: bool = False
) -> Callable[[], object]:
    """Return a call of a kernel on CPU tensors, to be compiled and not made."""
    dtype, head_dim = row
    layout = Layout(torch.device("cpu"), dtype)
    batch = paged_batch(Heads(HEADS, KV_HEADS, head_dim), (1100,), (100,), layout)
    if name == "prefill":
        return partial(_prefill, batch, 1, window, ordered=ordered)
    batch = dataclasses.replace(batch, q=batch.q[:1])
    return partial(_decode, batch, 1, window, ordered=ordered)


def _seconds(watch: Stopwatch, name: str, row: Row) -> float:
    dtype, head_dim = row
    heads, layout = Heads(HEADS, KV_HEADS, head_dim), Layout(torch.device("cuda"), dtype)
    if name == "prefill":
        batch = paged_batch(heads, (PROMPT,), (PROMPT,), layout)
        return watch.kernels([partial(_prefill, batch, i) for i in range(LAYERS)]).median_s
    batch = paged_batch(heads, DECODED, (1,) * len(DECODED), layout)
    return watch.kernels([partial(_decode, batch, i) for i in range(LAYERS)]).median_s


def _decode(batch: Batch, layer: int, window: int | None = None, *, ordered: bool = False) -> None:
    paged_decode_attention(
        batch.q, batch.pool, layer, batch.block_tables, batch.context_lens, batch.scale, window,
        ordered=ordered,
    )  # fmt: skip


def _prefill(batch: Batch, layer: int, window: int | None = None, *, ordered: bool = False) -> None:
    paged_prefill_attention(
        batch.q, batch.pool, layer, batch.block_tables, batch.query_starts, batch.context_lens,
        batch.scale, window, ordered=ordered,
    )  # fmt: skip


def _row_names(row: Row) -> tuple[str, int]:
    return {BF16: "BF16", FP32: "FP32"}[row[0]], row[1]


if __name__ == "__main__":
    main()
