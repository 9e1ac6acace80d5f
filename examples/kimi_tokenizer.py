"""Write tokenizer.json into a folder of Kimi's: `python examples/kimi_tokenizer.py FOLDER`.

Moonshot's folders have `tiktoken.model` and Python code instead. The pattern is read from that
code as text, and nothing of it runs.
"""

import ast
import json
import sys
from base64 import b64decode
from pathlib import Path

from tokenizers import AddedToken, Tokenizer
from transformers.convert_slow_tokenizer import TikTokenConverter


class Converter(TikTokenConverter):
    def __init__(self, ranks, pattern):
        super().__init__("", pattern)
        self._ranks = ranks

    def load_tiktoken_bpe(self, path):
        return self._ranks


def tokenizer_of(folder: Path) -> Tokenizer:
    lines = (folder / "tiktoken.model").read_bytes().splitlines()
    ranks = {
        b64decode(token): int(rank)
        for token, rank in map(bytes.split, filter(None, lines))
    }
    tokenizer = Converter(ranks, pattern_of(folder)).converted()
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    added = {
        int(token_id): fields
        for token_id, fields in config["added_tokens_decoder"].items()
    }
    for token_id in range(len(ranks), max(added) + 1):
        reserved = {
            "content": f"<|reserved_token_{token_id}|>",
            "special": True,
            "normalized": False,
        }
        token = AddedToken(**added.get(token_id, reserved))
        if token.special:
            tokenizer.add_special_tokens([token])
        else:
            tokenizer.add_tokens([token])
    return tokenizer


def pattern_of(folder: Path) -> str:
    """Return the regular expression that splits a text before its pieces are merged."""
    code = ast.parse((folder / "tokenization_kimi.py").read_text(encoding="utf-8"))
    (pattern,) = (
        "|".join(ast.literal_eval(node.value.args[0]))
        for node in ast.walk(code)
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pat_str"
    )
    return pattern


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    tokenizer_of(folder).save(str(folder / "tokenizer.json"))
