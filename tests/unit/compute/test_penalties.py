"""Penalties and biases against their formulas over the whole vocabulary."""

from collections import Counter

import torch
from hypothesis import given
from hypothesis import strategies as st

from baton.engine.compute.penalties import CountedTokens, packed, penalize
from baton.protocol.sampling import Penalties

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


@given(st.lists(st.tuples(PENALTIES, TOKENS, TOKENS, st.integers(0, 150)), min_size=1, max_size=3))
def test_they_are_what_their_formulas_say_however_the_tokens_came(
    cases: list[tuple[Penalties, list[int], list[int], int]],
) -> None:
    logits = torch.randn(2 * len(cases), VOCAB, generator=torch.Generator().manual_seed(3)) * 9
    expected, by_sample = logits.double(), {}
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
