"""Make the linear layers of one rank on a CPU, each with its weight packed.

If the compiled kernels multiply bf16 numbers directly, they compute the layers, and a row keeps its
bits with any number of rows. Otherwise torch's library computes them by a row rule.

The first layer of each kind costs a search with trial data, whose result all others of that kind
share. Packing a weight changes bits, so the decision follows from the machine's abilities and from
the search, and never from a measured time.
"""

import hashlib
import itertools
from collections.abc import Iterable, Sequence
from functools import cache, partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.kernels.cpu.functions import CpuLinear, CpuLinears
from baton.kernels.reference import NarrowWeight
from baton.model.batch_invariance.row_rule import TILES, RowRule, find_rule, tiles_for
from baton.model.layers.linear import Linear, packed
from baton.model.layers.mlp import GroupedLinear, HostExperts
from baton.node.executor import Progress
from baton.runtime.log import logger

log = logger("linear")

TRIAL_SHAPE = 64, 512

# Logits are computed for sampled positions only; a step rarely has more.
MAX_HEAD_ROWS = 64


class WeightKind(NamedTuple):
    """The properties on which the library's choice of code may depend."""

    outputs: int
    inputs: int
    dtype: torch.dtype
    has_bias: bool
    max_rows: int


class Found(NamedTuple):
    is_packed: bool
    rule: RowRule | None  # None: a row's bits depend on other rows


