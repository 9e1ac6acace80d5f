"""`SamplingParams` as users of vLLM write them: what is taken, and what is refused and how."""

import copy

import msgspec
import numpy as np
import pytest

from baton import SamplingParams
from baton.protocol.errors import RequestError
from baton.protocol.sampling import EVERYONE, NEUTRAL, Sampling
from baton.router.core.admission import sampling_of
from tests.support.refusals import raises

NOTHING_ASKED: list[dict[str, object]] = [
    {name: v} for name in NEUTRAL for v in NEUTRAL[name]
]
REFUSED: list[tuple[str, object, str]] = [
    ("presence_penalty", 2.5, ""),
    ("repetition_penalty", 0.0, ""),
    ("logprobs", 21, ""),
    ("detokenize", False, "not supported"),
    ("logit_bias", {5: 101.0}, ""),
    ("logit_bias", {"five": 1.0}, "token ids"),
    ("logit_bias", [5], "token ids"),
    ("structured_outputs", {"json": {}, "regex": "a"}, "exactly one"),
    ("structured_outputs", {"jsn": {}}, "unknown field"),
    ("best_of", 2, "not supported"),
    ("n", "2", "an integer"),
    ("n", True, "an integer"),
    ("max_tokens", 2.5, "an integer"),
    ("temperature", "0", "a number"),
    ("top_p", False, "a number"),
    ("ignore_eos", 1, "True or False"),
    ("stop", ["a", 5], "a string or a list of strings"),
    ("stop_token_ids", ["5"], "an integer"),
    ("output_kind", "all", "cumulative, delta or final"),
    ("n", 129, ""),
    ("temperature", float("nan"), ""),
    ("top_p", 0.0, ""),
    ("min_p", -0.1, ""),
    ("top_k", -2, ""),
    ("max_tokens", 0, ""),
    ("min_tokens", 17, ""),
    ("priority", 2**31, ""),
    ("seed", 2**63, ""),
    ("stop", "", ""),
    ("stop_token_ids", [-1], ""),
]


@pytest.mark.parametrize("given", NOTHING_ASKED, ids=str)
def test_a_value_that_asks_for_nothing_is_taken(given):
    params = SamplingParams(seed=1, **given)
    assert sampling_of(params, 16, EVERYONE) == Sampling(1, 16)


def test_a_priority_reaches_the_nodes():
    assert sampling_of(SamplingParams(seed=1, priority=-3), 16, EVERYONE) == Sampling(
        1, 16, priority=-3
    )


@pytest.mark.parametrize(("name", "value", "text"), REFUSED)
def test_a_value_that_cannot_be_served_is_refused_by_name(name, value, text):
    with pytest.raises(RequestError, match=f"{name}.*{text}") as error:
        SamplingParams(**{name: value})
    assert error.value.param == name
    assert (error.value.code == "unsupported") == (text == "not supported")


def test_an_unknown_name_is_refused():
    with pytest.raises(TypeError, match="max_token"):
        SamplingParams(max_token=5)


def test_positional_arguments_stand_in_vllm_s_order():
    params = SamplingParams(
        2, 0.0, 0.0, 1.0, 0.7, 0.9, 40, 0.05, 7, "x", [3], True, 20, 5
    )
    assert params == SamplingParams(
        n=2,
        temperature=0.7,
        top_p=0.9,
        top_k=40,
        min_p=0.05,
        seed=7,
        stop="x",
        stop_token_ids=[3],
        ignore_eos=True,
        max_tokens=20,
        min_tokens=5,
    )


def test_numbers_of_numpy_become_plain_ones_that_can_travel():
    params = SamplingParams(
        n=np.int64(2),
        temperature=np.float32(0.5),
        seed=np.uint8(3),
        max_tokens=np.int32(9),
        stop=("a", "b"),
        stop_token_ids=(np.int64(4), 5),
    )
    plain = SamplingParams(
        n=2,
        temperature=0.5,
        seed=3,
        max_tokens=9,
        stop=["a", "b"],
        stop_token_ids=[4, 5],
    )
    assert params == plain
    encode = msgspec.msgpack.encode
    assert encode(sampling_of(params, 9, EVERYONE)) == encode(
        sampling_of(plain, 9, EVERYONE)
    )


def test_a_clone_is_equal_and_takes_changes_that_are_checked():
    params = SamplingParams(n=2, stop=["a"], temperature=0.5)
    assert params.clone() == params == copy.deepcopy(params)
    changed = params.clone(temperature=0, max_tokens=5)
    assert (changed.temperature, changed.max_tokens, changed.n) == (0, 5, 2)
    assert params.temperature == 0.5
    with raises(RequestError, "invalid_request", "max_tokens"):
        params.clone(max_tokens="5")
    with pytest.raises(AttributeError):
        params.n = 3
