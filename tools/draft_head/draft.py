"""A draft of EAGLE-3 in plain torch: its modules, its unrolled training pass, and its folder.

The row of a token takes its embedding and the joined streams of the token before it. In training,
every row drafts several tokens: a later one takes the state of the draft before it, and sees the
rows of the drafts before it in the place of the text's own, as when a node drafts (Li and others,
2025).
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class DraftShape:
    """The sizes of the model for which it drafts, and the layers before which it taps streams."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    rms_norm_eps: float
    max_position_embeddings: int
    taps: tuple[int, ...]


class Draft(nn.Module):
    """One layer between joined streams and the model's vocabulary."""

    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        self.shape = shape
        hidden = shape.hidden_size
        queries = shape.num_heads * shape.head_dim
        keys = shape.num_kv_heads * shape.head_dim
        self.fc = nn.Linear(len(shape.taps) * hidden, hidden, bias=False)
        self.input_layernorm = nn.RMSNorm(hidden, shape.rms_norm_eps)
        self.hidden_norm = nn.RMSNorm(hidden, shape.rms_norm_eps)
        self.q_proj = nn.Linear(2 * hidden, queries, bias=False)
        self.k_proj = nn.Linear(2 * hidden, keys, bias=False)
        self.v_proj = nn.Linear(2 * hidden, keys, bias=False)
        self.o_proj = nn.Linear(queries, hidden, bias=False)
        self.post_attention_layernorm = nn.RMSNorm(hidden, shape.rms_norm_eps)
        self.gate_proj = nn.Linear(hidden, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, hidden, bias=False)
        self.norm = nn.RMSNorm(hidden, shape.rms_norm_eps)
        self.lm_head = nn.Linear(hidden, shape.vocab_size, bias=False)

    def unrolled(
        self, embedded: Tensor, streams: Tensor, num_passes: int
    ) -> list[Tensor]:
        """Return the logits of each pass, `[rows, length - pass, vocab]`.

        `embedded` is `[rows, length, hidden]`, and `streams` `[rows, length, taps * hidden]`, of
        the tokens before. Row `i` of pass `p` drafts token `i + p + 1`, as row `i + p` does in a
        text whose last `p` tokens are drafts.
        """
        states = self.fc(streams)
        states = F.pad(states[:, :-1], (0, 0, 1, 0))  # zeros before the first token
        keys: list[Tensor] = []
        values: list[Tensor] = []
        logits = []
        for number in range(num_passes):
            own = embedded[:, number:]
            states = states[:, : own.shape[1]]
            states, key, value = self._layer(own, states, keys, values)
            keys.append(key)
            values.append(value)
            logits.append(self.lm_head(self.norm(states)))
            states = states[:, :-1]
        return logits

    def through(self, embedded: Tensor, states: Tensor) -> Tensor:
        """Return the states `[rows, length, hidden]` of a text, which those of its tokens give."""
        return self._layer(embedded, states, [], [])[0]

    def _layer(
        self, embedded: Tensor, states: Tensor, keys: list[Tensor], values: list[Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the states, and the keys and values, of one pass after those of `keys`."""
        shape = self.shape
        rows, length, _ = states.shape
        number = len(keys)
        x = torch.cat(
            (self.input_layernorm(embedded), self.hidden_norm(states)), dim=-1
        )
        positions = torch.arange(number, number + length)
        query = self._rotated(
            self.q_proj(x).view(rows, length, -1, shape.head_dim), positions
        )
        key = self._rotated(
            self.k_proj(x).view(rows, length, -1, shape.head_dim), positions
        )
        value = self.v_proj(x).view(rows, length, -1, shape.head_dim).transpose(1, 2)
        repeats = shape.num_heads // shape.num_kv_heads
        key, value = (each.repeat_interleave(repeats, 1) for each in (key, value))
        every_key, every_value = [*keys, key], [*values, value]
        # Row `i` sees the text's own rows up to `i`, and of each later pass the row of its draft.
        scores = query @ every_key[0][:, :, : length + number].transpose(2, 3)
        is_later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(is_later, -torch.inf)
        drafted = [
            (query * each[:, :, :length]).sum(-1, keepdim=True)
            for each in every_key[1:]
        ]
        weights = (
            torch.cat((scores, *drafted), dim=-1)
            .div(math.sqrt(shape.head_dim))
            .softmax(-1)
        )
        num_text = scores.shape[-1]
        out = weights[..., :num_text] @ every_value[0][:, :, :num_text]
        for place, each in enumerate(every_value[1:]):
            out = out + weights[..., num_text + place, None] * each[:, :, :length]
        stream = states + self.o_proj(out.transpose(1, 2).flatten(2))
        y = self.post_attention_layernorm(stream)
        stream = stream + self.down_proj(F.silu(self.gate_proj(y)) * self.up_proj(y))
        return stream, key, value

    def _rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        """Return `[rows, heads, length, head_dim]` of `[rows, length, heads, head_dim]`."""
        half = self.shape.head_dim // 2
        steps = self.shape.rope_theta ** (-torch.arange(half) / half)
        angles = positions[:, None] * steps
        cos, sin = angles.cos(), angles.sin()
        low, high = x.transpose(1, 2).chunk(2, dim=-1)
        return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)

    def write(self, folder: Path) -> None:
        """Write the folder that nodes take as `engine.speculative_model`."""
        folder.mkdir(parents=True, exist_ok=True)
        shape = self.shape
        config = {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "vocab_size": shape.vocab_size,
            "draft_vocab_size": shape.vocab_size,
            "hidden_size": shape.hidden_size,
            "intermediate_size": shape.intermediate_size,
            "num_hidden_layers": 1,
            "num_attention_heads": shape.num_heads,
            "num_key_value_heads": shape.num_kv_heads,
            "head_dim": shape.head_dim,
            "rms_norm_eps": shape.rms_norm_eps,
            "rope_theta": shape.rope_theta,
            "max_position_embeddings": shape.max_position_embeddings,
            "tie_word_embeddings": False,
            "torch_dtype": "float32",
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": shape.taps},
        }
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        tensors = {
            _name_in_folder(name): tensor for name, tensor in self.state_dict().items()
        }
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _name_in_folder(name: str) -> str:
    layer = name.removesuffix(".weight")
    if layer in ("fc", "norm", "lm_head"):
        return name
    block = "self_attn." if layer in ("q_proj", "k_proj", "v_proj", "o_proj") else ""
    block = "mlp." if layer in ("gate_proj", "up_proj", "down_proj") else block
    return f"midlayer.{block}{name}"
