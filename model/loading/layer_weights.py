"""One rank's part of the linear layers of a checkpoint: dense, quantized, narrow or with adapters.

It joins layers that read the same inputs, and knows no names of a model.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from baton.kernels.cpu.functions import CpuLinears
from baton.kernels.reference import NarrowWeight
from baton.model.batch_invariance.device_linears import OrderedLinears
from baton.model.batch_invariance.host_linears import MAX_HEAD_ROWS, HostLinears
from baton.model.checkpoint.tensors import decoder_tensors, layout_of
from baton.model.config.decoder_config import DecoderConfig
from baton.model.config.packing import Packing
from baton.model.config.quantization import WeightFormat
from baton.model.config.tensor_parts import LinearTensors, NormTensor
from baton.model.layers.linear import Linear, Product
from baton.model.layers.lora import Lora
from baton.model.layers.mlp import GroupedLinear, GroupedProduct, StackedExperts
from baton.model.loading.adapters import LoraLoader, LoraSite
from baton.model.loading.uploads import Uploads
from baton.model.loading.weights import (
    Checkpoint,
    in_order,
    joined,
    mxfp4,
    narrow_bytes,
    narrow_fp4,
    of_codebook,
    of_fp4,
    of_mxfp4,
    part_of,
    scaled,
    unpacked,
)
from baton.model.tensor_parallel import Ranks
from baton.node.executor import Progress

# Types of weights that GPUs may keep.
NARROW_BYTES = ("F8_E4M3", "I8")
# QKV, attention output, gate and up, down, head.
NUM_LINEAR_KINDS = 5

AnyWeight = Tensor | NarrowWeight


class NarrowLinear(Protocol):
    """A product with a packed weight. Those of equal `trial` have the same bits."""

    @property
    def trial(self) -> bytes: ...

    def __call__(self, x: Tensor, packed: Tensor, /) -> Tensor: ...


# Packs a weight on a device and returns the product with it; None for one that it cannot read.
PackNarrow = Callable[[NarrowWeight, torch.device], tuple[Tensor, NarrowLinear] | None]
# Packs the weights of experts, to whose products biases may be added. It is as `PackNarrow`.
PackExperts = Callable[
    [Sequence[NarrowWeight], torch.device, Tensor | None],
    tuple[Tensor, GroupedProduct] | None,
]


class RankDevice(NamedTuple):
    """A rank's device, dtype and threads. A step on a CPU may use any of `thread_counts`."""

    dtype: torch.dtype
    device: torch.device
    thread_counts: tuple[int, ...] = ()
    # For a GPU that has to give a row the same bits in every batch.
    ordered: Product | None = None
    compiled: CpuLinears | None = None  # for a CPU whose kernels compute linear layers
    grouped: GroupedProduct | None = None  # for the experts on a GPU
    narrow: PackNarrow | None = None  # for weights of four and eight bits on a GPU
    # Takes the place of `ordered` for weights with which it keeps bits.
    library: Product | None = None
    narrow_experts: PackExperts | None = None  # as `narrow`, for experts
    expands_prompts: bool = (
        False  # prompts attend to the expanded keys of latent attention
    )


class LinearMaker(Protocol):
    def make(
        self, weight: Tensor, bias: Tensor | None = None, max_rows: int | None = None, /
    ) -> Linear: ...


def linears_for(
    place: RankDevice, progress: Progress, num_kinds: int = NUM_LINEAR_KINDS
) -> LinearMaker | None:
    """Return what makes the linear layers of a rank; None where torch's are as good."""
    if place.device.type == "cpu":
        return HostLinears(num_kinds, progress, place.thread_counts, place.compiled)
    if place.ordered is not None:
        return OrderedLinears(place.ordered, num_kinds, progress, place.library)
    return None


