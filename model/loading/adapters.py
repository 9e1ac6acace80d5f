"""Read one rank's part of the LoRA adapters of a model, at start and at run time."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from safetensors import safe_open
from torch import Tensor

from baton.model.checkpoint.lora_files import MODULES, Adapter, tensor_of
from baton.model.checkpoint.tensors import EMBEDDING, HEAD
from baton.model.layers.linear import Linear
from baton.model.layers.lora import Lora, Replacements
from baton.model.layers.mlp import GroupedLinear, StackedExperts
from baton.model.loading.weights import OpenFile, in_order
from baton.protocol.errors import ConfigError

WIDTH_UNIT = 16  # the inner width is a multiple, which the kernels of all devices take


class LoraSpace(NamedTuple):
    """The room for adapters that come at run time."""

    num_slots: int = 0
    max_rank: int = 0


NO_SPACE = LoraSpace()


@dataclass(slots=True, frozen=True, eq=False)
class LoraSite:
    """Layers of the checkpoint that were joined to one, and this rank's part of them."""

    names: tuple[str, ...]
    rows: tuple[slice, ...]  # of each
    columns: slice  # the inputs, the same of all
    order: Tensor | None = None  # of the outputs

    @property
    def num_outputs(self) -> int:
        return sum(int(rows.stop - rows.start) for rows in self.rows)

    @property
    def num_inputs(self) -> int:
        return int(self.columns.stop - self.columns.start)


class AdapterReader:
    """Reads the matrices of one adapter, padded to what `rank` takes."""

    def __init__(self, adapter: Adapter, rank: int) -> None:
        self.adapter = adapter
        self._rank = rank
        # Typed so because safetensors declares no types.
        self._file: OpenFile = safe_open(adapter.file, framework="pt", device="cpu")
        # The last matrices of all experts of a layer.
        self._shared: dict[str, Tensor] = {}

    def replaced(self, name: str, rows: slice = slice(None)) -> Tensor | None:
        """Return rows of a tensor that the adapter has instead of the model's, if it has."""
        own = self.adapter.replaced.get(name)
        return None if own is None else self._file.get_slice(own)[rows]

    def changes(self, site: LoraSite) -> bool:
        return any(name in self.adapter.layers for name in site.names)

    def shrink(self, site: LoraSite) -> Tensor:
        """Return `A` of the layers below one another, `[width, inputs]`."""
        whole = torch.zeros(width_of(site, self._rank), site.num_inputs)
        for place, name in enumerate(site.names):
            if (a := self._read(name, "A")) is not None:
                first = place * self._rank
                whole[first : first + len(a)] = a[:, site.columns]
        return whole

    def expand(self, site: LoraSite) -> Tensor:
        """Return scaled `B` of each layer in its block, `[outputs, width]`."""
        whole = torch.zeros(site.num_outputs, width_of(site, self._rank))
        first = 0
        for place, (name, rows) in enumerate(zip(site.names, site.rows, strict=True)):
            size = rows.stop - rows.start
            if (b := self._read(name, "B")) is not None:
                left = place * self._rank
                layer = self.adapter.layers[name]
                scaled = b[rows].float() * layer.scaling
                whole[first : first + size, left : left + layer.rank] = scaled
            first += size
        return in_order(whole, site.order)

    def _read(self, layer: str, letter: str) -> Tensor | None:
        """Return a matrix in the adapter's own dtype; None if the adapter has none here."""
        named = self.adapter.layers.get(layer)
        if named is None:
            return None
        tensor = tensor_of(named.name, letter)
        if named.part is None:
            return self._file.get_tensor(tensor)
        if tensor not in self._shared:  # all experts of a layer have a part of it
            self._shared = {t: self._file.get_tensor(t) for t in _pair_of(named.name)}
        if letter == "A":
            return self._shared[tensor][named.part.rows_of_a]
        return self._shared[tensor][named.part.rows_of_b, named.part.columns_of_b]


def _pair_of(name: str) -> tuple[str, str]:
    return tensor_of(name, "A"), tensor_of(name, "B")


