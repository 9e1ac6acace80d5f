"""A draw is right in distribution, and a pure function of its row, in torch and compiled.

So are penalties, against their formulas over the whole vocabulary, and log probabilities, in a
fixed order.
"""

import itertools
import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from baton.kernels.cpu.functions import CpuSampler
from baton.kernels.cpu.library import load_library
from baton.model.batch_invariance.row_rule import num_threads
from baton.model.sampling.logprobs import packed_logprobs, packed_prompt
from baton.model.sampling.logprobs import unpacked_logprobs as unpacked
from baton.model.sampling.penalties import CountedTokens, packed, penalize
from baton.model.sampling.sampler import (
    Sampler,
    SampleRow,
    apply_masks,
    apply_masks_on_device,
)
from baton.model.sampling.sampler import compiled as compiled_kernel
from baton.protocol.sampling import Penalties, Sampling

EOS = 3


def compiled() -> Sampler:
    library = load_library(is_bf16=False, progress=lambda *_: None)
    return Sampler((EOS,), compiled_kernel(CpuSampler(library)))


@pytest.fixture(params=["torch", "compiled"], scope="module")
def sampler(request):
    return compiled() if request.param == "compiled" else Sampler((EOS,))


def row(
    position: int = 10, *, choice: int = 0, num_output_tokens: int = 5, **fields: float
) -> SampleRow:
    settled: dict[str, object] = {"seed": 7, "max_tokens": 100, **fields}
    return SampleRow(Sampling(**settled), choice, position, num_output_tokens)


def logits_of(num_rows: int, vocab: int, seed: int = 0) -> Tensor:
    return (
        torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(seed))
        * 1.5
    )


def draws(sampler: Sampler, logits: Tensor, num: int, **fields: float) -> Counter[int]:
    """`num` draws from one distribution, a position each."""
    rows = [row(position, **fields) for position in range(num)]
    return Counter(sampler.sample_rows(logits.expand(num, -1).clone(), rows))


def assert_fits(seen: Counter[int], probabilities: Tensor, num: int) -> None:
    """Every count lies within five standard deviations of its expectation."""
    assert sum(seen.values()) == num
    for token, probability in enumerate(probabilities.tolist()):
        spread = math.sqrt(num * probability * (1 - probability))
        allowed = 5 * spread + 1 if probability > 0 else 0
        assert abs(seen[token] - num * probability) <= allowed, (
            f"token {token}: {seen[token]}"
        )


@pytest.mark.parametrize(
    ("temperature", "seed"), [(0.5, 0), (1.0, 1), (1.0, 2**62), (2.0, -5)]
)
def test_draws_follow_the_softmax_at_that_temperature(sampler, temperature, seed):
    logits = logits_of(1, 50)
    seen = draws(sampler, logits, 20_000, temperature=temperature, seed=seed)
    assert_fits(seen, torch.softmax(logits[0] / temperature, -1), 20_000)


@pytest.mark.parametrize("vary", ["seed", "choice"])
def test_draws_of_other_seeds_and_choices_are_independent(sampler, vary):
    logits = logits_of(1, 30, seed=3)
    num = 20_000
    rows = [row(4, **{vary: value}) for value in range(num)]
    seen = Counter(sampler.sample_rows(logits.expand(num, -1).clone(), rows))
    assert_fits(seen, torch.softmax(logits[0], -1), num)


def test_neighbouring_positions_are_not_correlated(sampler):
    num = 20_000
    logits = torch.zeros(1, 6)
    rows = [row(position) for position in range(num)]
    tokens = sampler.sample_rows(logits.expand(num, -1).clone(), rows)
    pairs = Counter(6 * one + other for one, other in itertools.pairwise(tokens))
    assert_fits(pairs, torch.full((36,), 1 / 36), num - 1)


def kept_by_reference(logits: Tensor, sampling: Sampling) -> Tensor:
    """The distribution after the filters, the slow and plain way."""
    probabilities = torch.softmax(logits.double() / sampling.temperature, -1)
    kept = probabilities >= sampling.min_p * probabilities.max()
    if sampling.top_k:
        order = torch.where(kept, probabilities, 0).argsort(
            descending=True, stable=True
        )
        kept[order[sampling.top_k :]] = False
    left = torch.where(kept, probabilities, 0)
    left /= left.sum()
    order = left.argsort(descending=True, stable=True)
    before = left[order].cumsum(0) - left[order]
    kept[order[before >= sampling.top_p]] = False
    left = torch.where(kept, left, 0)
    return left / left.sum()


@pytest.mark.parametrize(
    "fields",
    [
        {"top_k": 5},
        {"top_k": 1},
        {"top_p": 0.7},
        {"top_p": 0.05},
        {"min_p": 0.1},
        {"top_k": 12, "top_p": 0.8},
        {"top_k": 12, "top_p": 0.9, "min_p": 0.03, "temperature": 1.7},
    ],
)
def test_filters_leave_what_their_definitions_say(sampler, fields):
    logits = logits_of(1, 60, seed=5)
    num = 20_000
    seen = draws(sampler, logits, num, **fields)
    expected = kept_by_reference(logits[0], row(**fields).sampling)
    if int((expected > 0).sum()) == 1:
        assert seen == {int(expected.argmax()): num}
    else:
        assert_fits(seen, expected, num)


