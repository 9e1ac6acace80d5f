"""Copy weights from a checkpoint's pages to a GPU, a piece at a time.

torch's own copy waits while one thread takes the pages in. Here all of torch's threads fill one
buffer, which the GPU then reads by itself, while it still reads the other.
"""

from dataclasses import dataclass
from itertools import cycle

import torch
from torch import Tensor

PIECE_BYTES = 64 << 20


@dataclass(slots=True)
class _Buffer:
    host: Tensor  # [PIECE_BYTES] uint8
    read: torch.cuda.Event | None = None  # by the GPU; None before the first time

    def wait(self) -> None:
        if self.read is not None:
            self.read.synchronize()


class Uploads:
    def __init__(self, device: torch.device, piece_bytes: int = PIECE_BYTES) -> None:
        self._device = device
        self._is_gpu = device.type == "cuda"
        self._piece_bytes = piece_bytes
        pages = [
            torch.empty(piece_bytes, dtype=torch.uint8, pin_memory=self._is_gpu)
            for _ in range(2)
        ]
        self._buffers = cycle([_Buffer(host) for host in pages])

    def copy(self, source: Tensor) -> Tensor:
        """Return a contiguous copy on the device, made on its current stream."""
        target = torch.empty(source.shape, dtype=source.dtype, device=self._device)
        if not source.numel():
            return target
        theirs = source.contiguous().view(-1).view(torch.uint8)
        ours = target.view(-1).view(torch.uint8)
        for first in range(0, len(theirs), self._piece_bytes):
            part = theirs[first : first + self._piece_bytes]
            buffer = next(self._buffers)
            buffer.wait()
            host = buffer.host[: len(part)]
            host.copy_(part)
            ours[first : first + len(part)].copy_(host, non_blocking=True)
            if self._is_gpu:
                buffer.read = torch.cuda.Event()  # type: ignore[no-untyped-call]
                buffer.read.record()
        return target
