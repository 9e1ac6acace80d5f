"""A process that runs the interpreter cases it is given and writes their outcomes as JSON.

With the outcomes it names the kernels that were run. Triton decides at import whether it
interprets, so it wants a process of its own, with `TRITON_INTERPRET=1`.
"""

import json
import sys
import traceback
import warnings

import numpy as np
import torch
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, TensorHandle

from tests.support.kernel_cases import interpreter_cases


def dot(
    _builder: InterpreterBuilder,
    a: TensorHandle,
    b: TensorHandle,
    addend: TensorHandle,
    _input_precision: object,
    _max_num_imprecise_acc: object,
) -> TensorHandle:
    """The product of two tiles with every sum in one order, as a GPU computes it.

    The interpreter's own goes to numpy's BLAS, where the place of a row in its tile may change the
    row's bits on some CPUs.
    """
    products = a.data[:, :, np.newaxis] * b.data[np.newaxis]
    return TensorHandle(
        products.sum(axis=1, dtype=addend.data.dtype) + addend.data, addend.dtype.scalar
    )


def fma(
    _builder: InterpreterBuilder, a: TensorHandle, b: TensorHandle, c: TensorHandle
) -> TensorHandle:
    """`a * b + c` of floats, rounded once as on a GPU; the interpreter's own rounds twice."""
    exact = a.data.astype(np.float64) * b.data + c.data
    return TensorHandle(exact.astype(np.float32), c.dtype.scalar)


def main() -> None:
    torch.set_num_threads(1)
    InterpreterBuilder.create_dot = dot
    InterpreterBuilder.create_fma = fma
    warnings.simplefilter("error")
    # Logits may be NaN, and infinity less infinity is.
    np.seterr(invalid="ignore")
    warnings.filterwarnings("ignore", message="All-NaN")
    outcomes: dict[str, str | None] = {}
    ran: set[str] = set()
    run = GridExecutor.__call__

    def noting(self: GridExecutor, *arguments: object, **named: object) -> object:
        ran.add(self.fn.__name__)
        return run(self, *arguments, **named)

    GridExecutor.__call__ = noting
    cases = interpreter_cases()
    for name in sys.argv[1:]:
        try:
            cases[name]()
            outcomes[name] = None
        except Exception:  # noqa: BLE001  (whatever it is, it is that case's outcome)
            outcomes[name] = traceback.format_exc()
    print(json.dumps({"outcomes": outcomes, "ran": sorted(ran)}))


if __name__ == "__main__":
    main()
