"""The random checkpoints are loadable by transformers and worth comparing with."""

from statistics import median

import pytest
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.checkpoints import FAMILIES, model_folder
from tests.support.oracle import Oracle

PROMPT = [10 + (i * i + 7 * i) % 241 for i in range(17)]


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_of_a_checkpoint_is_varied_and_decided(family: str, tie: bool) -> None:
    expected = Oracle(model_folder(family, tie=tie)).greedy(PROMPT, 40)
    assert len(set(expected.token_ids)) >= 20
    assert median(expected.gaps) > 0.3
    assert min(expected.gaps) > 1e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_finds_every_tensor_it_wants_and_no_other(family: str) -> None:
    folder = model_folder(family, shards=2)
    _, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]


def test_the_tokenizer_has_a_text_for_every_id() -> None:
    folder = model_folder("llama")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 1024
    text = "a baton, handed over: 你好"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert AutoTokenizer.from_pretrained(folder).decode(tokenizer.encode(text).ids) == text
