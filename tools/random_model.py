"""Write folders with random Qwen3 and Granite 4 models, for measurements that ignore the text.

`python -m tools.random_model FOLDER` writes one that any server of Hugging Face folders can
load; the benchmarks that start servers call `write_model`. Equal shapes give equal folders, so two
engines can be given the same one. The text is nonsense: its tokenizer is never trained.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from baton.protocol.errors import BatonError, ConfigError
from tools.gpu.floors import Shape

MAX_POSITIONS = 8192
WEIGHT_SCALE = 0.03
EMBEDDING_SCALE = 0.5
END = "<|end|>"
END_ID = 0
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
)

# Small enough for two CPU cores, and large enough that the arithmetic is most of a step.
SIZES = {
    "30m": Shape("30m", 512, 1536, 8, 8, 4, 64, 8192, is_tied=True),
    "180m": Shape("180m", 1024, 3072, 14, 16, 8, 64, 8192, is_tied=True),
}


def write_model(folder: Path, shape: Shape, device: torch.device) -> None:
    """Write a Qwen3, with weights drawn on `device`. Raises `ConfigError` if the folder exists."""
    config = Qwen3Config(
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        **_sizes(shape),
    )
    _write(folder, lambda: Qwen3ForCausalLM(config), device)


def write_hybrid(folder: Path, shape: Shape) -> None:
    """Write a Granite 4: three of four layers keep a state for each sequence (Mamba-2).

    Raises `ConfigError` if the folder exists.
    """
    config = GraniteMoeHybridConfig(
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        attention_multiplier=1 / shape.head_dim**0.5,
        position_embedding_type="nope",
        layer_types=[
            "attention" if number % 4 == 3 else "mamba"
            for number in range(shape.num_layers)
        ],
        mamba_n_heads=2 * shape.num_heads,
        mamba_d_head=shape.head_dim,
        mamba_d_state=shape.head_dim,
        shared_intermediate_size=shape.intermediate_size,
        num_local_experts=0,
        num_experts_per_tok=0,
        **_sizes(shape),
    )
    model = GraniteMoeHybridForCausalLM
    _write(folder, lambda: model(config), torch.device("cpu"))


def _sizes(shape: Shape) -> dict[str, Any]:
    return {
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "max_position_embeddings": MAX_POSITIONS,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "tie_word_embeddings": shape.is_tied,
        "eos_token_id": END_ID,
        "initializer_range": WEIGHT_SCALE,
    }


def _write(
    folder: Path, make: Callable[[], PreTrainedModel], device: torch.device
) -> None:
    if folder.exists():
        raise ConfigError(f"{folder} exists already: name a new folder")
    torch.manual_seed(0)
    with device:
        model = make()
    with torch.no_grad():
        model.get_input_embeddings().weight *= EMBEDDING_SCALE / WEIGHT_SCALE
    model.to(torch.bfloat16).save_pretrained(folder)
    vocab_size = model.config.vocab_size
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "model_max_length": MAX_POSITIONS,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(
        json.dumps(tokenizer_config, indent=2) + "\n"
    )
    tokenizer(vocab_size).save(str(folder / "tokenizer.json"))


def tokenizer(vocab_size: int) -> Tokenizer:
    """Return a tokenizer with a token per byte, filled up with words that only ids can name."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [END, *alphabet]
    words += [f"w{number}" for number in range(len(words), vocab_size)]
    made = Tokenizer(
        models.BPE({word: number for number, word in enumerate(words)}, [])
    )
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(END, special=True)])
    return made


def in_four_bits(folder: Path) -> None:
    """Quantize a folder's layers as llm-compressor does (W4A16): groups of 128, without zeros."""
    file = folder / "model.safetensors"
    found = {}
    for name, weight in load_file(file).items():
        if not name.endswith("_proj.weight"):
            found[name] = weight
            continue
        groups = weight.float().unflatten(1, (-1, 128))
        scales = (groups.abs().amax(2) / 7.5).bfloat16()
        numbers = (groups / scales.float()[..., None]).round().clamp(-8, 7).int() + 8
        parts = numbers.view(len(weight), -1, 8) << torch.arange(
            0, 32, 4, dtype=torch.int32
        )
        found |= {
            f"{name}_packed": parts.sum(2, dtype=torch.int32),
            f"{name}_scale": scales,
            f"{name}_shape": torch.tensor(weight.shape),
        }
    save_file(found, file, metadata={"format": "pt"})
    how = {
        "num_bits": 4,
        "type": "int",
        "strategy": "group",
        "group_size": 128,
        "symmetric": True,
    }
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": how}},
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.random_model", description=__doc__
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--size", choices=list(SIZES), default="30m", help="parameters, about"
    )
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument(
        "--int4", action="store_true", help="weights of four bits, in groups"
    )
    kinds.add_argument(
        "--hybrid",
        action="store_true",
        help="a Granite 4, with layers that keep a state",
    )
    given = parser.parse_args(arguments)
    try:
        if given.hybrid:
            write_hybrid(given.folder, SIZES[given.size])
        else:
            write_model(given.folder, SIZES[given.size], torch.device("cpu"))
        if given.int4:
            in_four_bits(given.folder)
    except (BatonError, OSError) as error:
        print(f"baton: {error}", file=sys.stderr)
        return 1
    print(given.folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
