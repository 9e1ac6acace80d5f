"""Make the linear layers of one rank on a CPU, each with its weight packed.

Where the compiled kernels multiply bf16 numbers as such, they compute the layers, and every number
of rows keeps its bits. Elsewhere torch's library does, by a row rule.

The loader calls `make` for every layer. The first layer of each kind costs a search with trial
data; all others of that kind share what it found. Whether weights are packed decides bits, so it
follows from what the machine can do and from the search, and never from a time.
"""

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from baton.engine.executor import Progress
from baton.engine.layers.linear import Linear, packed
from baton.engine.layers.row_rule import TILES, RowRule, find_rule, tiles_for
from baton.engine.layers.trial_data import trial_bias, trial_rows, trial_weight
from baton.kernels.cpu_linears import CpuLinears
from baton.runtime.log import logger

log = logger("linear")

TRIAL_SHAPE = 64, 512

# Logits are computed for the tokens that are drawn, which are seldom more in one step.
MAX_HEAD_ROWS = 64


class WeightKind(NamedTuple):
    """What the library's choice of code may depend on."""

    outputs: int
    inputs: int
    dtype: torch.dtype
    has_bias: bool
    max_rows: int


class Found(NamedTuple):
    """How layers of one kind are computed. Without a rule, a row's bits depend on the others."""

    is_packed: bool
    rule: RowRule | None


class HostLinears:
    """The layers of one rank, of at most `num_kinds` kinds (for the progress that is shown)."""

    def __init__(
        self,
        num_kinds: int,
        progress: Progress,
        thread_counts: Sequence[int] = (),
        compiled: CpuLinears | None = None,
    ) -> None:
        """Take all numbers of threads that a step may use: bits must be equal under each."""
        self._num_kinds, self._progress = num_kinds, progress
        self._thread_counts = thread_counts
        self._compiled, self._trial = compiled, b""
        if compiled is not None:
            self._trial = trial_of(compiled)
        self._found: dict[WeightKind, Found] = {}

    def make(
        self, weight: Tensor, bias: Tensor | None = None, max_rows: int | None = None
    ) -> Linear:
        """A layer that keeps `weight` only if it cannot be packed.

        `max_rows` says that the layer seldom gets more rows at once.
        """
        outputs, inputs = weight.shape
        if self._compiled is not None and inputs % 2 == 0:
            layer = self._compiled.layer(weight, bias)
            return Linear(layer.panels, None, ordered=lambda x, _: layer(x), trial=self._trial)
        kind = WeightKind(outputs, inputs, weight.dtype, bias is not None, max_rows or TILES[-1])
        if kind not in self._found:
            self._progress("row rules", len(self._found), self._num_kinds)
            self._found[kind] = find(kind, self._thread_counts)
            _warn(kind, self._found[kind].rule)
        is_packed, rule = self._found[kind]
        form = packed(weight) if is_packed else weight
        assert form is not None, "a weight of this kind was packed before"
        return Linear(form, bias, rule)


def trial_of(compiled: CpuLinears) -> bytes:
    """Return a digest of how the CPU rounds the products of the compiled kernels."""
    layer = compiled.layer(trial_weight(*TRIAL_SHAPE, torch.bfloat16), None)
    bits = layer(trial_rows(TRIAL_SHAPE[1], torch.bfloat16)).view(torch.int16)
    return hashlib.blake2b(bits.numpy().tobytes(), digest_size=16).digest()


def find(kind: WeightKind, thread_counts: Sequence[int] = ()) -> Found:
    """Packed if that has a rule, else plain if that has one, else whatever is fastest."""
    weight = trial_weight(kind.outputs, kind.inputs, kind.dtype)
    bias = trial_bias(kind.outputs, kind.dtype) if kind.has_bias else None
    rows = trial_rows(kind.inputs, kind.dtype)
    tiles = tiles_for(kind.outputs, kind.inputs, kind.max_rows, len(rows))
    forms = [form for form in (packed(weight), weight) if form is not None]
    for form in forms:
        rule = find_rule(Linear(form, bias).product, rows, tiles, thread_counts)
        if rule is not None:
            return Found(form.is_mkldnn, rule)
    return Found(forms[0].is_mkldnn, None)


def _warn(kind: WeightKind, rule: RowRule | None) -> None:
    shape = f"{kind.outputs}x{kind.inputs}"
    if rule is None:
        log.warning("the bits of a linear layer depend on the rows beside them", shape=shape)
    elif rule.is_single_threaded:
        log.warning("a linear layer keeps its bits with one thread only, and uses one", shape=shape)
