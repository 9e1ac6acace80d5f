"""Decide whether baton computes a model of transformers exactly, before its weights are loaded.

A small random copy of the model, with the same attention, is computed twice: by transformers alone,
and in chunks beside another sequence with keys and values in paged blocks. A model whose state is
more than keys and values, or whose masks are more than causality and windows, differs or does not
run. There is no list of models.
"""

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.initialization import no_init_weights

from baton.model.config.reading import end_token_ids
from baton.model.config.transformers_config import (
    TransformersConfig,
    check_for_transformers,
)
from baton.model.layers.attention import PlainBackend
from baton.model.layers.linear import Linear
from baton.model.layers.rotary import unrotated
from baton.model.tensor_parallel import SingleRank
from baton.model.transformers_code.transformers_decoder import (
    EXPERTS,
    LOADING,
    MODEL_ERRORS,
    TRIAL_CUTS,
    PagedAttention,
    TransformersDecoder,
    heads_of,
    in_chunks,
    one_line,
    silence,
    trial_ids,
    with_row_linears,
)
from baton.protocol.errors import ConfigError

# A layer of another kind keeps another state, or sees other tokens.
KINDS = {"full_attention", "sliding_attention"}
# Of the largest logit, in fp32; a mask or a state that is lost gives 1e-2.
LARGEST_ERROR = 1e-3
BLOCK_SIZE = 16
VOCAB = 512
WIDTH = 64
EXPERT_WIDTH = 16
SHORT = 40
_WIDTHS = re.compile(r"intermediate|ffn|n_inner|mlp_hidden")
# Lengths beyond which a model computes in another way; a trial has to cross them.
_LENGTHS = re.compile(
    r"sliding_window$|chunk_size|window_size|floor_scale|topk$|original_max_position_embeddings"
)
_PERIODS = re.compile(
    r"interval|pattern|period|every|_step|freq|offset|first_k|start_index"
)


def examine(folder: Path, max_model_len: int) -> TransformersConfig:
    """Return what the model's attention stores.

    Raises a one-line `ConfigError` for a model that would be computed wrongly.
    """
    architecture, dtype = check_for_transformers(folder)
    silence()
    try:
        config = AutoConfig.from_pretrained(
            folder, trust_remote_code=False, local_files_only=True
        )
        text = config.get_text_config()
        if others := set(getattr(text, "layer_types", None) or ()) - KINDS:
            raise ConfigError(f"it has layers of the kind {', '.join(sorted(others))}")
        _check_longrope(text, max_model_len)
        with LOADING, no_init_weights():  # `_randomise` gives them all
            model = AutoModelForCausalLM.from_config(
                small(text),
                dtype=torch.float32,
                attn_implementation="eager",
                **EXPERTS["cpu"],
            )
        heads, kv_heads, width = _compare(
            model.eval().requires_grad_(requires_grad=False)
        )
        limit = int(getattr(text, "max_position_embeddings", None) or max_model_len)
        if not limit:
            raise ConfigError(
                "config.json names no max_position_embeddings: set model.max_model_len"
            )
    except ConfigError as error:
        raise ConfigError(
            f"{folder}: {architecture} cannot run: {error.message}"
        ) from None
    except MODEL_ERRORS as error:
        raise ConfigError(
            f"{folder}: {architecture} cannot run with paged attention: {one_line(error)}"
        ) from error
    return TransformersConfig(
        architecture,
        text.vocab_size,
        text.num_hidden_layers,
        heads,
        kv_heads,
        width,
        limit,
        "bfloat16" if dtype == "bfloat16" else "float32",
        _ends(folder, config, text),
    )


def small(text: Any) -> Any:
    """Return the configuration with the same attention, but few layers and narrow MLPs."""
    fields = text.to_dict()
    layers = text.num_hidden_layers
    depth = _depth(fields, layers)
    if fields.get("num_kv_shared_layers"):  # layers at the end use the keys of others
        fields["num_kv_shared_layers"] = (
            depth if 2 * depth < layers else fields["num_kv_shared_layers"]
        )
        depth = min(2 * depth, layers)
    for name, value in fields.items():
        if isinstance(value, (list, str)) and len(value) == layers:
            kept = value[:depth]
            fields[name] = (
                kept if isinstance(kept, str) else [_smaller(name, one) for one in kept]
            )
        elif name.endswith("token_id"):
            fields[name] = None if not isinstance(value, int) else min(value, 2)
        elif isinstance(value, dict):
            fields[name] = _shortened(
                {key: of for key, of in value.items() if not _is_layer(key, depth)}
            )
        else:
            fields[name] = _smaller(name, value)
    fields[text.attribute_map.get("num_hidden_layers", "num_hidden_layers")] = depth
    return type(text)(**fields)


def _is_layer(key: object, first: int) -> bool:
    return str(key).isdecimal() and int(str(key)) >= first


def _smaller(name: str, value: Any) -> Any:
    if not isinstance(value, int) or isinstance(value, bool):
        return value
    if name.startswith("vocab_size"):
        return min(value, VOCAB)
    if _LENGTHS.search(name):
        return min(value, SHORT)
    if _WIDTHS.search(name):
        return min(value, EXPERT_WIDTH if "moe" in name or "expert" in name else WIDTH)
    return value


