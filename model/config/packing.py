"""How several small numbers share a word or a byte in the files of quantized weights.

This file never imports torch.
"""

from typing import Literal, NamedTuple

import msgspec

WORDS = ("I32",)
FLOATS = ("F32", "F16", "BF16")
BYTES = ("U8",)
FP8 = ("F8_E4M3",)
NESTED_BLOCK = 256  # scales of bitsandbytes that share one
POWERS = ("U8", "F8_E8M0")  # of two: exponents alone


class Part(NamedTuple):
    shape: tuple[int, ...]
    dtypes: tuple[str, ...]


class Fp4Names(NamedTuple):
    """The tensors of a weight in FP4: codes, a scale for each group, and one for the whole."""

    codes: str
    scales: str
    whole: str = ""
    divides: bool = False  # by the scale of the whole, which otherwise multiplies


class Codebook(NamedTuple):
    """What four bits of bitsandbytes stand for: NF4 or FP4, times the largest of each block."""

    kind: str = "nf4"
    # The largest are in eight bits themselves, in blocks of 256.
    is_nested: bool = False


class Packing(msgspec.Struct, frozen=True):
    """How numbers of a weight `[outputs, inputs]` are packed.

    AWQ, GPTQ and compressed-tensors put integers into words of 32 bits. Several tensors take the
    place of `X.weight`. Inputs are in groups, and each output has a scale and a zero point for
    every group. FP4 (E2M1) has two floats in a byte: NVFP4 with scales in FP8 and one of the whole
    weight, MXFP4 with powers of two. The MXFP4 of gpt-oss (`mxfp4`) holds all experts in one
    tensor. bitsandbytes (`bnb`) has the numbers of a weight in one row, the first of two in the
    high bits, and blocks that go on from one output to the next.
    """

    form: Literal["awq", "gptq", "compressed-tensors", "fp4", "mxfp4", "bnb"]
    bits: int
    group_size: int  # inputs; 0 is all of them
    has_zeros: bool = True  # else zero is the middle of the integers
    zero_offset: int = 0  # that is missing in the stored zero points
    has_order: bool = False  # a tensor names the group of each input
    fp4: Fp4Names = Fp4Names("weight_packed", "weight_scale")
    codebook: Codebook = Codebook()

    @property
    def first(self) -> str:
        """Return the tensor that says that a weight is packed."""
        names = {
            "compressed-tensors": "weight_packed",
            "fp4": self.fp4.codes,
            "mxfp4": "_blocks",
            "bnb": "weight",
        }
        return names.get(self.form, "qweight")

    @property
    def stored(self) -> str:
        """Return the type of that tensor."""
        return "I32" if self.has_integers else "U8"

    @property
    def scales(self) -> str:
        if self.form == "fp4":
            return self.fp4.scales
        if self.form == "bnb":
            return "nested_absmax" if self.codebook.is_nested else "absmax"
        return "weight_scale" if self.form == "compressed-tensors" else "scales"

    @property
    def order(self) -> str:
        """Return the tensor that names the group of each input, if there is one."""
        if not self.has_order:
            return ""
        return "g_idx" if self.form == "gptq" else "weight_g_idx"

    @property
    def state(self) -> str:
        """Return the end of the tensor's name in which bitsandbytes describes a weight."""
        return f"weight.quant_state.bitsandbytes__{self.codebook.kind}"

    @property
    def has_integers(self) -> bool:
        return self.form not in ("fp4", "mxfp4", "bnb")

    def groups(self, inputs: int) -> int:
        return -(-inputs // (self.group_size or inputs))

    def parts(self, shape: tuple[int, ...]) -> dict[str, Part]:
        """Return the tensors that stand for a weight `[outputs, inputs]`, or for experts."""
        match self.form:
            case "mxfp4":
                return self._parts_of_experts(shape)
            case "fp4":
                return self._parts_of_fp4(shape)
            case "compressed-tensors":
                return self._parts_of_words(shape)
            case "bnb":
                return self._parts_of_codebook(shape)
        outputs, inputs = shape
        per_word = 32 // self.bits
        groups = self.groups(inputs)
        parts = {
            "qzeros": Part((groups, outputs // per_word), WORDS),
            "scales": Part((groups, outputs), FLOATS),
        }
        if self.form == "awq":
            return {"qweight": Part((inputs, outputs // per_word), WORDS)} | parts
        parts["qweight"] = Part((inputs // per_word, outputs), WORDS)
        if self.has_order:
            parts[self.order] = Part((inputs,), WORDS)
        return parts

    def _parts_of_codebook(self, shape: tuple[int, ...]) -> dict[str, Part]:
        numbers = shape[0] * shape[1]
        blocks = -(-numbers // self.group_size)
        nested = self.codebook.is_nested
        parts = {
            "weight": Part((-(-numbers // 2), 1), BYTES),
            "weight.absmax": Part((blocks,), BYTES if nested else ("F32",)),
            "weight.quant_map": Part((16,), ("F32",)),
        }
        if nested:
            parts["weight.nested_absmax"] = Part(
                (-(-blocks // NESTED_BLOCK),), ("F32",)
            )
            parts["weight.nested_quant_map"] = Part((256,), ("F32",))
        return parts

    def _parts_of_words(self, shape: tuple[int, ...]) -> dict[str, Part]:
        outputs, inputs = shape
        per_word = 32 // self.bits
        groups = self.groups(inputs)
        parts = {
            "weight_packed": Part((outputs, -(-inputs // per_word)), WORDS),
            "weight_scale": Part((outputs, groups), FLOATS),
            "weight_shape": Part((2,), ("I32", "I64")),
        }
        if self.has_zeros:
            parts["weight_zero_point"] = Part((-(-outputs // per_word), groups), WORDS)
        if self.has_order:
            parts[self.order] = Part((inputs,), WORDS)
        return parts

    def _parts_of_fp4(self, shape: tuple[int, ...]) -> dict[str, Part]:
        outputs, inputs = shape
        names = self.fp4
        parts = {
            names.codes: Part((outputs, inputs // 2), BYTES),
            names.scales: Part(
                (outputs, self.groups(inputs)), FP8 if names.whole else POWERS
            ),
        }
        if names.whole:
            parts[names.whole] = Part((1,), FLOATS)
        return parts

    def _parts_of_experts(self, shape: tuple[int, ...]) -> dict[str, Part]:
        *experts, outputs, inputs = shape
        scales = (*experts, inputs, outputs // self.group_size)  # experts are turned
        half = self.group_size // 2
        return {"_blocks": Part((*scales, half), BYTES), "_scales": Part(scales, BYTES)}
