"""Folders whose models draft tokens, and what plain torch drafts with them."""

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.support.checkpoints import model_folder, scratch_folder, write_tokenizer
from tests.support.foreign_checkpoints import foreign_folder
from tools.draft_head.draft import Draft, DraftShape

NUM_LAYERS = 3  # of the model; the layer behind them drafts


class HeadNames(NamedTuple):
    """What a folder calls the tensors of a layer that drafts, and what it leaves to the model."""

    block: str = f"model.layers.{NUM_LAYERS}."
    layer: str = f"model.layers.{NUM_LAYERS}."
    embedding_norm: str = "enorm"
    hidden_norm: str = "hnorm"
    joint: str = "eh_proj"
    norm: str = "shared_head.norm"
    head: str = "shared_head.head"  # empty: the model's
    norm_offset: float = 0.0  # that is added to the weights of norms
    feeds_normed: bool = False
    fields: dict[str, Any] = {}  # of the whole model


QWEN = HeadNames(
    block="mtp.",
    layer="mtp.layers.0.",
    embedding_norm="pre_fc_norm_embedding",
    hidden_norm="pre_fc_norm_hidden",
    joint="fc",
    norm="norm",
    head="",
    norm_offset=1.0,
    feeds_normed=True,
    fields={"layer_types": ("linear_attention", "full_attention") * 2},
)
# Some layers take the keys that an earlier one has chosen, but not the one that drafts.
SPARSE = HeadNames(fields={"indexer_types": ("full", "shared", "full", "full")})
NAMES = {
    "qwen3_5_text": QWEN,
    "qwen3_next": QWEN,
    "qwen3_5_moe_text": QWEN,
    "glm_moe_dsa": SPARSE,
}


def names_of(kind: str) -> HeadNames:
    return NAMES.get(kind, HeadNames())


def _norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def _whole_folder(kind: str, **fields: int) -> Path:
    """A random model with one more layer, which becomes the one that drafts."""
    own = names_of(kind).fields
    return foreign_folder(kind, num_hidden_layers=NUM_LAYERS + 1, **own, **fields)


@cache
def nextn_folder(kind: str, seed: int = 0, **fields: int) -> Path:
    """A random model whose last layer is one that drafts, under the names of its family."""
    whole = _whole_folder(kind, **fields)
    names = names_of(kind)
    folder = scratch_folder(f"{kind}-nextn")
    config = json.loads((whole / "config.json").read_bytes())
    for name, value in config.items():
        if isinstance(value, list) and len(value) == NUM_LAYERS + 1:
            config[name] = value[:NUM_LAYERS]
    config |= {"num_hidden_layers": NUM_LAYERS, "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    hidden = config["hidden_size"]
    last = HeadNames().layer
    tensors = {
        name.replace(last, names.layer): tensor
        for name, tensor in load_file(whole / "model.safetensors").items()
    }
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int, scale: float) -> Tensor:
        return torch.randn(shape, generator=generator) * scale

    block = names.block
    for norm in (names.embedding_norm, names.hidden_norm):
        weight = 1 - names.norm_offset + random(hidden, scale=0.1)
        tensors[f"{block}{norm}.weight"] = weight
    joint = random(hidden, 2 * hidden, scale=hidden**-0.5)
    tensors[f"{block}{names.joint}.weight"] = joint
    weight = 1 - names.norm_offset + random(hidden, scale=0.1)
    tensors[f"{block}{names.norm}.weight"] = weight
    if names.head:
        head = random(config["vocab_size"], hidden, scale=0.3)
        tensors[f"{block}{names.head}.weight"] = head
        embedding = tensors["model.embed_tokens.weight"].clone()
        tensors[f"{block}embed_tokens.weight"] = embedding
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(folder, config["vocab_size"])
    return folder


@cache
def knowing_folder(kind: str) -> Path:
    """The same, but what follows depends on the last token alone, and the head knows it."""
    names = names_of(kind)
    folder = scratch_folder(f"{kind}-knowing")
    shutil.copytree(nextn_folder(kind), folder, dirs_exist_ok=True)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight", "out_proj.weight")):
            tensor.zero_()
        is_norm = "norm" in name.split(".")[-2]
        if is_norm and not name.endswith("linear_attn.norm.weight"):
            tensor.fill_(1.0 - names.norm_offset)
    joint = tensors[f"{names.block}{names.joint}.weight"]
    joint.zero_()[:, : len(joint)] = torch.eye(len(joint))
    if names.head:
        head = tensors["lm_head.weight"].clone()
        tensors[f"{names.block}{names.head}.weight"] = head
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


class NextnReference:
    """Drafts with the layers of transformers, a whole text at a time in fp32."""

    def __init__(self, kind: str) -> None:
        self.names = names_of(kind)
        self.tensors = load_file(nextn_folder(kind) / "model.safetensors")
        auto: Any = AutoModelForCausalLM
        model = auto.from_pretrained(
            _whole_folder(kind), dtype=torch.float32, attn_implementation="eager"
        )
        self.base = model.eval().model
        self.drafting = self.base.layers[NUM_LAYERS]
        self.base.layers = self.base.layers[:NUM_LAYERS]
        self.eps = self.base.config.rms_norm_eps

    def drafts(self, token_ids: list[int], count: int) -> list[int]:
        """What may follow a text."""
        head = self.tensors["lm_head.weight"]
        if self.names.head:
            head = self._weight(self.names.head)
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
                normed = self._normed(stream, self.names.norm)
                drafts.append(int((head @ normed).argmax()))
                text.append(drafts[-1])
                states.append(normed if self.names.feeds_normed else stream)
        return drafts

    def _weight(self, name: str) -> Tensor:
        return self.tensors[f"{self.names.block}{name}.weight"]

    def _normed(self, x: Tensor, name: str) -> Tensor:
        return _norm(x, self._weight(name) + self.names.norm_offset, self.eps)

    def _hidden(self, token_ids: list[int]) -> Tensor:
        hidden: Tensor = self.base(torch.tensor([token_ids])).last_hidden_state
        return hidden[0]

    def _layer(self, token_ids: list[int], states: Tensor) -> Tensor:
        embedded = self.base.embed_tokens(torch.tensor(token_ids))
        embedded = self._normed(embedded, self.names.embedding_norm)
        hidden = self._normed(states, self.names.hidden_norm)
        x = torch.cat((embedded, hidden), dim=1) @ self._weight(self.names.joint).T
        return self._through(self.drafting, x[None])[0]

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
