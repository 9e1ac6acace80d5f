"""How AWQ, GPTQ and compressed-tensors pack the integers of weights into words of 32 bits.

Several tensors take the place of `X.weight`. Inputs are in groups, and each output has a scale and
a zero point for every group. It never imports torch.
"""

from typing import Literal, NamedTuple

import msgspec

WORDS, FLOATS = ("I32",), ("F32", "F16", "BF16")


class Part(NamedTuple):
    shape: tuple[int, ...]
    dtypes: tuple[str, ...]


class Packing(msgspec.Struct, frozen=True):
    form: Literal["awq", "gptq", "compressed-tensors"]
    bits: int
    group_size: int  # inputs; 0 is all of them
    has_zeros: bool = True  # else zero is the middle of the integers
    zero_offset: int = 0  # that is missing in the stored zero points

    @property
    def first(self) -> str:
        """Return the tensor that says that a weight is packed."""
        return "weight_packed" if self.form == "compressed-tensors" else "qweight"

    @property
    def scales(self) -> str:
        return "weight_scale" if self.form == "compressed-tensors" else "scales"

    def groups(self, inputs: int) -> int:
        return -(-inputs // (self.group_size or inputs))

    def parts(self, shape: tuple[int, ...]) -> dict[str, Part]:
        """Return the tensors that stand for a weight `[outputs, inputs]`."""
        outputs, inputs = shape
        per_word, groups = 32 // self.bits, self.groups(inputs)
        if self.form == "compressed-tensors":
            zeros = {"weight_zero_point": Part((-(-outputs // per_word), groups), WORDS)}
            return {
                "weight_packed": Part((outputs, -(-inputs // per_word)), WORDS),
                "weight_scale": Part((outputs, groups), FLOATS),
                "weight_shape": Part((2,), ("I32", "I64")),
            } | (zeros if self.has_zeros else {})
        common = {
            "qzeros": Part((groups, outputs // per_word), WORDS),
            "scales": Part((groups, outputs), FLOATS),
        }
        if self.form == "awq":
            return {"qweight": Part((inputs, outputs // per_word), WORDS)} | common
        words = Part((inputs // per_word, outputs), WORDS)
        return {"qweight": words, "g_idx": Part((inputs,), WORDS)} | common
