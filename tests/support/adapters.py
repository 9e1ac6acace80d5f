"""LoRA adapters as PEFT saves them, for checkpoints of `model_folder`."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.support.checkpoints import scratch_folder

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapter(
    model: Path,
    targets: tuple[str, ...] = ALL,
    rank: int = 8,
    seed: int = 0,
    ranks: dict[str, int] | None = None,
    whole: tuple[str, ...] = (),
    **fields: object,
) -> Path:
    """Write an adapter that changes what the model says; `fields` go into its configuration.

    `ranks` are those of some layers, by the ends of their names; of the modules `whole`, it has
    others instead.
    """
    folder = scratch_folder("adapter")
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, weight in load_file(model / "model.safetensors").items():
        layer = name.removesuffix(".weight")
        if layer.rpartition(".")[2] in targets:
            outputs, inputs = weight.shape
            begin = f"base_model.model.{layer}.lora_"
            own = next(
                (r for end, r in (ranks or {}).items() if layer.endswith(end)), rank
            )
            a = torch.randn(own, inputs, generator=generator) * inputs**-0.5
            b = torch.randn(outputs, own, generator=generator) * 0.1
            tensors |= {f"{begin}A.weight": a, f"{begin}B.weight": b}
        if layer.rpartition(".")[2] in whole:
            noise = torch.randn(weight.shape, generator=generator) * weight.std()
            tensors[f"base_model.model.{name}"] = (weight + noise).contiguous()
    if whole:
        fields["modules_to_save"] = list(whole)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "lora",
        "r": rank,
        "lora_alpha": 16,
        "target_modules": list(targets),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config | fields))
    return folder


def merged(
    model: Path, adapter: Path, scaling: float, scalings: dict[str, float] | None = None
) -> Path:
    """Return a copy of the model whose weights hold the adapter.

    `scalings` are those of some layers, by the ends of their names.
    """
    folder = scratch_folder("merged")
    shutil.copytree(model, folder, dirs_exist_ok=True)
    weights = load_file(model / "model.safetensors")
    tensors = load_file(adapter / "adapter_model.safetensors")
    for name, a in tensors.items():
        if (layer := name.removeprefix("base_model.model.")) in weights:
            weights[layer] = a
        if name.endswith("lora_A.weight"):
            layer = name.removeprefix("base_model.model.").removesuffix(
                ".lora_A.weight"
            )
            b = tensors[name.replace("lora_A", "lora_B")]
            ends = (of for end, of in (scalings or {}).items() if layer.endswith(end))
            weights[f"{layer}.weight"] += next(ends, scaling) * (b @ a)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder
