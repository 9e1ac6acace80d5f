"""Write the demo model and its draft larger, with the same function.

A draft costs a small part of its model in use, but half as much as the demo model, whose step
is mostly overhead. So each number of the hidden state is repeated, which divides the weights that
read it, and MLPs of the model get neurons with random inputs and no outputs. What both say stays
the same up to the rounding of bf16.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from baton.deploy.model_folder import CHECKPOINT

REPEATS = 2  # of the hidden state
NEURONS = 8192  # of an MLP of the model, which has 26M parameters then
INPUT_SCALE = 0.05
READ_BY = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "fc", "lm_head")
WRITTEN_BY = ("o_proj", "down_proj", "fc")


def grow(source: Path, folder: Path, num_neurons: int | None) -> None:
    """Write the model or draft of `source`, the model with `num_neurons` in each MLP."""
    shutil.copytree(source, folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    config = json.loads((folder / "config.json").read_text())
    hidden = config["hidden_size"]
    grown = {}
    for name, weight in tensors.items():
        whole = weight
        if num_neurons is not None:
            whole = _with_neurons(name, weight, num_neurons)
        grown[name] = _repeated(name, whole, hidden).bfloat16().contiguous()
    if "lm_head.weight" not in tensors:
        # The output projection is the embedding, which no division may change.
        grown["model.norm.weight"] /= REPEATS
    save_file(grown, file, metadata={"format": "pt"})
    config |= {"hidden_size": REPEATS * hidden, "dtype": "bfloat16"}
    if num_neurons is not None:
        config["intermediate_size"] = num_neurons
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _with_neurons(name: str, weight: Tensor, num_neurons: int) -> Tensor:
    if name.endswith(("gate_proj.weight", "up_proj.weight")):
        more = torch.randn(num_neurons - len(weight), weight.shape[1])
        return torch.cat((weight, INPUT_SCALE * more))
    if name.endswith("down_proj.weight"):
        more = torch.zeros(len(weight), num_neurons - weight.shape[1])
        return torch.cat((weight, more), dim=1)
    return weight


def _repeated(name: str, weight: Tensor, hidden: int) -> Tensor:
    """Return a weight for hidden states whose numbers are repeated, one state after the other."""
    kind = name.removesuffix(".weight").rpartition(".")[2]
    if weight.dim() == 1:
        return weight if kind in ("q_norm", "k_norm") else weight.repeat(REPEATS)
    if kind == "embed_tokens":
        return weight.repeat(1, REPEATS)
    if kind in READ_BY:  # some read several states side by side
        states = weight.view(len(weight), -1, hidden) / REPEATS
        weight = states.repeat(1, 1, REPEATS).flatten(1)
    return weight.repeat(REPEATS, 1) if kind in WRITTEN_BY else weight


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.draft_head.grow",
        description="Write the demo model and its draft larger, with the same function.",
    )
    parser.add_argument("draft", type=Path, help="what tools.draft_head.train wrote")
    parser.add_argument("folder", type=Path, help="where to write model and draft")
    given = parser.parse_args(arguments)
    torch.manual_seed(0)
    grow(CHECKPOINT, given.folder / "model", NEURONS)
    grow(given.draft, given.folder / "draft", None)
    return 0


if __name__ == "__main__":
    sys.exit(main())
