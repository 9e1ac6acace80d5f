"""Show which row counts keep the bits of a model's linear layers on this machine, and their cost.

`python -m tools.row_rules FOLDER` prints a line for each kind of layer: whether its weight is
packed, the tiles that a node would use, the seconds of the search, and the time of some row counts
as a multiple of one plain product with as many rows. It reads the shapes and not the weights.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from baton.engine.layers.host_linears import MAX_HEAD_ROWS, WeightKind, find
from baton.engine.layers.linear import Linear, packed
from baton.engine.layers.row_rule import TILES
from baton.engine.layers.trial_data import trial_weight
from baton.engine.model_config import read_decoder_config
from baton.protocol.errors import BatonError
from tools.floor import shapes

ROUNDS = 7
ROUND_ROWS = 512  # computed in each round, so that few rows are repeated often
# So many copies of a weight that they do not stay in a core's cache, as a model's layers do not.
COPIES_BYTES, MAX_COPIES = 64 << 20, 16


class KindFound(msgspec.Struct, frozen=True):
    """All seconds are CPU time. `ratios`: by the rule / in one plain product, by row count."""

    outputs: int
    inputs: int
    dtype: str
    is_packed: bool
    tiles: tuple[int, ...]  # empty: no rule was found
    is_single_threaded: bool
    search_s: float
    ratios: dict[int, float]


def examine(kind: WeightKind, rows: Sequence[int]) -> KindFound:
    began_s = time.process_time()
    is_packed, rule = find(kind)
    search_s = time.process_time() - began_s
    weight = trial_weight(kind.outputs, kind.inputs, kind.dtype)
    copies = max(1, min(MAX_COPIES, COPIES_BYTES // weight.nbytes))
    plain = [Linear(weight.clone()) for _ in range(copies)]
    forms = [(packed(layer.weight) if is_packed else None) for layer in plain]
    ruled = [
        Linear(layer.weight if form is None else form, None, rule)
        for layer, form in zip(plain, forms, strict=True)
    ]
    ratios = {}
    for count in rows:
        x = torch.randn(count, kind.inputs).to(kind.dtype)
        ratios[count] = _ratio(ruled, plain, x)
    return KindFound(
        kind.outputs, kind.inputs, str(kind.dtype).removeprefix("torch."), is_packed,
        rule.tiles if rule else (), rule is not None and rule.is_single_threaded, search_s, ratios,
    )  # fmt: skip


def _ratio(ruled: Sequence[Linear], plain: Sequence[Linear], x: Tensor) -> float:
    """Median over rounds of CPU time, both measured in turn in each."""
    calls = max(len(plain), ROUND_ROWS // len(x))
    found = []
    for number in range(ROUNDS + 1):
        took = []
        for layers in (ruled, plain):
            began_s = time.process_time()
            for at in range(calls):
                layers[at % len(layers)](x)
            took.append(time.process_time() - began_s)
        if number:
            found.append(took[0] / took[1])
    return statistics.median(found)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.row_rules", description=__doc__)
    parser.add_argument("model", type=Path, help="Hugging Face folder")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="default: the model's")
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 3, 8, 9, 17, 33, 64, 100, 512])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    try:
        config = read_decoder_config(given.model)
    except BatonError as error:
        print(f"baton: {error}", file=sys.stderr)
        return 1
    torch.set_num_threads(given.threads)
    name = given.dtype or config.dtype
    dtype = torch.bfloat16 if name == "bfloat16" else torch.float32
    kinds = [WeightKind(out, inner, dtype, False, TILES[-1]) for inner, out in shapes(config)]
    kinds.append(WeightKind(config.vocab_size, config.hidden_size, dtype, False, MAX_HEAD_ROWS))
    found = []
    with torch.inference_mode():
        for kind in kinds:
            found.append(examine(kind, given.rows))
            print(_line(found[-1]), flush=True)
    if given.json:
        given.json.write_bytes(msgspec.json.encode(found))
    return 0


def _line(found: KindFound) -> str:
    form = "packed" if found.is_packed else "plain"
    tiles = ",".join(str(tile) for tile in found.tiles) or "none"
    ratios = " ".join(f"{rows}:{ratio:.2f}" for rows, ratio in found.ratios.items())
    one = " one-thread" if found.is_single_threaded else ""
    return (
        f"{found.outputs}x{found.inputs} {found.dtype} {form} tiles={tiles}{one} "
        f"search={1e3 * found.search_s:.0f}ms {ratios}"
    )


if __name__ == "__main__":
    sys.exit(main())
