"""Log probabilities are exact, in a fixed order, and the same bits in any batch."""

import pytest
import torch
from torch import Tensor

from baton.engine.compute.logprobs import packed_logprobs, packed_prompt
from baton.engine.compute.logprobs import unpacked_logprobs as unpacked
from baton.engine.compute.row_rule import num_threads

NUM_TOP = 5


def logits_of(vocab: int, num_rows: int = 70) -> Tensor:
    generator = torch.Generator().manual_seed(vocab)
    return (torch.randn(num_rows, vocab, generator=generator) * 4).bfloat16().float()  # many ties


@pytest.mark.parametrize("vocab", [997, 1024, 32_003])
def test_a_row_has_the_same_bits_alone_and_in_a_batch(vocab):
    logits, token_ids = logits_of(vocab), torch.arange(70) * 7 % vocab
    batch = packed_logprobs(logits, token_ids, NUM_TOP)
    for threads, offset in ((1, 0), (3, 1)):
        for row in range(0, 70, 9):
            alone = torch.empty(1, vocab + offset)[:, offset:].copy_(logits[row])
            with num_threads(threads):
                found = packed_logprobs(alone, token_ids[row : row + 1], NUM_TOP)
            assert torch.equal(found[0], batch[row])
    with num_threads(3):
        assert torch.equal(packed_prompt(lambda x: x, logits, token_ids, NUM_TOP), batch)


def test_the_values_ranks_and_likeliest_are_those_of_the_softmax():
    logits, token_ids = logits_of(997), torch.arange(70) * 7
    expected = logits.double().log_softmax(-1)
    rows = packed_logprobs(logits, token_ids, NUM_TOP).tolist()
    for values, row, token_id in zip(expected, rows, token_ids.tolist(), strict=True):
        found, own = unpacked(row), float(values[token_id])
        assert abs(found.logprob - own) < 1e-5
        assert found.rank == 1 + int((values > own).sum())
        pairs = [(-logprob, other) for other, logprob in found.top]
        assert pairs == sorted(pairs)  # of equal ones, the lower id comes first
        best = values.topk(NUM_TOP).values.tolist()
        assert [logprob for _, logprob in found.top] == pytest.approx(best, abs=1e-5)
