"""The demo model and a draft of it say the same when they are grown."""

from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import Qwen3ForCausalLM

from baton.deploy.model_folder import CHECKPOINT
from tools.draft_head.draft import Draft
from tools.draft_head.grow import NEURONS, REPEATS, grow
from tools.draft_head.train import shape_for


def model_in(folder: Path) -> Qwen3ForCausalLM:
    return Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def common(one: Tensor, other: Tensor) -> float:
    """How much probability two models share, over all tokens of a text."""
    return float(torch.minimum(one.softmax(-1), other.softmax(-1)).sum(-1).mean())


def drafted(model: Qwen3ForCausalLM, draft: Draft, ids: Tensor) -> Tensor:
    said = model(ids, output_hidden_states=True)
    taps = [said.hidden_states[tap] for tap in draft.shape.taps]
    embedded = model.model.embed_tokens(ids)
    return draft.unrolled(embedded, torch.cat(taps, dim=-1), 1)[0]


@torch.inference_mode()
def test_a_grown_model_and_its_draft_say_the_same(tmp_path):
    torch.manual_seed(3)
    model = model_in(CHECKPOINT)
    draft = Draft(shape_for(model))
    draft.write(tmp_path / "draft")
    grow(CHECKPOINT, tmp_path / "model", NEURONS)
    grow(tmp_path / "draft", tmp_path / "grown draft", None)
    grown = model_in(tmp_path / "model")
    assert sum(weight.numel() for weight in grown.parameters()) > 25e6
    ids = torch.randint(model.config.vocab_size, (2, 40))
    assert common(model(ids).logits, grown(ids).logits) > 0.98
    file = tmp_path / "grown draft" / "model.safetensors"
    tensors = {
        name.removeprefix("midlayer.").replace("self_attn.", "").replace("mlp.", ""): of
        for name, of in load_file(file).items()
    }
    shape = replace(draft.shape, hidden_size=REPEATS * draft.shape.hidden_size)
    large = Draft(shape)
    large.load_state_dict({name: of.float() for name, of in tensors.items()})
    assert common(drafted(model, draft, ids), drafted(grown, large, ids)) > 0.98
