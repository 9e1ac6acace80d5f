"""A process that runs every interpreter case and writes the outcome of each as JSON.

Triton decides at import whether it interprets, and a test process may have imported it already: so
`tests/unit/kernels/test_interpreted.py` starts this one, with `TRITON_INTERPRET=1`.
"""

import json
import traceback
import warnings

import torch

from tests.support.kernel_cases import interpreter_cases


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    outcomes: dict[str, str | None] = {}
    for name, check in interpreter_cases().items():
        try:
            check()
            outcomes[name] = None
        except Exception:  # noqa: BLE001  (whatever it is, it is that case's outcome)
            outcomes[name] = traceback.format_exc()
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main()
