"""Checkpoints whose linear layers are quantized to eight bits, and what their numbers stand for."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.checkpoints import scratch_folder

FP8 = torch.float8_e4m3fn
BLOCK = (32, 48)


def compressed(kind: str, strategy: str, **weights: object) -> dict[str, object]:
    """Return the quantization_config that compressed-tensors writes."""
    numbers = {
        "num_bits": 8, "type": kind, "strategy": strategy, "symmetric": True, "dynamic": False,
        "group_size": None, "actorder": None,
    }  # fmt: skip
    inputs = {"num_bits": 8, "type": kind, "strategy": "token", "dynamic": True, "symmetric": True}
    group = {"targets": ["Linear"], "weights": numbers | weights, "input_activations": inputs,
             "output_activations": None}  # fmt: skip
    return {
        "quant_method": "compressed-tensors", "format": f"{kind}-quantized", "ignore": ["lm_head"],
        "config_groups": {"group_0": group}, "kv_cache_scheme": None,
        "quantization_status": "compressed",
    }  # fmt: skip


FINE_GRAINED = {
    "quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3",
    "weight_block_size": list(BLOCK),
}  # fmt: skip
CONFIGS: dict[str, dict[str, object]] = {
    "fp8 by block": FINE_GRAINED,
    "fp8 by channel": compressed("float", "channel"),
    "fp8 by tensor": compressed("float", "tensor"),
    "fp8 by block of compressed-tensors": compressed("float", "block", block_structure=list(BLOCK)),
    "int8 by channel": compressed("int", "channel"),
}


def quantized(model: Path, name: str) -> tuple[Path, Path]:
    """Return the folder with quantized weights, and one with the numbers that they stand for."""
    config = CONFIGS[name]
    weights, plain = {}, {}
    for key, tensor in load_file(model / "model.safetensors").items():
        weights[key] = plain[key] = tensor
        if key.endswith(("_proj.weight", "_proj_with_mqa.weight")):
            numbers, scales, values = _eight_bits(tensor, name)
            suffix = "weight_scale_inv" if config is FINE_GRAINED else "weight_scale"
            weights[key], plain[key] = numbers, values
            weights[key.removesuffix("weight") + suffix] = scales
    folders = [scratch_folder("quantized"), scratch_folder("plain")]
    for folder, tensors in zip(folders, (weights, plain), strict=True):
        shutil.copytree(model, folder, dirs_exist_ok=True)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    change_config(folders[0], quantization_config=config)
    return folders[0], folders[1]


def change_config(folder: Path, **fields: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def _eight_bits(weight: Tensor, name: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return a weight in eight bits, its scales, and their product."""
    largest = 127.0 if name.startswith("int8") else 448.0
    if "block" in name:
        whole = torch.empty_like(weight)
        for rows, values in zip(weight.split(BLOCK[0]), whole.split(BLOCK[0]), strict=True):
            parts = rows.split(BLOCK[1], dim=1), values.split(BLOCK[1], dim=1)
            for part, value in zip(*parts, strict=True):
                value.fill_(part.abs().max() / largest)
        scales = whole[:: BLOCK[0], :: BLOCK[1]].contiguous()
    elif "channel" in name:
        scales = whole = weight.abs().amax(dim=1, keepdim=True) / largest
    else:
        scales = whole = (weight.abs().max() / largest).view(1)
    divided = weight / whole
    numbers = divided.round().to(torch.int8) if name.startswith("int8") else divided.to(FP8)
    return numbers, scales, numbers.float() * whole
