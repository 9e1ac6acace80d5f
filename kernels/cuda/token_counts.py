"""Penalties and biases on a GPU, from counts of tokens that lie in its memory.

A sequence has a row with a word for each token id: whether a prompt with a repetition penalty has
it (bit 0), how often the output has it, and 1 plus the index of its bias. A step counts the token
that it has computed, so the host need not know it. It works under CUDA graph capture. The torch
code of the engine's `penalties` defines what a row computes.
"""

# ruff: noqa: N803, PLR0913, PLR0917
# Compile-time values are in capitals, as in Triton's own code; arguments are pointers and strides.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.kernels import constants
from baton.kernels.launch import Launcher, cdiv

CHUNK = 1024  # words of one program
_MAX_COUNT = tl.constexpr(constants.MAX_COUNT)
_BIAS_SHIFT = tl.constexpr(constants.BIAS_SHIFT)
_BIAS_MASK = tl.constexpr(constants.BIAS_MASK)


def penalize_counted(
    logits: Tensor,  # [num_samples, vocab] fp32 or bf16
    words: Tensor,  # [num_rows, vocab] int32
    # [num_rows, 3] float64: presence, frequency and repetition penalty.
    factors: Tensor,
    biases: Tensor,  # [num_rows, num_biases] float64
    # [num_samples, 2] int32: the row, -1 for none; whether its token is output.
    counted: Tensor,
    token_ids: Tensor,  # [num_samples] int64: the token that was computed
) -> Tensor:
    """Count the tokens; return the logits as their words change them, in fp64, rounded to fp32.

    Only samples that have a row have logits in what is returned. They may share a row unless their
    token is counted.
    """
    num_samples, vocab = logits.shape
    assert logits.stride(1) == 1, "the logits of a row are contiguous"
    assert words.shape[1] == vocab
    assert all(
        given.is_contiguous() for given in (words, factors, biases, counted, token_ids)
    )
    changed = logits.new_empty((num_samples, vocab), dtype=torch.float32)
    _launch_penalize(
        (cdiv(vocab, CHUNK), num_samples, 1),
        logits,
        changed,
        words,
        factors,
        biases,
        counted,
        token_ids,
        vocab,
        biases.shape[1],
        logits.stride(0),
        CHUNK=CHUNK,
        num_warps=4,
        num_stages=1,
        enable_fp_fusion=False,
    )
    return changed


@triton.jit(do_not_specialize=["counted_ptr", "token_ptr"])
def _penalize_kernel(
    logits_ptr: tl.tensor,
    changed_ptr: tl.tensor,
    word_ptr: tl.tensor,
    factor_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    counted_ptr: tl.tensor,
    token_ptr: tl.tensor,
    vocab: tl.tensor,
    num_biases: tl.tensor,
    stride_logits: tl.tensor,
    CHUNK: tl.constexpr,
) -> None:
    sample = tl.program_id(1).to(tl.int64)
    row = tl.load(counted_ptr + 2 * sample).to(tl.int64)
    if row >= 0:
        token = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
        word = tl.load(word_ptr + row * vocab + token, mask=token < vocab, other=0)
        count = (word >> 1) & _MAX_COUNT
        is_counted = tl.load(counted_ptr + 2 * sample + 1) > 0
        is_new = (
            (token == tl.load(token_ptr + sample)) & is_counted & (count < _MAX_COUNT)
        )
        count = tl.where(is_new, count + 1, count)
        word = tl.where(is_new, word + 2, word)
        tl.store(word_ptr + row * vocab + token, word, mask=is_new)
        x = tl.load(
            logits_ptr + sample * stride_logits + token, mask=token < vocab, other=0.0
        )
        x = x.to(tl.float64)
        bias = (word >> _BIAS_SHIFT) & _BIAS_MASK
        x += tl.load(bias_ptr + row * num_biases + bias - 1, mask=bias > 0, other=0.0)
        presence = tl.load(factor_ptr + 3 * row)
        frequency = tl.load(factor_ptr + 3 * row + 1)
        repetition = tl.load(factor_ptr + 3 * row + 2)
        is_seen = (count > 0) | ((word & 1) > 0)
        x = tl.where(is_seen, tl.where(x > 0, x / repetition, x * repetition), x)
        x -= tl.where(count > 0, frequency * count.to(tl.float64) + presence, 0.0)
        tl.store(
            changed_ptr + sample * vocab + token, x.to(tl.float32), mask=token < vocab
        )


_launch_penalize = Launcher(_penalize_kernel)