def test_a_nucleus_larger_than_the_first_look_is_kept_whole(sampler):
    vocab = 3000
    logits = torch.linspace(0, 0.1, vocab)[None]
    seen = draws(sampler, logits, 4000, top_p=0.9)
    expected = kept_by_reference(logits[0], row(top_p=0.9).sampling)
    assert int((expected > 0).sum()) > 2048
    assert all(expected[token] > 0 for token in seen)
    assert len(seen) > 1500


def test_equals_at_the_edge_of_a_filter_stay_together(sampler):
    logits = torch.tensor([[0.0, 2.0, 2.0, 2.0, -1.0]])
    assert set(draws(sampler, logits, 500, top_k=2)) == {1, 2, 3}
    assert set(draws(sampler, logits, 500, top_p=0.4)) == {1, 2, 3}


def test_greedy_takes_the_lowest_id_among_equals(sampler):
    logits = torch.tensor([[0.0, 5.0, 5.0, 1.0], [7.0, 7.0, 7.0, 7.0]])
    assert sampler.sample_rows(logits, [row(temperature=0.0)] * 2) == [1, 0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_end_is_sampled_before_min_tokens(sampler, temperature):
    logits = torch.zeros(1, 8)
    logits[0, EOS] = 30.0
    logits[0, 5] = 29.0
    early = SampleRow(Sampling(1, 9, 4, temperature, stop_token_ids=(5, 999)), 0, 12, 3)
    late = SampleRow(early.sampling, 0, 13, 4)
    tokens = sampler.sample_rows(logits.expand(2, -1).clone(), [early, late])
    assert tokens[0] not in (EOS, 5)
    assert tokens[1] in (EOS, 5)


def test_an_empty_batch_gives_nothing(sampler):
    assert sampler.sample_rows(torch.zeros(0, 10), []) == []


SAMPLINGS = st.builds(
    Sampling,
    seed=st.integers(-(2**63), 2**63 - 1),
    max_tokens=st.just(100),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.5]),
    top_k=st.sampled_from([0, 1, 7, 40, 100_000]),
    top_p=st.sampled_from([1e-9, 0.2, 0.9, 0.9999, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 1.0]),
)
ROWS = st.builds(
    SampleRow,
    SAMPLINGS,
    st.integers(0, 127),
    st.integers(0, 10**6),
    st.integers(0, 100),
)


@given(
    st.lists(ROWS, min_size=1, max_size=9),
    st.randoms(use_true_random=False),
    st.integers(1, 9),
)
def test_a_row_draws_the_same_alone_and_in_any_batch(sampler, rows, random, seed):
    logits = logits_of(len(rows), 1237, seed)
    together = sampler.sample_rows(logits.clone(), rows)
    alone = [
        sampler.sample_rows(logits[i : i + 1].clone(), [rows[i]])[0]
        for i in range(len(rows))
    ]
    assert together == alone
    order = list(range(len(rows)))
    random.shuffle(order)
    mixed = sampler.sample_rows(logits[order].clone(), [rows[i] for i in order])
    assert mixed == [together[i] for i in order]


SHAPES = [(7, 1.5), (16, 0.0), (301, 0.1), (1237, 6.0), (1237, 0.5), (50_257, 1.5)]