class LayerWeights:
    """Reads layers from a checkpoint."""

    def __init__(
        self,
        config: DecoderConfig,
        checkpoint: Checkpoint,
        ranks: Ranks,
        place: RankDevice,
        linears: LinearMaker | None,
        loras: LoraLoader,
    ) -> None:
        layout = layout_of(config, checkpoint.shapes())
        self.tensors = decoder_tensors(config, layout)
        self.shapes = self.tensors.shapes()
        self.config = config
        self.checkpoint = checkpoint
        self.ranks = ranks
        self.linears = linears
        self.loras = loras
        self.dtype = place.dtype
        self.device = place.device
        self._uploads = Uploads(place.device) if place.device.type == "cuda" else None
        self.grouped_product = place.grouped
        self.narrow = place.narrow
        self.narrow_experts = place.narrow_experts
        self.expert_loras: list[Lora] = []

    def columns(
        self, linears: Sequence[LinearTensors], order: Tensor | None = None
    ) -> Linear:
        """Return layers that ranks share by outputs as one, whose outputs are in `order`."""
        rank = self.ranks.rank
        size = self.ranks.size
        parts = [
            (linear.name, rows)
            for linear in linears
            for rows in linear.rows(rank, size)
        ]
        bias = None
        if linears[0].has_bias:
            bias = torch.cat(
                [self.read(name + ".bias", rows=rows) for name, rows in parts]
            )
            bias = in_order(bias, order)
        names, rows = zip(*parts, strict=True)
        layer = self._of_bytes(names, rows, None, bias, order) or self.linear(
            in_order(self.weight(names, rows, None), order), bias
        )
        columns = slice(0, linears[0].inputs.size)
        return self._adapted(layer, LoraSite(names, rows, columns, order))

    def rows(self, linear: LinearTensors) -> Linear:
        """Return a layer that ranks share by inputs."""
        columns = linear.columns(self.ranks.rank, self.ranks.size)
        # The ranks' results are summed, so one rank alone adds the bias.
        has_bias = linear.has_bias and self.ranks.rank == 0
        bias = self.read(linear.name + ".bias") if has_bias else None
        rows = [slice(0, linear.num_outputs)]
        layer = self._of_bytes([linear.name], rows, columns, bias) or self.linear(
            self.weight([linear.name], rows, columns), bias
        )
        return self._adapted(layer, LoraSite((linear.name,), tuple(rows), columns))

    def weight(
        self,
        names: Sequence[str],
        rows: Sequence[slice],
        columns: slice | None,
        *,
        is_expert: bool = False,
    ) -> AnyWeight:
        """Return the weights of joined layers, narrow where they can be computed so."""
        if isinstance(self.linears, HostLinears):
            keeps = self.linears.takes_narrow
        else:
            pack = self.narrow_experts if is_expert else self.narrow
            keeps = pack is not None
        parts = zip(names, rows, strict=True)
        if (
            keeps
            and (narrow := joined([self._narrow(*one, columns) for one in parts]))
            is not None
        ):
            return narrow
        wide = [
            self.read(name + ".weight", rows=own, columns=columns)
            for name, own in zip(names, rows, strict=True)
        ]
        return torch.cat(wide)

    def grouped(
        self, weights: Iterable[AnyWeight], biases: Tensor | None = None
    ) -> GroupedLinear:
        if isinstance(self.linears, HostLinears):
            return self.linears.experts(weights, biases)
        assert self.grouped_product is not None, (
            "a rank on a GPU has the experts' kernel"
        )
        every = list(weights)
        narrow = [weight for weight in every if isinstance(weight, NarrowWeight)]
        if self.narrow_experts is not None and len(narrow) == len(every):
            made = self.narrow_experts(narrow, self.device, biases)
            if made is not None:
                return StackedExperts(*made, biases)
        wide = [self._widened(weight) for weight in every]
        return StackedExperts(torch.stack(wide), self.grouped_product, biases)

    def _widened(self, weight: AnyWeight) -> Tensor:
        if isinstance(weight, Tensor):
            return weight
        return weight.values().to(self.device, self.dtype)

    def linear(
        self, weight: AnyWeight, bias: Tensor | None = None, *, is_head: bool = False
    ) -> Linear:
        if isinstance(weight, NarrowWeight):
            if isinstance(self.linears, HostLinears):
                return self.linears.of_narrow(weight, bias)
            assert self.narrow is not None
            if (made := self.narrow(weight, self.device)) is not None:
                packed, product = made
                return Linear(packed, bias, ordered=product, trial=product.trial)
            weight = self._widened(weight)
        if self.linears is None:
            return Linear(weight, bias)
        max_rows = MAX_HEAD_ROWS if is_head else None
        return self.linears.make(weight, bias, max_rows)

    def read(
        self,
        name: str,
        *,
        rows: slice | None = None,
        columns: slice | None = None,
        item: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Return a copy, because the checkpoint's pages may be dropped or replaced under a view."""
        if self.ranks.size == 1 and item is None:
            rows = columns = None
        if (whole := self._dequantized(name, item)) is not None:
            tensor = whole[rows or slice(None), columns or slice(None)]
        else:
            tensor = self.checkpoint.read(name, rows=rows, columns=columns, item=item)
        if self._uploads is not None:
            return self._uploads.copy(tensor).to(dtype or self.dtype)
        return tensor.to(dtype=dtype or self.dtype, copy=True).contiguous()

    def whole(self, linear: LinearTensors) -> Tensor:
        """Return the weight of a layer that all ranks have as a whole."""
        return self.read(linear.name + ".weight")

    def norm(self, norm: NormTensor) -> Tensor:
        weight = self.read(norm.name + ".weight", dtype=torch.float32)
        return weight + self.config.layers.norm_offset

    def rounded(self, scale: float) -> float:
        """Return the scale of an embedding, rounded as transformers rounds it."""
        return float(torch.tensor(scale, dtype=self.dtype))

    def _of_bytes(
        self,
        names: Sequence[str],
        rows: Sequence[slice],
        columns: slice | None,
        bias: Tensor | None,
        order: Tensor | None = None,
    ) -> Linear | None:
        """Return joined layers that a CPU computes in int8; None if it does not."""
        quantization = self.config.quantization
        read = self.checkpoint.read
        if quantization is None or not isinstance(self.linears, HostLinears):
            return None
        weights = [name + ".weight" for name in names]
        how = quantization.of(names[0])
        if any(quantization.of(name) != how for name in names) or not how.rounds_inputs:
            return None
        if any(self.checkpoint.dtype_of(weight) != how.stored for weight in weights):
            return None
        numbers = []
        scales = []
        for weight, own in zip(weights, rows, strict=True):
            numbers.append(read(weight, rows=own, columns=columns))
            whole = read(how.scale_of(weight)).float().view(-1)
            scales.append(
                whole[own] if len(whole) > 1 else whole.expand(own.stop - own.start)
            )
        whole, scale = (
            in_order(torch.cat(parts), order) for parts in (numbers, scales)
        )
        return self.linears.of_bytes(whole, scale, bias)

    def _narrow(
        self, name: str, rows: slice, columns: slice | None
    ) -> NarrowWeight | None:
        if self.config.quantization is None:
            return None
        how = self.config.quantization.of(name)
        weight = name + ".weight"
        whole = None
        _, inputs = self.shapes[weight]
        read = self.checkpoint.read
        packing = how.packing

        def read_part(part: str) -> Tensor:
            return read(f"{name}.{part}")

        if packing is not None and self._is_packed(packing, name):
            # CPUs widen four bits alone.
            if packing.has_integers and (packing.bits == 4 or self.narrow):
                part = unpacked(packing, self.shapes[weight], read_part)
                whole = part.narrow(packing.group_size or inputs, packing.bits)
            elif packing.form == "fp4" and self.narrow:
                whole = narrow_fp4(packing, read_part)
        elif (
            packing is None
            and how.stored in NARROW_BYTES
            and how.stored == self.checkpoint.dtype_of(weight)
            and self.narrow
        ):
            whole = narrow_bytes(read(weight), self._scales(how, weight), how.block)
        return whole and part_of(whole, rows, columns or slice(0, inputs))

    def narrow_item(self, name: str, item: int) -> NarrowWeight | None:
        """Return an expert `[outputs, inputs]` of a tensor in MXFP4; None if it is to be read."""
        is_packed = self.checkpoint.dtype_of(name + "_blocks")
        if self.narrow_experts is None or not is_packed:
            return None
        blocks, scales = (
            self.checkpoint.read(name + end, item=item)
            for end in ("_blocks", "_scales")
        )
        return mxfp4(blocks.flatten(1), scales, 2 * blocks.shape[-1])

    def expert_lora(self, sites: Sequence[LoraSite]) -> Lora | None:
        """Return what adapters add to one layer of each expert; None if they change none."""
        if not any(self.loras.changes(site) for site in sites):
            return None
        shrinks = self.grouped(self.loras.shrinks(*sites))
        self.expert_loras.append(
            Lora(shrinks, self.grouped(self.loras.expands(*sites)))
        )
        return self.expert_loras[-1]

    def _adapted(self, linear: Linear, site: LoraSite) -> Linear:
        """Return a layer with what the adapters add to it, of the same rows and columns."""
        if not self.loras.takes(site):
            return linear
        shrink = self.grouped(self.loras.shrinks(site))
        lora = Lora(shrink, self.grouped(self.loras.expands(site)))
        maker = self.linears if isinstance(self.linears, HostLinears) else None
        self.loras.add(site, lora, maker)
        return replace(linear, adapt=lora)

    def _dequantized(self, name: str, item: int | None) -> Tensor | None:
        """Return the fp32 numbers of a quantized weight; None for a tensor of another kind."""
        if self.config.quantization is None:
            return None
        read = self.checkpoint.read
        if item is not None:  # no other way quantizes experts that are in one tensor
            is_packed = self.checkpoint.dtype_of(name + "_blocks")
            parts = [
                read(name + end, item=item)
                for end in ("_blocks", "_scales")
                if is_packed
            ]
            return of_mxfp4(*parts) if parts else None
        layer = name.removesuffix(".weight")
        how = self.config.quantization.of(layer)
        if how.packing is not None:
            if not self._is_packed(how.packing, layer):
                return None

            def part_of_layer(part: str) -> Tensor:
                return read(f"{layer}.{part}")

            if how.packing.form == "fp4":
                return of_fp4(how.packing, part_of_layer)
            if how.packing.form == "bnb":
                return of_codebook(how.packing, self.shapes[name], part_of_layer)
            return unpacked(how.packing, self.shapes[name], part_of_layer).values()
        if self.checkpoint.dtype_of(name) != how.stored:
            return None
        return scaled(read(name), self._scales(how, name), how.block)

    def _scales(self, how: WeightFormat, name: str) -> Tensor:
        scales = self.checkpoint.read(how.scale_of(name))
        return scales if how.scale_divisor == 1 else scales / how.scale_divisor

    def _is_packed(self, packing: Packing, layer: str) -> bool:
        return self.checkpoint.dtype_of(f"{layer}.{packing.first}") == packing.stored
