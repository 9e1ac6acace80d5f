"""Random checkpoints that behave like models: varied greedy text and clear winners.

In Hugging Face names and files, so transformers loads the same folder as an oracle. Weights come
from a seed, norm weights and biases are not trivial (one that is forgotten changes the text), and
a byte-level tokenizer covers every id.
"""

import atexit
import itertools
import json
import math
import shutil
import string
import tempfile
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypedDict, Unpack

import msgspec
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from baton.protocol.config import ClusterConfig

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
FAMILIES = tuple(ARCHITECTURES)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }} {{ c.function.arguments | tojson }}"
    "{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class Shape(TypedDict, total=False):
    """What may be asked of a checkpoint; `extra` goes into config.json as it is (JSON text)."""

    seed: int
    num_layers: int
    dtype: str
    shards: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    tie: bool
    vocab_size: int
    max_position_embeddings: int
    attention_bias: bool
    mlp_bias: bool
    sliding_window: int | None
    eos_token_id: int | None
    extra: str


@dataclass(frozen=True)
class _Model:
    family: str
    seed: int = 0
    num_layers: int = 4
    dtype: str = "float32"
    shards: int = 1
    hidden_size: int = 128
    intermediate_size: int = 256
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 0  # 0: hidden_size // num_heads
    tie: bool = False
    vocab_size: int = 1024
    max_position_embeddings: int = 8192
    attention_bias: bool = False
    mlp_bias: bool = False
    sliding_window: int | None = None
    eos_token_id: int | None = None
    extra: str = "{}"

    @property
    def width(self) -> int:
        """Of one head."""
        return self.head_dim or self.hidden_size // self.num_heads


def write_checkpoint(folder: Path, family: str, **shape: Unpack[Shape]) -> Path:
    """A folder that `transformers` and baton load. The same arguments give the same bytes."""
    model = _Model(family, **shape)
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", _config(model))
    generation = {"bos_token_id": 0, "eos_token_id": model.eos_token_id}
    _write_json(folder / "generation_config.json", generation)
    _write_tensors(folder, _tensors(model), model.shards)
    write_tokenizer(folder, model.vocab_size)
    return folder


@cache
def _scratch() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="baton-checkpoints-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def scratch_folder(name: str) -> Path:
    """A new folder that is removed at the end of the process."""
    return Path(tempfile.mkdtemp(prefix=f"{name}-", dir=_scratch()))


_written: dict[tuple[object, ...], Path] = {}


def model_folder(family: str, **shape: Unpack[Shape]) -> Path:
    """`write_checkpoint` once per process for the same arguments; read it, do not change it."""
    key = tuple(asdict(_Model(family, **shape)).values())
    if key not in _written:
        _written[key] = write_checkpoint(
            _scratch() / f"{family}-{len(_written)}", family, **shape
        )
    return _written[key]


def tiny_cluster(checkpoint: str | Path = "qwen3", **sections: Any) -> ClusterConfig:
    """Return the settings of a cluster that serves a checkpoint, which may be named by its family.

    The other sections are written as in a file of settings. Nodes compute with one thread, since
    they share the cores with many others.
    """
    folder = checkpoint if isinstance(checkpoint, Path) else model_folder(checkpoint)
    model = {"path": str(folder), "served_model_name": "tiny"}
    engine = {"threads": 1, **sections.pop("engine", {})}
    return msgspec.convert(
        {"model": model, "engine": engine, **sections}, ClusterConfig
    )


def _config(model: _Model) -> dict[str, object]:
    config: dict[str, object] = {
        "architectures": [ARCHITECTURES[model.family]],
        "model_type": model.family,
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.width,
        "hidden_act": "silu",
        "max_position_embeddings": model.max_position_embeddings,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": model.tie,
        "dtype": model.dtype,
        "bos_token_id": 0,
        "eos_token_id": model.eos_token_id,
    }
    if model.family in ("llama", "qwen3"):
        config["attention_bias"] = model.attention_bias
    if model.family == "llama":
        config["mlp_bias"] = model.mlp_bias
    else:
        config["sliding_window"] = model.sliding_window
    if model.family.startswith("qwen"):
        config["use_sliding_window"] = model.sliding_window is not None
        config["max_window_layers"] = 0
    extra: dict[str, object] = json.loads(model.extra)
    return config | extra


