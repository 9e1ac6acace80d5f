"""Checkpoints whose linear layers are quantized, and the numbers that they stand for.

In eight bits each, or as AutoAWQ, GPTQ and llm-compressor pack four and eight bits: there each
number is put into its word by itself, as the formats' descriptions say.
"""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.support.checkpoints import scratch_folder
from tests.support.foreign_checkpoints import changed

FP8 = torch.float8_e4m3fn
BLOCK = (32, 48)


def compressed(kind: str, strategy: str, **weights: object) -> dict[str, object]:
    """Return the quantization_config that compressed-tensors writes."""
    numbers = {
        "num_bits": 8,
        "type": kind,
        "strategy": strategy,
        "symmetric": True,
        "dynamic": False,
        "group_size": None,
        "actorder": None,
    }
    inputs = {
        "num_bits": 8,
        "type": kind,
        "strategy": "token",
        "dynamic": True,
        "symmetric": True,
    }
    group = {
        "targets": ["Linear"],
        "weights": numbers | weights,
        "input_activations": inputs,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": f"{kind}-quantized",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
    }


FINE_GRAINED = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "weight_block_size": list(BLOCK),
}
CONFIGS: dict[str, dict[str, object]] = {
    "fp8 by block": FINE_GRAINED,
    "fp8 by channel": compressed("float", "channel"),
    "fp8 by tensor": compressed("float", "tensor"),
    "fp8 by block of compressed-tensors": compressed(
        "float", "block", block_structure=list(BLOCK)
    ),
    "int8 by channel": compressed("int", "channel"),
    "fp8 by channel of fbgemm": {
        "quant_method": "fbgemm_fp8",
        "activation_scale_ub": 1200.0,
        "modules_to_not_convert": ["lm_head"],
    },
    "fp8 by channel of modelopt": {
        "quant_method": "modelopt",
        "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN",
    },
    "mxfp8": compressed("float", "group", group_size=32)
    | {"format": "mxfp8-quantized"},
}


# Of eight neighbouring outputs of AWQ, the one in the lowest four bits of the word comes first.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
AWQ: dict[str, object] = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": 32,
    "version": "gemm",
    "zero_point": True,
    "modules_to_not_convert": None,
}
GPTQ: dict[str, object] = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": 32,
    "sym": False,
    "desc_act": True,
    "checkpoint_format": "gptq",
    "lm_head": False,
    "damp_percent": 0.01,
    "true_sequential": True,
}


def _bitsandbytes(**fields: object) -> dict[str, object]:
    """Return what transformers writes of bitsandbytes."""
    return {
        "quant_method": "bitsandbytes",
        "_load_in_4bit": True,
        "_load_in_8bit": False,
        "load_in_4bit": True,
        "load_in_8bit": False,
        "bnb_4bit_compute_dtype": "bfloat16",
        "bnb_4bit_quant_storage": "uint8",
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": False,
        "llm_int8_enable_fp32_cpu_offload": False,
        "llm_int8_has_fp16_weight": False,
        "llm_int8_skip_modules": ["lm_head"],
        "llm_int8_threshold": 6.0,
    } | fields


def _auto_round(packing_format: str, **fields: object) -> dict[str, object]:
    return {
        "quant_method": "auto-round",
        "bits": 4,
        "group_size": 32,
        "sym": True,
        "data_type": "int",
        "iters": 200,
        "autoround_version": "0.5.1",
        "low_gpu_mem_usage": True,
        "block_name_to_quantize": "model.layers",
        "packing_format": packing_format,
        "extra_config": {"lm_head": {"bits": 16, "data_type": "fp"}},
    } | fields


def _packed(strategy: str, **weights: object) -> dict[str, object]:
    config = compressed("int", strategy, **weights) | {"format": "pack-quantized"}
    config["config_groups"]["group_0"]["input_activations"] = None  # type: ignore[index]
    return config


def _fp4(name: str, group_size: int) -> dict[str, object]:
    config = compressed("float", "tensor_group", num_bits=4, group_size=group_size)
    return config | {"format": name}


# Two ways in one folder: attention in FP8, the rest in packed integers.
MIXED = _packed("group", num_bits=4, group_size=32)
MIXED["config_groups"] |= {  # type: ignore[operator]
    "group_1": compressed("float", "channel")["config_groups"]["group_0"]  # type: ignore[index]
    | {"targets": ["re:.*self_attn.*"], "format": "float-quantized"},
}


