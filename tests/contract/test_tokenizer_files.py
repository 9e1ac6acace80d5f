"""A folder's tokenizer is refused where transformers would read text in another way."""

import json

import pytest
from tokenizers import Tokenizer

from baton.protocol.errors import ConfigError
from baton.router.text.special_tokens import check_tokens
from tests.support.small_tokenizers import END, write_tokenizer

TEXT = f"hello <|new|> the end{END} <|other|> x"
NEW = {
    "content": "<|new|>", "lstrip": False, "rstrip": False, "single_word": False,
    "normalized": False, "special": True,
}  # fmt: skip
KNOWN = NEW | {"content": END}
CONFIG, MAP = "tokenizer_config.json", "special_tokens_map.json"
PREFIXED = {"add_prefix_space": True}
# What a folder has besides its tokenizer.json, and whether baton takes it.
CASES: list[tuple[dict[str, dict[str, object]], bool]] = [
    ({}, True),
    ({CONFIG: {"eos_token": END, "pad_token": None}}, True),
    ({CONFIG: {"added_tokens_decoder": {"270": NEW}}}, False),
    ({CONFIG: {"added_tokens_decoder": {"302": KNOWN | {"rstrip": True}}}}, False),
    ({CONFIG: {"sep_token": "<|other|>"}}, False),
    ({CONFIG: {"additional_special_tokens": ["<|new|>"]}}, False),
    ({CONFIG: {"extra_special_tokens": {"image_token": "<|new|>"}}}, False),
    ({CONFIG: {}, MAP: {"pad_token": {"content": "<|other|>"}}}, False),
    ({CONFIG: {}, "added_tokens.json": {"<|new|>": 270}}, False),
    ({CONFIG: PREFIXED}, True),
    ({CONFIG: PREFIXED | {"tokenizer_class": "LlamaTokenizerFast"}}, True),
    ({CONFIG: PREFIXED | {"tokenizer_class": "Qwen2TokenizerFast"}}, False),
    ({CONFIG: {"tokenizer_class": "Qwen2Tokenizer", "add_prefix_space": False}}, True),
]


@pytest.mark.parametrize(("files", "is_taken"), CASES)
def test_a_tokenizer_is_taken_where_transformers_reads_the_same(tmp_path, files, is_taken):
    from transformers import AutoTokenizer

    write_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    for name, content in files.items():
        given = {"tokenizer_class": "PreTrainedTokenizerFast", **content}
        (tmp_path / name).write_text(json.dumps(given if name == CONFIG else content))
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    ours = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert (theirs(TEXT).input_ids == ours.encode(TEXT).ids) is is_taken
    if is_taken:
        check_tokens(tmp_path)
        return
    with pytest.raises(ConfigError, match="not the whole tokenizer") as error:
        check_tokens(tmp_path)
    assert "save_pretrained" in str(error.value)
    theirs.save_pretrained(tmp_path)  # as the message says
    check_tokens(tmp_path)
    ours = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert theirs(TEXT).input_ids == ours.encode(TEXT).ids


@pytest.mark.parametrize("name", ["tokenizer.json", CONFIG, MAP])
def test_a_broken_file_is_named(tmp_path, name):
    write_tokenizer(tmp_path)
    (tmp_path / name).write_text('{"added')
    with pytest.raises(ConfigError, match=f"names: {name}: Input data was truncated"):
        check_tokens(tmp_path)


def test_splitting_special_tokens_is_refused(tmp_path):
    write_tokenizer(tmp_path)
    (tmp_path / CONFIG).write_text('{"split_special_tokens": true}')
    with pytest.raises(ConfigError, match="split_special_tokens is not supported"):
        check_tokens(tmp_path)