def _shortened(rope: dict[str, Any]) -> dict[str, Any]:
    if "longrope" in (rope.get("rope_type"), rope.get("type")):
        return rope
    return {
        name: _shortened(value)
        if isinstance(value, dict)
        else _smaller(str(name), value)
        for name, value in rope.items()
    }


def _depth(fields: dict[str, Any], layers: int) -> int:
    """Return how many layers show every kind of layer."""
    listed = [
        value
        for value in fields.values()
        if isinstance(value, (list, str)) and len(value) == layers
    ]
    kinds = [repr(kind) for kind in zip(*listed, strict=True)]
    depth = max((kinds.index(kind) + 1 for kind in set(kinds)), default=1)
    for name, value in fields.items():
        if isinstance(value, int) and _PERIODS.search(name) and value < layers:
            depth = max(depth, value + 1)
    return min(max(depth, 2), layers)


def _check_longrope(text: Any, max_model_len: int) -> None:
    """Refuse lengths at which transformers' angles depend on the other sequences of a batch."""
    limit: float = (
        max_model_len or getattr(text, "max_position_embeddings", None) or math.inf
    )
    ropes = list(_ropes(getattr(text, "rope_parameters", None) or {}))
    for rope in ropes:
        if (rope.get("rope_type") or rope.get("type")) != "longrope":
            continue
        short = rope.get("original_max_position_embeddings") or getattr(
            text, "original_max_position_embeddings", 0
        )
        if not short or limit > short:
            raise ConfigError(
                "transformers takes the angles of longrope from the longest sequence of a batch: "
                f"set model.max_model_len to at most {short}"
            )


def _ropes(rope: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield rope
    for value in rope.values():
        if isinstance(value, dict):
            yield from _ropes(value)


def _compare(model: Any) -> tuple[int, int, int]:
    """Return heads, KV heads and width, once the copy in chunks agrees with the copy alone."""
    text = model.config
    ids = trial_ids(text.vocab_size)
    error = math.inf
    for seed in (0, 1):  # one token of an expert's router may be a tie
        _randomise(model, seed)
        model.set_attn_implementation("eager")
        with torch.no_grad():
            exact = model(input_ids=ids[None], use_cache=False).logits[0].float()
            first = model(input_ids=ids[None, :-1], use_cache=True)
            if (cache := getattr(first, "past_key_values", None)) is None:
                raise ConfigError("it has no cache of keys and values")
            last = model(
                input_ids=ids[None, -1:], past_key_values=cache, use_cache=True
            ).logits
        attention = PagedAttention()
        model.set_attn_implementation(attention.name)
        decoder = TransformersDecoder(model, attention, SingleRank(), [])
        heads, kv_heads = heads_of(decoder, text.num_hidden_layers)
        with_row_linears(model, lambda weight, bias, _: Linear(weight, bias))
        width = max(
            max(layer.key_dim, layer.value_dim) for layer in attention.seen.values()
        )
        attention.width = width = width + width % 2
        got = torch.cat(
            (_in_blocks(decoder, ids, (heads, kv_heads, width)), last[0, -1:])
        )
        wanted = torch.cat((exact, exact[-1:]))  # by its own cache, too
        error = float((got - wanted).abs().max() / wanted.abs().max())
        if error < LARGEST_ERROR:
            return heads, kv_heads, width
    raise ConfigError(
        f"in chunks its logits differ from the whole model's by {error:.2g} of the largest, so it "
        "keeps a state or a mask beside keys, values and windows"
    )


def _in_blocks(
    decoder: TransformersDecoder, ids: Tensor, sizes: tuple[int, int, int]
) -> Tensor:
    heads, kv_heads, width = sizes
    num_blocks = len(ids) // BLOCK_SIZE + 2
    num_layers = len(decoder.attention.seen)
    pool = torch.zeros(num_blocks, kv_heads, num_layers, 2, BLOCK_SIZE, width)
    backend = PlainBackend(pool, heads, [unrotated(width, len(ids))], 0.0)
    return in_chunks(decoder, backend, BLOCK_SIZE, ids, TRIAL_CUTS)


def _randomise(model: Any, seed: int) -> None:
    """Give the copy weights with which attention and experts matter, as trained ones do."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        if weight.dim() > 1:
            weight.normal_(0.0, 1.5 / math.sqrt(weight.shape[-1]), generator=generator)
        else:
            weight.normal_(
                0.0 if name.endswith("bias") else 1.0, 0.1, generator=generator
            )


def _ends(folder: Path, config: Any, text: Any) -> tuple[int, ...]:
    """Return every id that the folder's files call an end, in ascending order."""
    given = [config.eos_token_id if hasattr(config, "eos_token_id") else None]
    given.append(getattr(text, "eos_token_id", None))
    if (folder / "generation_config.json").is_file():
        given.append(GenerationConfig.from_pretrained(folder).eos_token_id)
    return end_token_ids(folder, text.vocab_size, given)