def width_of(site: LoraSite, rank: int) -> int:
    return -(-len(site.names) * rank // WIDTH_UNIT) * WIDTH_UNIT


class LayerMaker(Protocol):
    """Changes one of the layers of a group on a CPU. Any thread may call it."""

    def with_layer(
        self, grouped: GroupedLinear, number: int, weight: Tensor
    ) -> GroupedLinear: ...


class PreparedSite(NamedTuple):
    """What an adapter adds to one layer: groups that replace others, or numbers for a device."""

    lora: Lora
    shrink: GroupedLinear | Tensor
    expand: GroupedLinear | Tensor


class PreparedAdapter(NamedTuple):
    """An adapter that was read and checked, but has changed nothing yet."""

    lora: str  # its name in requests
    number: int  # among all adapters
    sites: list[PreparedSite]
    replacements: Replacements  # of all adapters
    head: Linear | None
    embedding: Tensor | None

    def put(self) -> None:
        """Let it take effect, between two steps."""
        self.replacements.set(self.number, self.head, self.embedding)
        for site in self.sites:
            site.lora.shrink = _put(site.lora.shrink, self.number, site.shrink)
            site.lora.expand = _put(site.lora.expand, self.number, site.expand)


class LoraLoader:
    """Reads one rank's part of the adapters: those of the settings, and others at run time."""

    def __init__(
        self,
        adapters: Sequence[Adapter],
        device: torch.device,
        dtype: torch.dtype,
        space: LoraSpace = NO_SPACE,
    ) -> None:
        self.adapters = adapters
        self.space = space
        # The layers that adapters change, which grow as the model is loaded.
        self.sites: list[tuple[LoraSite, Lora]] = []
        # Up to which matrices are filled; 0 without adapters.
        self.rank = max((adapter.rank for adapter in adapters), default=0)
        self.rank = max(self.rank, space.max_rank)
        self._device = device
        self._dtype = dtype
        self._readers = [AdapterReader(adapter, self.rank) for adapter in adapters]
        self._maker: LayerMaker | None = None
        self.replacements = Replacements()
        self._head_rows = slice(None)
        self._make_head: Callable[[Tensor], Linear] | None = None

    def add_heads(self, rows: slice, make: Callable[[Tensor], Linear] | None) -> None:
        """Make the adapters' own heads, of which this rank has `rows`, and their embeddings.

        `make` raises `ConfigError` for weights that are no numbers; None if no token is made.
        """
        self._head_rows = rows
        self._make_head = make
        for number, reader in enumerate(self._readers):
            self.replacements.set(number, *self._replacing(reader))

    def takes(self, site: LoraSite) -> bool:
        """Return whether an adapter changes one of these layers, or may at run time."""
        if self.space.num_slots:
            return all(name.rpartition(".")[2] in MODULES for name in site.names)
        return self.changes(site)

    def add(self, site: LoraSite, lora: Lora, maker: LayerMaker | None) -> None:
        """Note a layer. `maker` made it on a CPU; without it, a GPU holds all slots."""
        self.sites.append((site, lora))
        self._maker = maker

    def changes(self, site: LoraSite) -> bool:
        """Return whether an adapter of the settings changes one of these layers."""
        return any(reader.changes(site) for reader in self._readers)

    def shrinks(self, *sites: LoraSite) -> Iterator[Tensor]:
        """Yield the first matrix of each adapter, then the same zeros for each free slot.

        With `sites` of several experts, an adapter has one for each of them.
        """
        for reader in self._readers:
            for site in sites:
                yield reader.shrink(site).to(self._device, self._dtype)
        site, *_ = sites
        yield from self._free(len(sites), width_of(site, self.rank), site.num_inputs)

    def expands(self, *sites: LoraSite) -> Iterator[Tensor]:
        """Yield the second matrices in the same order."""
        for reader in self._readers:
            for site in sites:
                yield reader.expand(site).to(self._device, self._dtype)
        site, *_ = sites
        yield from self._free(len(sites), site.num_outputs, width_of(site, self.rank))

    def prepare(self, lora: str, adapter: Adapter, slot: int) -> PreparedAdapter:
        """Read an adapter for a slot, while steps run. Raises `ConfigError` if its rank is high."""
        if adapter.rank > self.rank:
            raise ConfigError(
                f"the adapter has rank {adapter.rank}, more than model.max_lora_rank, which is "
                f"{self.space.max_rank}"
            )
        known = {name for site, _ in self.sites for name in site.names}
        if odd := sorted(adapter.layers.keys() - known):
            raise ConfigError(
                f"the adapter changes {odd[0]}, which only adapters of model.lora_modules can"
            )
        reader = AdapterReader(adapter, self.rank)
        number = len(self.adapters) + slot
        sites = [
            PreparedSite(
                layer,
                self._made(layer.shrink, number, reader.shrink(site)),
                self._made(layer.expand, number, reader.expand(site)),
            )
            for site, layer in self.sites
        ]
        return PreparedAdapter(
            lora, number, sites, self.replacements, *self._replacing(reader)
        )

    def _replacing(self, reader: AdapterReader) -> tuple[Linear | None, Tensor | None]:
        weight = reader.replaced(HEAD, self._head_rows)
        head = None
        if weight is not None:
            assert self._make_head is not None, (
                "an adapter with a head is of a model that has one"
            )
            head = self._make_head(weight.to(self._device, self._dtype))
        embedding = reader.replaced(EMBEDDING)
        if embedding is not None:
            embedding = embedding.to(self._device, self._dtype)
        return head, embedding

    def _free(self, num_each: int, *shape: int) -> Iterator[Tensor]:
        zeros = torch.zeros(shape, device=self._device, dtype=self._dtype)
        for _ in range(self.space.num_slots * num_each):
            yield zeros

    def _made(
        self, grouped: GroupedLinear, number: int, weight: Tensor
    ) -> GroupedLinear | Tensor:
        weight = weight.to(self._dtype)
        if self._maker is not None:
            return self._maker.with_layer(grouped, number, weight)
        return weight.pin_memory() if self._device.type == "cuda" else weight


def _put(
    grouped: GroupedLinear, number: int, made: GroupedLinear | Tensor
) -> GroupedLinear:
    if not isinstance(made, Tensor):
        return made
    assert isinstance(grouped, StackedExperts), (
        "a GPU has the matrices of all slots in one tensor"
    )
    grouped.weight[number].copy_(made, non_blocking=True)
    return grouped
