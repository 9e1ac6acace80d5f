"""Weights that go to a device in pieces arrive whole, whatever their type and order."""

import pytest
import torch

from baton.model.loading.uploads import Uploads

PIECE = 64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("shape", [(), (0, 4), (1,), (16,), (3, 7), (5, 16, 2)])
def test_a_copy_has_the_bytes_of_its_source(dtype, shape):
    uploads = Uploads(torch.device("cpu"), PIECE)
    source = torch.randint(0, 200, shape).to(dtype)
    for _ in range(2):
        copied = uploads.copy(source)
        assert (copied.dtype, copied.shape) == (dtype, source.shape)
        assert torch.equal(copied, source)
        assert copied.data_ptr() != source.data_ptr() or not source.numel()


def test_a_part_of_a_tensor_is_copied_in_order():
    source = torch.arange(400.0).view(20, 20)
    for part in (source[3:9], source[:, 5:8], source.T):
        copied = Uploads(torch.device("cpu"), PIECE).copy(part)
        assert copied.is_contiguous()
        assert torch.equal(copied, part)


def test_later_copies_leave_earlier_ones_as_they_are():
    uploads = Uploads(torch.device("cpu"), PIECE)
    sources = [torch.full((n,), float(n)) for n in range(1, 60)]
    copies = [uploads.copy(source) for source in sources]
    assert all(map(torch.equal, copies, sources))
