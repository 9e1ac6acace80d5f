"""A process that compiles products with narrow weights for compute capability 9.0, without a GPU.

Its arguments are "dense" or "experts", a number of rows, of each expert if there are any, and kinds
of weights. Writes one JSON list.
"""

import sys
import warnings

import msgspec
import torch

from baton.kernels.hopper.narrow.narrow_proof import weights_of
from baton.kernels.hopper.narrow.product import streamed, streamed_experts
from baton.kernels.reference import NarrowWeight
from tests.support.compile_products import Report, report, without_gpu

# Codes, the inputs that share a scale, and which of the weights that a proof tries.
KINDS = {
    "int4 fp16": ("int4", 128, 0),
    "int4 bf16": ("int4", 128, 1),
    "int4 in groups of 64": ("int4", 64, 0),
    "int4 in groups of 32": ("int4", 32, 0),
    "int4 by rows": ("int4", 0, 0),
    "int8 by rows": ("int8", 128, 0),
    "int8 in groups of 128": ("int8", 128, 1),
    "int8 in groups of 32": ("int8", 32, 1),
    "fp8 in blocks": ("fp8", 128, 0),
    "fp8 by rows": ("fp8", 128, 1),
    "mxfp4": ("fp4", 32, 0),
}
OUTPUTS, INPUTS = 512, 2048
EXPERTS = 32


def main() -> None:
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", message="AnnAssign", category=DeprecationWarning)
    of = {"dense": of_kind, "experts": of_experts}[sys.argv[1]]
    rows = int(sys.argv[2])
    reports = [of(kind, rows) for kind in sys.argv[3:]]
    print(msgspec.json.encode(reports).decode())


def weight_of(kind: str, outputs: int, inputs: int) -> NarrowWeight:
    narrow, group, number = KINDS[kind]
    weights = weights_of(narrow, group, outputs, inputs, torch.device("cpu"))
    return [*weights][number]


def of_kind(kind: str, rows: int) -> Report:
    made = streamed(weight_of(kind, OUTPUTS, INPUTS), torch.device("cpu"))
    assert made is not None
    codes, product = made
    x = torch.zeros(rows, INPUTS, dtype=torch.bfloat16)
    (kernel,) = without_gpu(lambda: product(x, codes))
    shared_bytes = kernel.metadata.shared
    return report("streaming_kernel", kernel.asm["cubin"], shared_bytes, kind)


def of_experts(kind: str, rows: int) -> Report:
    weights = [weight_of(kind, 128, INPUTS)] * EXPERTS
    made = streamed_experts(weights, torch.device("cpu"))
    assert made is not None
    codes, product = made
    x = torch.zeros(EXPERTS * rows, INPUTS, dtype=torch.bfloat16)
    ends = torch.zeros(EXPERTS, dtype=torch.int32)
    biases = torch.zeros(EXPERTS, 128, dtype=torch.bfloat16)
    (kernel,) = without_gpu(lambda: product(x, codes, ends, biases))
    shared_bytes = kernel.metadata.shared
    return report("streaming_kernel", kernel.asm["cubin"], shared_bytes, kind)


if __name__ == "__main__":
    main()
