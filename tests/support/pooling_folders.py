"""Tiny folders of embedding and reranking models, and what transformers computes of them.

They have the files of sentence-transformers, whose formulas `embedding_of` and `score_of` repeat.
"""

import json
import math
from functools import cache
from pathlib import Path
from typing import Unpack

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
)

from baton.protocol.pooling import Pooling
from tests.support.checkpoints import Shape, scratch_folder, write_checkpoint

NAMES: dict[Pooling, str] = {"last": "lasttoken", "mean": "mean", "cls": "cls"}
PROMPTS = {"query": "Instruct: find it\nQuery: ", "document": ""}
# Shows a pair as rerankers do, with the words of the system before it.
PAIR_TEMPLATE = (
    "{% for m in messages if m.role == 'system' %}<i>{{ m.content }}{% endfor %}"
    "{% for m in messages if m.role == 'query' %}<q>{{ m.content }}{% endfor %}"
    "{% for m in messages if m.role == 'document' %}<d>{{ m.content }}{% endfor %}?"
)


def embedding_folder(
    family: str = "qwen3",
    pooling: Pooling = "last",
    *,
    normalizes: bool = True,
    **shape: Unpack[Shape],
) -> Path:
    """A folder whose files lack the head and have the names of the base model."""
    folder = write_checkpoint(scratch_folder(f"embedding-{family}"), family, **shape)
    tensors = load_file(folder / "model.safetensors")
    tensors.pop("lm_head.weight", None)
    bare = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    save_file(bare, folder / "model.safetensors", metadata={"format": "pt"})
    add_modules(folder, pooling, normalizes=normalizes)
    return folder


def add_modules(
    folder: Path, pooling: Pooling = "last", *, normalizes: bool = True
) -> None:
    prefix = "sentence_transformers.models"
    modules = [("", "Transformer"), ("1_Pooling", "Pooling")]
    modules += [("2_Normalize", "Normalize")] if normalizes else []
    write(
        folder / "modules.json",
        [
            {"idx": index, "name": str(index), "path": path, "type": f"{prefix}.{name}"}
            for index, (path, name) in enumerate(modules)
        ],
    )
    (folder / "1_Pooling").mkdir()
    hidden = json.loads((folder / "config.json").read_text())["hidden_size"]
    flags = {
        f"pooling_mode_{name}": False
        for name in ("cls_token", "mean_tokens", "lasttoken")
    }
    chosen = {"last": "lasttoken", "mean": "mean_tokens", "cls": "cls_token"}[pooling]
    flags[f"pooling_mode_{chosen}"] = True
    pooled = {"word_embedding_dimension": hidden, "include_prompt": True, **flags}
    write(folder / "1_Pooling" / "config.json", pooled)
    prompts = {"prompts": PROMPTS, "default_prompt_name": None}
    write(folder / "config_sentence_transformers.json", prompts)


def labels_folder(
    family: str = "qwen3", num_labels: int = 1, **shape: Unpack[Shape]
) -> Path:
    """A folder of a model with a classifier."""
    folder = write_checkpoint(scratch_folder(f"labels-{family}"), family, **shape)
    tensors = load_file(folder / "model.safetensors")
    tensors.pop("lm_head.weight", None)
    config = json.loads((folder / "config.json").read_text())
    hidden = config["hidden_size"]
    generator = torch.Generator().manual_seed(7)
    score = torch.randn(num_labels, hidden, generator=generator) / math.sqrt(hidden)
    save_file(
        tensors | {"score.weight": score},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    stem = config["architectures"][0].removesuffix("ForCausalLM")
    config["architectures"] = [f"{stem}ForSequenceClassification"]
    config["id2label"] = {str(index): f"label {index}" for index in range(num_labels)}
    config["pad_token_id"] = 0
    write(folder / "config.json", config)
    return folder


def reranker_folder(family: str = "qwen3", **shape: Unpack[Shape]) -> Path:
    """A folder whose scores are made of the logits of two tokens, in modules of its own."""
    folder = write_checkpoint(scratch_folder(f"reranker-{family}"), family, **shape)
    prefix = "sentence_transformers.cross_encoder.modules"
    modules = [("", "Transformer"), ("1_LogitScore", "LogitScore")]
    write(
        folder / "modules.json",
        [
            {"idx": index, "name": str(index), "path": path, "type": f"{prefix}.{name}"}
            for index, (path, name) in enumerate(modules)
        ],
    )
    (folder / "1_LogitScore").mkdir()
    write(
        folder / "1_LogitScore" / "config.json",
        {"true_token_id": 700, "false_token_id": 401},
    )
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    write(folder / "tokenizer_config.json", settings | {"chat_template": PAIR_TEMPLATE})
    return folder


def write(file: Path, content: object) -> None:
    file.write_text(json.dumps(content))


@cache
def _base(folder: Path) -> torch.nn.Module:
    model = AutoModel.from_pretrained(folder, dtype=torch.float32)
    return model.eval()


def embedding_of(
    folder: Path,
    token_ids: list[int],
    pooling: Pooling = "last",
    *,
    normalizes: bool = True,
    dimensions: int | None = None,
) -> Tensor:
    """What sentence-transformers returns for a text of these tokens."""
    with torch.inference_mode():
        rows = _base(folder)(input_ids=torch.tensor([token_ids])).last_hidden_state[0]
    row = {"last": rows[-1], "mean": rows.mean(dim=0), "cls": rows[0]}[pooling][
        :dimensions
    ]
    return F.normalize(row, dim=0) if normalizes else row


@cache
def _classifier(folder: Path) -> torch.nn.Module:
    kind = AutoModelForSequenceClassification
    return kind.from_pretrained(folder, dtype=torch.float32).eval()


def labels_of(folder: Path, token_ids: list[int]) -> Tensor:
    with torch.inference_mode():
        return _classifier(folder)(input_ids=torch.tensor([token_ids])).logits[0]


@cache
def _causal(folder: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def score_of(
    folder: Path, token_ids: list[int], yes: int = 700, no: int = 401
) -> float:
    """The probability that a model says yes."""
    with torch.inference_mode():
        logits = _causal(folder)(input_ids=torch.tensor([token_ids])).logits[0, -1]
    return float((logits[yes] - logits[no]).sigmoid())
