"""Read one rank's part of the LoRA adapters of a model."""

from collections.abc import Iterator, Sequence

import torch
from safetensors import safe_open
from torch import Tensor

from baton.model.checkpoint.lora_files import Adapter, tensor_of
from baton.model.loading.weights import OpenFile

WIDTH_UNIT = 16  # the inner width is a multiple, which the kernels of all devices take


class LoraLoader:
    """Reads one rank's part of the adapters."""

    def __init__(
        self, adapters: Sequence[Adapter], device: torch.device, dtype: torch.dtype
    ) -> None:
        self.adapters = adapters
        self._device, self._dtype = device, dtype
        # Typed so because safetensors declares no types.
        self._files: list[OpenFile] = [
            safe_open(one.file, framework="pt", device="cpu") for one in adapters
        ]
        self._rank = max((one.rank for one in adapters), default=0)

    def changes(self, names: Sequence[str]) -> bool:
        """Return whether an adapter changes one of these layers of the checkpoint."""
        return any(name in adapter.layers for name in names for adapter in self.adapters)

    def shrinks(self, names: Sequence[str], columns: slice, inputs: int) -> Iterator[Tensor]:
        """Yield `A` of each adapter for layers that were joined, `[width, inputs]`.

        This rank has `columns` of them, which are `inputs`.
        """
        for number in range(len(self.adapters)):
            whole = torch.zeros(self._width(names), inputs)
            for place, name in enumerate(names):
                if (a := self._read(number, name, "A")) is not None:
                    first = place * self._rank
                    whole[first : first + len(a)] = a[:, columns]
            yield whole.to(self._device, self._dtype)

    def expands(self, names: Sequence[str], rows: Sequence[slice]) -> Iterator[Tensor]:
        """Yield scaled `B` of each adapter, `[outputs, width]`; this rank has `rows` of each."""
        sizes = [own.stop - own.start for own in rows]
        for number, adapter in enumerate(self.adapters):
            whole, first = torch.zeros(sum(sizes), self._width(names)), 0
            for place, (name, own, size) in enumerate(zip(names, rows, sizes, strict=True)):
                if (b := self._read(number, name, "B")) is not None:
                    left = place * self._rank
                    layer = adapter.layers[name]
                    scaled = b[own].float() * layer.scaling
                    whole[first : first + size, left : left + layer.rank] = scaled
                first += size
            yield whole.to(self._device, self._dtype)

    def _width(self, names: Sequence[str]) -> int:
        return -(-len(names) * self._rank // WIDTH_UNIT) * WIDTH_UNIT

    def _read(self, number: int, layer: str, letter: str) -> Tensor | None:
        """Return a matrix in the adapter's own dtype; None if the adapter has none here."""
        own = self.adapters[number].layers.get(layer)
        return None if own is None else self._files[number].get_tensor(tensor_of(own.name, letter))