FORMATS: dict[str, dict[str, object]] = {
    "awq": AWQ,
    "awq, one group": AWQ | {"group_size": -1},
    "gptq": GPTQ,
    "gptq v2 in eight bits": GPTQ
    | {"bits": 8, "checkpoint_format": "gptq_v2", "desc_act": False},
    "packed": _packed("group", num_bits=4, group_size=32),
    "packed with zeros": _packed("group", num_bits=4, group_size=64, symmetric=False),
    "packed by channel": _packed("channel", num_bits=8),
    "packed in another order": _packed(
        "group", num_bits=4, group_size=32, actorder="group"
    ),
    "nvfp4 of modelopt": {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "group_size": 16,
    },
    "nvfp4": _fp4("nvfp4-pack-quantized", 16),
    "mxfp4": _fp4("mxfp4-pack-quantized", 32),
    "mixed": MIXED,
    "bnb nf4": _bitsandbytes(),
    "bnb nf4 nested": _bitsandbytes(bnb_4bit_use_double_quant=True),
    "bnb fp4": _bitsandbytes(bnb_4bit_quant_type="fp4"),
    "bnb int8": _bitsandbytes(load_in_4bit=False, load_in_8bit=True),
    "auto-round as gptq": _auto_round("auto_round:auto_gptq"),
    "auto-round": _auto_round("auto_round", bits=8),
    "auto-round as awq": _auto_round("auto_round:auto_awq", sym=False),
}


def quantized(model: Path, name: str) -> tuple[Path, Path]:
    """Return the folder with quantized weights, and one with the numbers that they stand for."""
    config = CONFIGS.get(name) or FORMATS[name]
    weights = {}
    plain = {}
    for key, tensor in load_file(model / "model.safetensors").items():
        weights[key] = plain[key] = tensor
        if key.endswith(("_proj.weight", "_proj_with_mqa.weight")):
            del weights[key]
            parts, plain[key] = _parts(tensor, name, key)
            weights |= {
                key.removesuffix("weight") + part: of for part, of in parts.items()
            }
    folders = [scratch_folder("quantized"), scratch_folder("plain")]
    for folder, tensors in zip(folders, (weights, plain), strict=True):
        shutil.copytree(model, folder, dirs_exist_ok=True)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    change_config(folders[0], quantization_config=config)
    return folders[0], folders[1]


