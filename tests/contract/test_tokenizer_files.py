"""A folder's tokenizer is refused where transformers would read text in another way."""

import base64
import json
import subprocess
import sys

import pytest
from tokenizers import Tokenizer

from baton.protocol.errors import ConfigError
from baton.router.text.special_tokens import check_tokens
from baton.router.text.tokenizer import Text
from tests.support.small_tokenizers import END, write_tokenizer
from tests.support.sources import REPOSITORY

TEXT = f"hello <|new|> the end{END} <|other|> x"
NEW = {
    "content": "<|new|>",
    "lstrip": False,
    "rstrip": False,
    "single_word": False,
    "normalized": False,
    "special": True,
}
KNOWN = NEW | {"content": END}
CONFIG = "tokenizer_config.json"
MAP = "special_tokens_map.json"
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
def test_a_tokenizer_is_taken_where_transformers_reads_the_same(
    tmp_path, files, is_taken
):
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
    with pytest.raises(ConfigError, match="split_special_tokens"):
        check_tokens(tmp_path)


# In the form of Moonshot's code, which only the real tokenizer runs.
KIMI_CODE = r'''
class TikTokenTokenizer(PreTrainedTokenizer):
    pat_str = "|".join(
        [
            r"""[\p{Han}]+""",
            r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t)?""",
            r"""\p{N}{1,3}""",
            r""" ?[^\s\p{L}\p{N}]+[\r\n]*""",
            r"""\s+(?!\S)""",
            r"""\s+""",
        ]
    )

    def __init__(self):
        self.model = Encoding(pat_str=self.pat_str)
'''
# The tokens behind those of single bytes. `n` is never merged with a part of a Chinese character.
KIMI_MERGES = [
    b"th",
    b"the",
    b" the",
    b"en",
    b"12",
    b"n\xe4",
    "你".encode()[:2],
    "你".encode(),
]


def test_the_example_for_kimi_writes_the_tokenizer_of_a_folder_with_tiktoken_alone(
    tmp_path,
):
    ranks = [bytes([byte]) for byte in range(256)] + KIMI_MERGES
    lines = [
        f"{base64.b64encode(token).decode()} {rank}" for rank, token in enumerate(ranks)
    ]
    (tmp_path / "tiktoken.model").write_text("\n".join(lines) + "\n")
    (tmp_path / "tokenization_kimi.py").write_text(KIMI_CODE)
    first = len(ranks)
    call = NEW | {"content": "<|call|>", "special": False}
    decoder = {str(first): NEW, str(first + 3): call}
    (tmp_path / CONFIG).write_text(json.dumps({"added_tokens_decoder": decoder}))
    with pytest.raises(
        ConfigError, match=r"tiktoken\.model alone; examples/kimi_tokenizer\.py"
    ):
        Text.load(str(tmp_path))
    script = REPOSITORY / "examples" / "kimi_tokenizer.py"
    subprocess.run([sys.executable, script, tmp_path], check=True)
    text = Text.load(str(tmp_path))
    ids = {token: rank for rank, token in enumerate(ranks)}
    expected = [
        *(ids[token] for token in (b"the", b" the", b" ", b"12", b"3", b"4")),
        *(
            ids[token]
            for token in ("你".encode(), "你".encode(), b"the", b"n", "你".encode())
        ),
        first,
        first + 3,
        *(ids[bytes([byte])] for byte in "好".encode()),
    ]
    assert text.encode_now("the the 1234你你then你<|new|><|call|>好") == expected
    assert text.decode(expected, skip_special_tokens=False).endswith(
        "then你<|new|><|call|>好"
    )
    text.close()