@pytest.mark.parametrize(("vocab", "spread"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_draws_the_tokens_that_torch_draws(vocab, spread, dtype):
    """Every combination of filters; bf16 gives equal logits, and some tokens cannot be drawn."""
    filters = itertools.product(
        [0.0, 0.3, 1.7], [0, 1, 40], [0.0, 0.02, 1.0], [0.05, 0.9, 1.0]
    )
    rows = [
        row(
            number,
            seed=number - 9,
            temperature=t,
            top_k=k,
            min_p=m,
            top_p=p,
            choice=number % 5,
        )
        for number, (t, k, m, p) in enumerate(filters)
    ]
    logits = (logits_of(len(rows), vocab) * spread).to(dtype).float()
    logits[:, ::5] = -math.inf
    assert compiled().sample_rows(logits.clone(), rows) == Sampler().sample_rows(
        logits, rows
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_logits_that_say_nothing_still_give_a_token(sampler, temperature, value):
    assert sampler.sample_rows(
        torch.full((1, 20), value), [row(temperature=temperature)]
    ) == [0]


def test_threads_do_not_change_a_token(monkeypatch):
    logits = logits_of(37, 9001)
    rows = [row(place, top_p=0.9) for place in range(37)]
    sampler = compiled()
    expected = sampler.sample_rows(logits, rows)
    for number in (2, 3, 4):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=number: count)
        assert sampler.sample_rows(logits, rows) == expected


PINNED = [1, 38, 54, 57, 17, 62, 33, 3]


def test_draws_are_pinned_across_releases(sampler):
    """Nodes of two versions may continue one another's sequences."""
    rows = [
        row(position, choice=position % 3, seed=position - 4) for position in range(8)
    ]
    assert sampler.sample_rows(torch.zeros(8, 64), rows) == PINNED


def test_masks_hide_ids_on_the_host_as_on_a_device():
    allowed = np.random.default_rng(1).random((3, 1000)) < 0.3
    packed = np.packbits(np.pad(allowed, ((0, 0), (0, 24))), axis=1, bitorder="little")
    masks = torch.from_numpy(packed.view(np.int32))
    masked = torch.tensor([4, 0, 2])
    logits = torch.randn(5, 1000)
    expected = logits.clone()
    expected[masked] = expected[masked].where(torch.from_numpy(allowed), -torch.inf)
    for apply in (apply_masks, apply_masks_on_device):
        hidden = logits.clone()
        apply(hidden, masked, masks)
        assert torch.equal(hidden, expected)


VOCAB = 200
TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=150)
PENALTIES = st.builds(
    Penalties,
    st.sampled_from([0.0, 0.5, -2.0]),
    st.sampled_from([0.0, 0.3, -1.7]),
    st.sampled_from([1.0, 1.3, 0.7]),
    st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100)).map(
        lambda biases: tuple(biases.items())
    ),
)


def changed(
    logits: torch.Tensor, penalties: Penalties, prompt: list[int], output: list[int]
) -> None:
    """Change one row as the formulas say."""
    counts = Counter(output)
    for token_id, bias in penalties.bias:
        logits[token_id] += bias
    for token_id in {*prompt, *output} if penalties.repetition != 1.0 else ():
        penalty = penalties.repetition
        logits[token_id] *= penalty if logits[token_id] <= 0 else 1 / penalty
    for token_id, count in counts.items():
        logits[token_id] -= penalties.presence + count * penalties.frequency


@given(
    st.lists(
        st.tuples(PENALTIES, TOKENS, TOKENS, st.integers(0, 150)),
        min_size=1,
        max_size=3,
    )
)
def test_they_are_what_their_formulas_say_however_the_tokens_came(cases):
    logits = (
        torch.randn(2 * len(cases), VOCAB, generator=torch.Generator().manual_seed(3))
        * 9
    )
    expected = logits.double()
    by_sample = {}
    for index, (penalties, prompt, output, cut) in enumerate(cases):
        counted = CountedTokens(penalties)
        for part in (prompt[:cut], prompt[cut:]):
            counted.add_prompt(part)
        for part in (output[:cut], output[cut:]):
            counted.add(part)
        for sample in (2 * index, 2 * index + 1):  # two choices share the state
            by_sample[sample] = counted
            changed(expected[sample], penalties, prompt, output)
    places, changes = packed(by_sample)
    penalize(logits, torch.from_numpy(places), torch.from_numpy(changes))
    torch.testing.assert_close(logits, expected.float())


NUM_TOP = 5


def tied_logits(vocab: int, num_rows: int = 70) -> Tensor:
    generator = torch.Generator().manual_seed(vocab)
    # Many ties.
    return (torch.randn(num_rows, vocab, generator=generator) * 4).bfloat16().float()


@pytest.mark.parametrize("vocab", [997, 1024, 32_003])
def test_a_row_has_the_same_bits_alone_and_in_a_batch(vocab):
    logits = tied_logits(vocab)
    token_ids = torch.arange(70) * 7 % vocab
    batch = packed_logprobs(logits, token_ids, NUM_TOP)
    for threads, offset in ((1, 0), (3, 1)):
        for row in range(0, 70, 9):
            alone = torch.empty(1, vocab + offset)[:, offset:].copy_(logits[row])
            with num_threads(threads):
                found = packed_logprobs(alone, token_ids[row : row + 1], NUM_TOP)
            assert torch.equal(found[0], batch[row])
    with num_threads(3):
        assert torch.equal(
            packed_prompt(lambda x: x, logits, token_ids, NUM_TOP), batch
        )


def test_the_values_ranks_and_likeliest_are_those_of_the_softmax():
    logits = tied_logits(997)
    token_ids = torch.arange(70) * 7
    expected = logits.double().log_softmax(-1)
    rows = packed_logprobs(logits, token_ids, NUM_TOP).tolist()
    for values, row, token_id in zip(expected, rows, token_ids.tolist(), strict=True):
        found = unpacked(row)
        own = float(values[token_id])
        assert abs(found.logprob - own) < 1e-5
        assert found.rank == 1 + int((values > own).sum())
        pairs = [(-logprob, other) for other, logprob in found.top]
        assert pairs == sorted(pairs)  # of equal ones, the lower id comes first
        best = values.topk(NUM_TOP).values.tolist()
        assert [logprob for _, logprob in found.top] == pytest.approx(best, abs=1e-5)