def change_config(folder: Path, **fields: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def _parts(weight: Tensor, name: str, key: str) -> tuple[dict[str, Tensor], Tensor]:
    """Return the tensors of a weight, and the numbers that they stand for."""
    if name == "mixed":
        name = "fp8 by channel" if "self_attn" in key else "packed"
    if name.startswith("bnb"):
        return _pack_bnb(weight, name)
    if "fp4" in name:
        return _pack_fp4(weight, name)
    return _eight_bits(weight, name) if name in CONFIGS else _pack(weight, name)


def _eight_bits(weight: Tensor, name: str) -> tuple[dict[str, Tensor], Tensor]:
    """Return a weight in eight bits with its scales, and their product."""
    largest = 127.0 if name.startswith("int8") else 448.0
    block = (1, 32) if name == "mxfp8" else BLOCK
    if "block" in name or name == "mxfp8":
        whole = torch.empty_like(weight)
        for rows, values in zip(
            weight.split(block[0]), whole.split(block[0]), strict=True
        ):
            parts = rows.split(block[1], dim=1), values.split(block[1], dim=1)
            for part, value in zip(*parts, strict=True):
                value.fill_(part.abs().max() / largest)
        if name == "mxfp8":
            whole = torch.exp2(whole.log2().ceil())
        scales = whole[:: block[0], :: block[1]].contiguous()
    elif "channel" in name:
        scales = whole = weight.abs().amax(dim=1, keepdim=True) / largest
    else:
        scales = whole = (weight.abs().max() / largest).view(1)
    divided = weight / whole
    numbers = (
        divided.round().to(torch.int8) if name.startswith("int8") else divided.to(FP8)
    )
    if name == "mxfp8":
        scales = (scales.log2() + 127).to(torch.uint8)
    suffix = "weight_scale_inv" if CONFIGS[name] is FINE_GRAINED else "weight_scale"
    return {"weight": numbers, suffix: scales}, numbers.float() * whole


def _pack(weight: Tensor, name: str) -> tuple[dict[str, Tensor], Tensor]:
    """Return the tensors of a random weight of that shape, and its numbers."""
    (outputs, inputs), config = weight.shape, FORMATS[name]
    method = config["quant_method"]
    has_order = method == "gptq"
    if method == "auto-round":
        method = "awq" if "awq" in str(config["packing_format"]) else "gptq"
    given = config
    if method == "compressed-tensors":
        given = config["config_groups"]["group_0"]["weights"]  # type: ignore[index, assignment]
    bits = int(given.get("bits") or given["num_bits"])  # type: ignore[call-overload]
    size = int(given["group_size"] or -1)  # type: ignore[call-overload]
    size = inputs if size == -1 else size
    count = inputs // size
    top = 1 << bits
    generator = torch.Generator().manual_seed(outputs + inputs)
    numbers = torch.randint(top, (outputs, inputs), generator=generator)
    zeros = torch.randint(top, (outputs, count), generator=generator)
    scales = torch.rand(outputs, count, generator=generator) * 0.02 / top + 1e-3
    groups = torch.arange(inputs) // size
    if given.get("desc_act") or given.get("actorder"):
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
        is_whole = "gptq_v2" in config.values() or "auto_round" in config.values()
        stored = zeros if is_whole else (zeros - 1) % top
        parts = {
            "qweight": words(numbers, bits).T.contiguous(),
            "qzeros": words(stored.T, bits),
            "scales": scales.T.contiguous(),
        }
        if has_order:
            parts["g_idx"] = groups.to(torch.int32)
    else:
        parts = {
            "weight_packed": words(numbers, bits),
            "weight_scale": scales,
            "weight_shape": torch.tensor(weight.shape),
        }
        if not given["symmetric"]:
            parts["weight_zero_point"] = words(zeros.T, bits).T.contiguous()
        if given["actorder"]:
            parts["weight_g_idx"] = groups.to(torch.int32)
    return parts, values


def _pack_fp4(weight: Tensor, name: str) -> tuple[dict[str, Tensor], Tensor]:
    """Return random numbers of four bits in the shape of a weight, and what they stand for."""
    outputs, inputs = weight.shape
    size = 32 if name == "mxfp4" else 16
    generator = torch.Generator().manual_seed(outputs + inputs)
    codes = torch.randint(16, (outputs, inputs), generator=generator, dtype=torch.uint8)
    magnitudes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    numbers = torch.tensor([*magnitudes, *(-number for number in magnitudes)])[
        codes.int()
    ]
    packed = codes[:, ::2] | codes[:, 1::2] << 4
    exponents = torch.randint(-9, -5, (outputs, inputs // size), generator=generator)
    if name == "mxfp4":
        scales = torch.exp2(exponents.float())
        parts = {
            "weight_packed": packed,
            "weight_scale": (exponents + 127).to(torch.uint8),
        }
    else:
        fractions = torch.rand(exponents.shape, generator=generator) + 0.5
        in_fp8 = (fractions * torch.exp2(exponents.float() + 9)).to(FP8)
        in_fp8[0, 0] = 0.0
        scales = in_fp8.float() / 512
        if name == "nvfp4":
            whole = torch.tensor([512.0])
            parts = {
                "weight_packed": packed,
                "weight_scale": in_fp8,
                "weight_global_scale": whole,
            }
        else:
            whole = torch.tensor(1 / 512)
            parts = {"weight": packed, "weight_scale": in_fp8, "weight_scale_2": whole}
    return parts, numbers * scales.repeat_interleave(size, 1)


def _pack_bnb(weight: Tensor, name: str) -> tuple[dict[str, Tensor], Tensor]:
    """Return random numbers of four or eight bits, and what they stand for."""
    outputs, inputs = weight.shape
    generator = torch.Generator().manual_seed(outputs + inputs)
    if name == "bnb int8":
        largest = weight.abs().amax(dim=1)
        numbers = (weight / largest[:, None] * 127).round().to(torch.int8)
        parts = {
            "weight": numbers,
            "SCB": largest,
            "weight_format": torch.tensor(0).byte(),
        }
        return parts, numbers.float() * (largest / 127)[:, None]
    kind = name.split()[1]
    num_blocks = outputs * inputs // 64
    codes = torch.randint(16, (outputs * inputs,), generator=generator)
    book = torch.randn(16, generator=generator).sort().values
    scales = stored = torch.rand(num_blocks, generator=generator) * 0.02
    state: dict[str, object] = {
        "quant_type": kind,
        "blocksize": 64,
        "dtype": "bfloat16",
        "shape": [outputs, inputs],
    }
    parts = {
        "weight": (codes[::2] << 4 | codes[1::2]).byte()[:, None],
        "weight.quant_map": book,
    }
    if "nested" in name:
        stored = torch.randint(256, (num_blocks,), generator=generator).byte()
        books = torch.randn(256, generator=generator).sort().values * 0.5
        nested = torch.rand(-(-num_blocks // 256), generator=generator) * 0.01 + 0.001
        blocks = torch.arange(num_blocks) // 256
        scales = books[stored.int()] * nested[blocks] + 0.02
        state |= {
            "nested_blocksize": 256,
            "nested_dtype": "float32",
            "nested_offset": 0.02,
        }
        parts |= {"weight.nested_absmax": nested, "weight.nested_quant_map": books}
    described = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    parts |= {
        "weight.absmax": stored,
        f"weight.quant_state.bitsandbytes__{kind}": described,
    }
    values = book[codes] * scales.repeat_interleave(64)
    return parts, values.view(outputs, inputs)


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


def experts_in_mxfp4(folder: Path) -> tuple[Path, Path]:
    """Return a gpt-oss whose experts are in MXFP4, and one with the numbers that they stand for."""
    config = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    packed = changed(folder, "gpt_oss", quantization_config=config)
    plain = changed(folder / "plain", "gpt_oss")
    tensors = load_file(packed / "model.safetensors")
    stored = dict(tensors)
    numbers = dict(tensors)
    generator = torch.Generator().manual_seed(3)
    for name in tensors:
        if name.endswith("_proj"):
            experts, inputs, outputs = stored.pop(name).shape
            size = experts, outputs, inputs // 32
            blocks = torch.randint(256, (*size, 16), generator=generator).byte()
            scales = torch.randint(122, 126, size, generator=generator).byte()
            stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            numbers[name] = convert_moe_packed_tensors(
                blocks, scales, dtype=torch.float32
            )
            numbers[name] = numbers[name].contiguous()
    save_file(stored, packed / "model.safetensors")
    save_file(numbers, plain / "model.safetensors")
    return packed, plain