def _tensors(model: _Model) -> dict[str, Tensor]:
    """Scales found by trial: attention matters, no token is repeated, logits are far apart."""
    hidden = model.hidden_size
    width = model.width
    random = _Random(model)
    tensors = {
        "model.embed_tokens.weight": random.matrix(model.vocab_size, hidden, 0.5),
        "model.norm.weight": random.norm(hidden),
    }
    if not model.tie:
        tensors["lm_head.weight"] = random.matrix(
            model.vocab_size, hidden, 4 / math.sqrt(hidden)
        )
    queries = model.num_heads * width
    keys = model.num_kv_heads * width
    linear = {
        "self_attn.q_proj": (
            queries,
            hidden,
            model.attention_bias or model.family == "qwen2",
        ),
        "self_attn.k_proj": (
            keys,
            hidden,
            model.attention_bias or model.family == "qwen2",
        ),
        "self_attn.v_proj": (
            keys,
            hidden,
            model.attention_bias or model.family == "qwen2",
        ),
        "self_attn.o_proj": (hidden, queries, model.attention_bias),
        "mlp.gate_proj": (model.intermediate_size, hidden, model.mlp_bias),
        "mlp.up_proj": (model.intermediate_size, hidden, model.mlp_bias),
        "mlp.down_proj": (hidden, model.intermediate_size, model.mlp_bias),
    }
    for layer in range(model.num_layers):
        prefix = f"model.layers.{layer}."
        tensors[prefix + "input_layernorm.weight"] = random.norm(hidden)
        tensors[prefix + "post_attention_layernorm.weight"] = random.norm(hidden)
        for name, (outputs, inputs, has_bias) in linear.items():
            scale = 1.7 / math.sqrt(hidden)
            tensors[f"{prefix}{name}.weight"] = random.matrix(outputs, inputs, scale)
            if has_bias:
                tensors[f"{prefix}{name}.bias"] = random.matrix(1, outputs, 0.1)[
                    0
                ].clone()
        if model.family == "qwen3":
            tensors[prefix + "self_attn.q_norm.weight"] = random.norm(width, 2.0)
            tensors[prefix + "self_attn.k_norm.weight"] = random.norm(width, 2.0)
    return tensors


class _Random:
    def __init__(self, model: _Model) -> None:
        self._generator = torch.Generator().manual_seed(model.seed)
        self._dtype: torch.dtype = getattr(torch, model.dtype)

    def matrix(self, rows: int, columns: int, scale: float) -> Tensor:
        values = torch.randn(rows, columns, generator=self._generator)
        return (values * scale).to(self._dtype)

    def norm(self, size: int, mean: float = 1.0) -> Tensor:
        values = torch.randn(size, generator=self._generator)
        return (mean * (1 + 0.1 * values)).to(self._dtype)


def _write_tensors(folder: Path, tensors: dict[str, Tensor], shards: int) -> None:
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    places: dict[str, str] = {}
    names = sorted(tensors)
    for number in range(shards):
        file = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        part = names[number::shards]
        save_file(
            {name: tensors[name] for name in part},
            folder / file,
            metadata={"format": "pt"},
        )
        places |= dict.fromkeys(part, file)
    size = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": places}
    _write_json(folder / "model.safetensors.index.json", index)


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Bytes, then pairs and triples of letters, until every id has a text."""
    vocabulary = {token: index for index, token in enumerate(SPECIAL)}
    for symbol in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocabulary[symbol] = len(vocabulary)
    assert vocab_size >= len(vocabulary), "the tokenizer needs an id for every byte"
    merges: list[tuple[str, str]] = []
    letters = string.ascii_lowercase
    for letter_count in (2, 3):
        for word in map("".join, itertools.product(letters, repeat=letter_count)):
            if len(vocabulary) < vocab_size:
                vocabulary[word] = len(vocabulary)
                merges.append((word[:-1], word[-1]))
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL[0],
        "eos_token": SPECIAL[2],
        "chat_template": CHAT_TEMPLATE,
    }
    _write_json(folder / "tokenizer_config.json", settings)


def _write_json(file: Path, content: dict[str, object]) -> None:
    file.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
