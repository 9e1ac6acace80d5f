"""Measure embeddings per second, beside sentence-transformers if it is installed.

`python -m tools.embeddings FOLDER` takes a folder of `tools.random_model`, makes a folder of
embeddings of it, and lets both embed the same texts in turn, on all CPUs.
"""

import argparse
import importlib
import importlib.util
import json
import random
import shutil
import statistics
import string
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from baton import LLM

MODULES = (("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize"))
LENGTHS = (16, 512)  # tokens, which are characters here
WARM_UP = 8  # texts
TOLERANCE = 0.02  # of bf16

Embed = Callable[[list[str]], Sequence[Sequence[float]]]


def write_folder(model: Path, folder: Path) -> None:
    """Copy a model's folder, with the files that make its last token the embedding."""
    shutil.copytree(model, folder, dirs_exist_ok=True)
    modules = [
        {
            "idx": index,
            "name": name,
            "path": path,
            "type": f"sentence_transformers.models.{name}",
        }
        for index, (path, name) in enumerate(MODULES)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    hidden = json.loads((folder / "config.json").read_text())["hidden_size"]
    pooling = {"word_embedding_dimension": hidden, "pooling_mode_lasttoken": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    del settings["chat_template"]
    settings |= {"padding_side": "left", "pad_token": settings["eos_token"]}
    file.write_text(json.dumps(settings))


def sentence_transformers(folder: Path, dtype: str) -> Embed | None:
    """Return how that package embeds; None if it is not installed."""
    if importlib.util.find_spec("sentence_transformers") is None:
        return None
    package = importlib.import_module("sentence_transformers")
    keywords = {"dtype": getattr(torch, dtype)}
    model = package.SentenceTransformer(
        str(folder), device="cpu", model_kwargs=keywords
    )

    def embed(texts: list[str]) -> Sequence[Sequence[float]]:
        rows: list[list[float]] = (
            model.encode(texts, convert_to_tensor=True).float().tolist()
        )
        return rows

    return embed


def measure(
    arms: dict[str, Embed], texts: list[str], rounds: int
) -> dict[str, list[float]]:
    """Return embeddings per second of each arm, by round."""
    found: dict[str, list[float]] = {name: [] for name in arms}
    for embed in arms.values():
        embed(texts[:WARM_UP])
    for number in range(rounds):
        # A prefix that is cached would not be computed.
        fresh = [f"{number}{text}" for text in texts]
        rows = {}
        for name, embed in arms.items():
            began_s = time.perf_counter()
            rows[name] = embed(fresh)
            found[name].append(len(fresh) / (time.perf_counter() - began_s))
        first, *others = rows.values()
        for other in others:
            worst = max(
                abs(one - two)
                for ours, theirs in zip(first, other, strict=True)
                for one, two in zip(ours, theirs, strict=True)
            )
            assert worst < TOLERANCE, f"embeddings differ by {worst}"
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.embeddings", description=__doc__
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--texts", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    given = parser.parse_args(arguments)
    source = random.Random(0)
    texts = [
        "".join(source.choices(string.ascii_lowercase, k=source.randint(*LENGTHS)))
        for _ in range(given.texts)
    ]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_folder(given.folder, folder)
        with LLM(folder, dtype=given.dtype, decode=0) as llm:

            def embed(texts: list[str]) -> Sequence[Sequence[float]]:
                return [
                    one.outputs.embedding for one in llm.embed(texts, use_tqdm=False)
                ]

            arms: dict[str, Embed] = {"baton": embed}
            if (other := sentence_transformers(folder, given.dtype)) is not None:
                arms["sentence-transformers"] = other
            found = measure(arms, texts, given.rounds)
    for name, figures in found.items():
        rounds = " ".join(f"{figure:.1f}" for figure in figures)
        print(f"{name}: {statistics.median(figures):.1f} embeddings/s ({rounds})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
