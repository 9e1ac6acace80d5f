"""Folders whose models draft tokens, and what plain torch drafts with them."""

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.support.checkpoints import model_folder, scratch_folder, write_tokenizer
from tests.support.foreign_checkpoints import foreign_folder
from tools.draft_head.draft import Draft, DraftShape

NUM_LAYERS = 3  # of the model; the layer behind them drafts


def _norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


@cache
def nextn_folder(kind: str, seed: int = 0) -> Path:
    """A random model whose last layer is one that drafts, as DeepSeek-V3 has it."""
    whole = foreign_folder(kind, num_hidden_layers=NUM_LAYERS + 1)
    folder = scratch_folder(f"{kind}-nextn")
    config = json.loads((whole / "config.json").read_bytes())
    for name, value in config.items():
        if isinstance(value, list) and len(value) == NUM_LAYERS + 1:
            config[name] = value[:NUM_LAYERS]
    config |= {"num_hidden_layers": NUM_LAYERS, "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    hidden = config["hidden_size"]
    tensors = load_file(whole / "model.safetensors")
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int, scale: float) -> Tensor:
        return torch.randn(shape, generator=generator) * scale

    block = f"model.layers.{NUM_LAYERS}."
    tensors |= {
        f"{block}enorm.weight": 1 + random(hidden, scale=0.1),
        f"{block}hnorm.weight": 1 + random(hidden, scale=0.1),
        f"{block}eh_proj.weight": random(hidden, 2 * hidden, scale=hidden**-0.5),
        f"{block}shared_head.norm.weight": 1 + random(hidden, scale=0.1),
        f"{block}shared_head.head.weight": random(
            config["vocab_size"], hidden, scale=0.3
        ),
        f"{block}embed_tokens.weight": tensors["model.embed_tokens.weight"].clone(),
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(folder, config["vocab_size"])
    return folder


@cache
def knowing_folder(kind: str) -> Path:
    """The same, but what follows depends on the last token alone, and the head knows it."""
    folder = scratch_folder(f"{kind}-knowing")
    shutil.copytree(nextn_folder(kind), folder, dirs_exist_ok=True)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
        if name.endswith(("norm.weight", "layernorm.weight")):
            tensor.fill_(1.0)
    block = f"model.layers.{NUM_LAYERS}."
    joint = tensors[f"{block}eh_proj.weight"]
    joint.zero_()[:, : len(joint)] = torch.eye(len(joint))
    tensors[f"{block}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


class NextnReference:
    """Drafts with the layers of transformers, a whole text at a time in fp32."""

    def __init__(self, kind: str) -> None:
        self.tensors = load_file(nextn_folder(kind) / "model.safetensors")
        whole = foreign_folder(kind, num_hidden_layers=NUM_LAYERS + 1)
        auto: Any = AutoModelForCausalLM
        model = auto.from_pretrained(
            whole, dtype=torch.float32, attn_implementation="eager"
        )
        self.base = model.eval().model
        self.eps = self.base.config.rms_norm_eps

    def drafts(self, token_ids: list[int], count: int) -> list[int]:
        """What may follow a text."""
        with torch.inference_mode():
            states = [
                torch.zeros(self.base.config.hidden_size),
                *self._hidden(token_ids),
            ]
            text = list(token_ids)
            states = states[: len(text)]
            drafts: list[int] = []
            for _ in range(count):
                stream = self._layer(text, torch.stack(states))[-1]
                normed = _norm(stream, self._weight("shared_head.norm"), self.eps)
                drafts.append(int((self._weight("shared_head.head") @ normed).argmax()))
                text.append(drafts[-1])
                states.append(stream)
        return drafts

    def _weight(self, name: str) -> Tensor:
        return self.tensors[f"model.layers.{NUM_LAYERS}.{name}.weight"]

    def _hidden(self, token_ids: list[int]) -> Tensor:
        x = self.base.embed_tokens(torch.tensor([token_ids]))
        for layer in self.base.layers[:NUM_LAYERS]:
            x = self._through(layer, x)
        return self.base.norm(x)[0]

    def _layer(self, token_ids: list[int], states: Tensor) -> Tensor:
        embedded = self.base.embed_tokens(torch.tensor(token_ids))
        embedded = _norm(embedded, self._weight("enorm"), self.eps)
        hidden = _norm(states, self._weight("hnorm"), self.eps)
        x = torch.cat((embedded, hidden), dim=1) @ self._weight("eh_proj").T
        return self._through(self.base.layers[NUM_LAYERS], x[None])[0]

    def _through(self, layer: Any, x: Tensor) -> Tensor:
        length = x.shape[1]
        positions = torch.arange(length)[None]
        mask = torch.full((length, length), -torch.inf).triu(1)[None, None]
        angles = self.base.rotary_emb(x, positions)
        out = layer(
            x, attention_mask=mask, position_ids=positions, position_embeddings=angles
        )
        return out if isinstance(out, Tensor) else out[0]


def _draft() -> Draft:
    """A random draft for `eagle_model`, with more than one row that matters."""
    torch.manual_seed(3)
    shape = DraftShape(1024, 128, 192, 4, 2, 32, 5e5, 1e-5, 8192, (0, 1, 3))
    draft = Draft(shape)
    with torch.no_grad():
        for weight in draft.parameters():
            if weight.dim() > 1:
                weight.normal_(0, 1.5 / weight.shape[1] ** 0.5)
            else:
                weight.add_(0.1 * torch.randn(weight.shape))
    return draft


def eagle_model() -> Path:
    """The model for which `eagle_folder` drafts."""
    return model_folder("qwen3", num_layers=4)


@cache
def eagle_folder(*, every: int = 1) -> Path:
    """A random EAGLE-3 draft that knows each `every`th token, with its own embedding if not all."""
    folder = scratch_folder("eagle")
    _draft().write(folder)
    if every == 1:
        return folder
    config = json.loads((folder / "config.json").read_bytes())
    tensors = load_file(folder / "model.safetensors")
    ids = torch.arange(0, config["vocab_size"], every)
    config["draft_vocab_size"] = len(ids)
    (folder / "config.json").write_text(json.dumps(config))
    tensors["lm_head.weight"] = tensors["lm_head.weight"][ids].clone()
    tensors["d2t"] = ids - torch.arange(len(ids))
    embedding = load_file(eagle_model() / "model.safetensors")[
        "model.embed_tokens.weight"
    ]
    tensors["embed_tokens.weight"] = embedding
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


class EagleReference:
    """What the draft of `eagle_folder` drafts in plain torch."""

    def __init__(self, *, every: int = 1) -> None:
        auto: Any = AutoModelForCausalLM
        self.model = auto.from_pretrained(eagle_model(), dtype=torch.float32).eval()
        self.draft = _draft()
        self.every = every

    def drafts(self, token_ids: list[int], count: int) -> list[int]:
        with torch.inference_mode():
            said = self.model(torch.tensor([token_ids]), output_hidden_states=True)
            taps = [said.hidden_states[tap][0] for tap in self.draft.shape.taps]
            fused = self.draft.fc(torch.cat(taps, dim=1))
            states = [torch.zeros(fused.shape[1]), *fused[:-1]]
            text = list(token_ids)
            drafts: list[int] = []
            for _ in range(count):
                embedded = self.model.model.embed_tokens(torch.tensor([text]))
                stream = self.draft.through(embedded, torch.stack(states)[None])[0, -1]
                logits = self.draft.lm_head(self.draft.norm(stream))[:: self.every]
                drafts.append(int(logits.argmax()) * self.every)
                text.append(drafts[-1])
                states.append(stream)
        return drafts
