"""Checkpoints in four and eight bits as AutoAWQ, GPTQ and llm-compressor pack them.

Each number is put into its word by itself, as the formats' descriptions say.
"""

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.checkpoints import scratch_folder
from tests.support.quantized import change_config, compressed

# Of eight neighbouring outputs of AWQ, the one in the lowest four bits of the word comes first.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
AWQ: dict[str, object] = {
    "quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True,
    "modules_to_not_convert": None,
}  # fmt: skip
GPTQ: dict[str, object] = {
    "quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": True,
    "checkpoint_format": "gptq", "lm_head": False, "damp_percent": 0.01, "true_sequential": True,
}  # fmt: skip


def _packed(strategy: str, **weights: object) -> dict[str, object]:
    config = compressed("int", strategy, **weights) | {"format": "pack-quantized"}
    config["config_groups"]["group_0"]["input_activations"] = None  # type: ignore[index]
    return config


FORMATS: dict[str, dict[str, object]] = {
    "awq": AWQ,
    "awq, one group": AWQ | {"group_size": -1},
    "gptq": GPTQ,
    "gptq v2 in eight bits": GPTQ | {"bits": 8, "checkpoint_format": "gptq_v2", "desc_act": False},
    "packed": _packed("group", num_bits=4, group_size=32),
    "packed with zeros": _packed("group", num_bits=4, group_size=64, symmetric=False),
    "packed by channel": _packed("channel", num_bits=8),
}


def packed(model: Path, name: str) -> tuple[Path, Path]:
    """Return the folder with packed weights, and one with the numbers that they stand for."""
    config = FORMATS[name]
    weights, plain = {}, {}
    for key, tensor in load_file(model / "model.safetensors").items():
        weights[key] = plain[key] = tensor
        if key.endswith("_proj.weight"):
            del weights[key]
            parts, plain[key] = _pack(tensor.shape, config)
            weights |= {key.removesuffix("weight") + part: of for part, of in parts.items()}
    folders = [scratch_folder("packed"), scratch_folder("plain")]
    for folder, tensors in zip(folders, (weights, plain), strict=True):
        shutil.copytree(model, folder, dirs_exist_ok=True)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    change_config(folders[0], quantization_config=config)
    return folders[0], folders[1]


def _pack(shape: torch.Size, config: dict[str, object]) -> tuple[dict[str, Tensor], Tensor]:
    """Return the tensors of a random weight, and its numbers."""
    outputs, inputs = shape
    method = config["quant_method"]
    given = config
    if method == "compressed-tensors":
        given = config["config_groups"]["group_0"]["weights"]  # type: ignore[index, assignment]
    bits = int(given.get("bits") or given["num_bits"])  # type: ignore[call-overload]
    size = int(given["group_size"] or -1)  # type: ignore[call-overload]
    size = inputs if size == -1 else size
    count, top = inputs // size, 1 << bits
    generator = torch.Generator().manual_seed(outputs + inputs)
    numbers = torch.randint(top, (outputs, inputs), generator=generator)
    zeros = torch.randint(top, (outputs, count), generator=generator)
    scales = torch.rand(outputs, count, generator=generator) * 0.02 / top + 1e-3
    groups = torch.arange(inputs) // size
    if given.get("desc_act"):
        groups = groups[torch.randperm(inputs, generator=generator)]
    if given.get("symmetric"):
        zeros.fill_(top // 2)
    values = (numbers - zeros[:, groups]) * scales[:, groups]
    if method == "awq":
        parts = {
            "qweight": words(numbers.T, 4, AWQ_ORDER),
            "qzeros": words(zeros.T, 4, AWQ_ORDER),
            "scales": scales.T.contiguous(),
        }
    elif method == "gptq":
        stored = zeros if config["checkpoint_format"] == "gptq_v2" else (zeros - 1) % top
        parts = {
            "qweight": words(numbers, bits).T.contiguous(),
            "qzeros": words(stored.T, bits),
            "scales": scales.T.contiguous(),
            "g_idx": groups.to(torch.int32),
        }
    else:
        parts = {
            "weight_packed": words(numbers, bits),
            "weight_scale": scales,
            "weight_shape": torch.tensor(shape),
        }
        if not given["symmetric"]:
            parts["weight_zero_point"] = words(zeros.T, bits).T.contiguous()
    return parts, values


def words(numbers: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Pack neighbours of each row into words of 32 bits, the first of `order` lowest."""
    found = []
    per_word = 32 // bits
    for row in numbers.tolist():
        for first in range(0, len(row), per_word):
            part = row[first : first + per_word]
            places = order or range(len(part))
            word = sum(part[place] << (bits * i) for i, place in enumerate(places))
            found.append(word - (1 << 32) if word >> 31 else word)
    return torch.tensor(found, dtype=torch.int32).view(len(numbers), -1)