class HostLinears:
    """The layers of one rank. Progress is shown as a part of at most `num_kinds` kinds."""

    def __init__(
        self,
        num_kinds: int,
        progress: Progress,
        thread_counts: Sequence[int] = (),
        compiled: CpuLinears | None = None,
    ) -> None:
        """Take all numbers of threads that a step may use; bits must be equal with each of them."""
        self._num_kinds = num_kinds
        self._progress = progress
        self._thread_counts = tuple(thread_counts)
        self._compiled = compiled
        self._trial = b"" if compiled is None else trial_of(compiled)
        self._found: dict[WeightKind, Found] = {}
        self._unpacked: dict[WeightKind, Found] = {}

    @property
    def takes_narrow(self) -> bool:
        return self._compiled is not None

    def make(
        self, weight: Tensor, bias: Tensor | None = None, max_rows: int | None = None
    ) -> Linear:
        """Return a layer, which keeps `weight` only if it cannot be packed.

        `max_rows` says that the layer seldom gets more rows at once.
        """
        outputs, inputs = weight.shape
        if (
            self._compiled is not None
            and inputs % 2 == 0
            and weight.dtype == torch.bfloat16
        ):
            layer = self._compiled.layer(weight, bias)
            return Linear(layer.panels, None, ordered=layer, trial=self._trial)
        kind = WeightKind(
            outputs, inputs, weight.dtype, bias is not None, max_rows or TILES[-1]
        )
        if kind not in self._found:
            self._progress("row rules", len(self._found), self._num_kinds)
            self._found[kind] = find(kind, self._num_threads())
            _warn(kind, self._found[kind].rule)
        is_packed, rule = self._found[kind]
        form = packed(weight) if is_packed else weight
        assert form is not None, "a weight of this kind was packed before"
        return Linear(form, bias, rule)

    def of_bytes(
        self, weight: Tensor, scales: Tensor, bias: Tensor | None
    ) -> Linear | None:
        """Return a layer of int8 weights that rounds its inputs to int8; None if none can be made.

        `weight` is `[outputs, inputs]`, and `scales` has an fp32 number for each output.
        """
        if self._compiled is None or not self._compiled.takes_bytes(weight.shape[1]):
            return None
        layer = self._compiled.layer_of_bytes(weight, scales, bias)
        return Linear(layer.panels, None, ordered=layer, trial=b"int8")

    def of_narrow(self, weight: NarrowWeight, bias: Tensor | None) -> Linear:
        """Return a layer that keeps its four bits; `takes_narrow` must hold."""
        assert self._compiled is not None
        layer = self._compiled.narrow_layer(weight, bias)
        return Linear(layer.panels, None, ordered=layer, trial=b"narrow" + self._trial)

    def experts(
        self, weights: Iterable[Tensor | NarrowWeight], biases: Tensor | None = None
    ) -> HostExperts:
        """Return the layers of all experts, whose weights have equal shapes.

        Those that have the same weight, one after the other, are one layer.
        """
        of = itertools.repeat(None) if biases is None else biases
        layers: list[Linear] = []
        last: Tensor | NarrowWeight | None = None
        for weight, bias in zip(weights, of, strict=False):
            if weight is last:
                layers.append(layers[-1])
            elif isinstance(weight, NarrowWeight):
                layers.append(self.of_narrow(weight, bias))
            else:
                layers.append(self.make(weight, bias))
            last = weight if biases is None else None
        return self._grouped(tuple(layers))

    def with_layer(
        self, grouped: GroupedLinear, number: int, weight: Tensor
    ) -> HostExperts:
        """Return a group with another layer of the same shape. Any thread may call this."""
        assert isinstance(grouped, HostExperts), "they were made here"
        before = grouped.layers[:number]
        after = grouped.layers[number + 1 :]
        return self._grouped((*before, self.make(weight), *after))

    def _grouped(self, layers: tuple[Linear, ...]) -> HostExperts:
        packs = [
            layer.ordered for layer in layers if isinstance(layer.ordered, CpuLinear)
        ]
        if self._compiled is None or len({layer.kind for layer in packs}) != 1:
            return HostExperts(layers)
        return HostExperts(layers, partial(self._compiled.multiply_groups, packs))

    def over(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """Return a layer over a weight that stays as it is, because others use it too."""
        outputs, inputs = weight.shape
        kind = WeightKind(outputs, inputs, weight.dtype, bias is not None, TILES[-1])
        if kind not in self._unpacked:
            self._unpacked[kind] = find(kind, self._num_threads(), may_pack=False)
            _warn(kind, self._unpacked[kind].rule)
        return Linear(weight, bias, self._unpacked[kind].rule)

    def _num_threads(self) -> tuple[int, ...]:
        return self._thread_counts or (torch.get_num_threads(),)


def trial_of(compiled: CpuLinears) -> bytes:
    """Return a digest of how the CPU rounds the products of the compiled kernels."""
    layer = compiled.layer(trial_weight(*TRIAL_SHAPE, torch.bfloat16), None)
    bits = layer(trial_rows(TRIAL_SHAPE[1], torch.bfloat16)).view(torch.int16)
    return hashlib.blake2b(bits.numpy().tobytes(), digest_size=16).digest()


@cache
def find(
    kind: WeightKind, thread_counts: tuple[int, ...], *, may_pack: bool = True
) -> Found:
    """Return packed layers if they have a rule, else plain ones if they have, else the fastest.

    The library of a process does not change, so each kind is searched once in a process.
    """
    weight = trial_weight(kind.outputs, kind.inputs, kind.dtype)
    bias = trial_bias(kind.outputs, kind.dtype) if kind.has_bias else None
    rows = trial_rows(kind.inputs, kind.dtype)
    forms = [
        form
        for form in (packed(weight) if may_pack else None, weight)
        if form is not None
    ]
    tiles = tiles_for(
        kind.outputs,
        kind.inputs,
        kind.max_rows,
        len(rows),
        is_slow=not forms[0].is_mkldnn,
    )
    for form in forms:
        rule = find_rule(Linear(form, bias).product, rows, tiles, thread_counts)
        if rule is not None:
            return Found(form.is_mkldnn, rule)
    return Found(forms[0].is_mkldnn, None)


def _warn(kind: WeightKind, rule: RowRule | None) -> None:
    shape = f"{kind.outputs}x{kind.inputs}"
    if rule is None:
        log.warning(
            "the bits of a row in a linear layer depend on the other rows", shape=shape
        )
    elif rule.is_single_threaded:
        log.warning(
            "a linear layer keeps its bits only with one thread, so it uses one",
            shape=shape,
        )


NUM_ROWS = 8
DISTINCT_OUTPUTS = 64  # rows of the weight before they repeat
MANTISSA_BITS = {torch.bfloat16: 8, torch.float32: 24}
EXPONENTS = (-6, 7)
# This is close to the rounding errors of sums of such numbers; a larger bias would hide them.
BIAS_EXPONENTS = (-17, -14)


def trial_weight(outputs: int, inputs: int, dtype: torch.dtype) -> Tensor:
    numbers = _numbers(
        (min(outputs, DISTINCT_OUTPUTS), inputs // 2), dtype, EXPONENTS, seed=1
    )
    some = _in_pairs(numbers, numbers, inputs).to(dtype)
    return some.repeat(-(-outputs // len(some)), 1)[:outputs].contiguous()


def trial_rows(inputs: int, dtype: torch.dtype) -> Tensor:  # [NUM_ROWS, inputs]
    numbers = _numbers((NUM_ROWS, inputs // 2), dtype, EXPONENTS, seed=2)
    return _in_pairs(numbers, -numbers, inputs).to(dtype)


def trial_bias(outputs: int, dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(
        _numbers((1, outputs), dtype, BIAS_EXPONENTS, seed=3)[0]
    ).to(dtype)


def _numbers(
    shape: tuple[int, int], dtype: torch.dtype, exponents: tuple[int, int], seed: int
) -> NDArray[np.float32]:
    """Return numbers of either sign that `dtype` holds exactly."""
    random = np.random.Generator(np.random.PCG64(seed))
    bits = MANTISSA_BITS[dtype]
    mantissas = random.integers(1 << (bits - 1), 1 << bits, shape)
    mantissas *= 1 - 2 * random.integers(0, 2, shape)
    powers = random.integers(*exponents, shape) - (bits - 1)
    return np.ldexp(mantissas.astype(np.float32), powers.astype(np.int32))


def _in_pairs(
    ones: NDArray[np.float32], others: NDArray[np.float32], inputs: int
) -> Tensor:
    """Return both halves with columns in a random order; the last of an odd number is zero."""
    odd = np.zeros((len(ones), inputs % 2), dtype=np.float32)
    order = np.random.Generator(np.random.PCG64(inputs)).permutation(inputs)
    return torch.from_numpy(np.concatenate((ones, others, odd), axis=1)[:, order])
