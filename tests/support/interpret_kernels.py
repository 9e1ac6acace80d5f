"""A process that runs kernels in Triton's interpreter and writes what came of it as JSON.

Triton decides at import whether it interprets, so it wants a process of its own, with
`TRITON_INTERPRET=1`. It is given the names of cases, and says their outcomes and which kernels ran;
or names of `MODELS`, and runs their decoders on the CUDA backend beside the CPU backend.
"""

import json
import sys
import traceback
import warnings
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, ClassVar

import numpy as np
import torch
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, TensorHandle

from baton.model.config.decoder_config import DecoderConfig
from baton.model.layers.attention import Batch, IndexPool
from baton.model.layers.cuda_backend import CudaBackend
from baton.model.layers.rotary import rope_table
from baton.model.runner.cuda_start import warm_up
from baton.model.runner.rank import plan_rank
from baton.model.runner.runner import Runner
from baton.model.runner.step_queue import HostQueue
from baton.runtime.clock import monotonic
from tests.support.checkpoints import model_folder
from tests.support.compute import Text, compute_config, loaded, logits, random_tokens
from tests.support.foreign_checkpoints import foreign_folder
from tests.support.interpreter_cases import interpreter_cases

_WINDOW = {
    "head_dim": 32,
    "sliding_window": 16,
    "layer_types": ("sliding_attention", "full_attention"),
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("qwen3", {}),
    "latent": ("deepseek_v3", {"n_routed_experts": 4}),
    "sparse": (
        "glm_moe_dsa",
        {"n_routed_experts": 4, "indexer_types": ("full", "shared")},
    ),
    "gemma2": ("gemma2", _WINDOW),
    "gemma3_text": ("gemma3_text", _WINDOW),
    "gpt_oss": ("gpt_oss", _WINDOW),
}
# Which a kernel, or a function of the language, sees.
LANGUAGES = {"tl": tl, "core": tl.core}


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


class PatchesOnce:
    """Gives kernels the interpreter's language once in a launch.

    The interpreter itself looks through the whole language at every call of a function in a kernel,
    which takes half of its time and changes nothing.
    """

    def __init__(self) -> None:
        self._patch = interpreter._patch_lang
        self._is_done: set[tuple[str, ...]] = set()

    def begin(self) -> None:
        """Begin a launch, at whose end the language is restored."""
        self._is_done.clear()

    def __call__(self, fn: FunctionType) -> object:
        modules = {
            value for value in fn.__globals__.values() if isinstance(value, ModuleType)
        }
        key = tuple(name for name, module in LANGUAGES.items() if module in modules)
        if key in self._is_done:
            return None
        self._is_done.add(key)
        return self._patch(fn)


class NotingBackend(CudaBackend):
    """Notes where each sequence of each step starts, and its length."""

    noted: ClassVar[list[tuple[int, int]]] = []

    def begin(self, batch: Batch) -> None:
        self.noted.extend((chunk.start, chunk.length) for chunk in batch.chunks)
        super().begin(batch)


def beside_the_cpu(folder: Path) -> dict[str, object]:
    """Return the largest relative error of each batch, and what a warm-up computed and stored."""
    config = compute_config(folder, num_blocks=16)
    decoder = plan_rank(config, 1).decoder
    assert isinstance(decoder, DecoderConfig)
    errors: dict[str, float] = {}
    with loaded(config) as cpu:
        tables = [rope_table(rope, width, 128) for rope, width in decoder.rotations]
        pool = torch.zeros_like(cpu.cache.pool)
        NotingBackend.noted.clear()
        index = index_over(decoder, cpu.cache.index_keys)
        backend = NotingBackend(
            pool, decoder.num_heads, tables, decoder.rms_norm_eps, index=index
        )
        cache = type(cpu.cache)(pool, cpu.cache.generations.copy())
        cuda = Runner(cpu.decoder, backend, cache, cpu.sampler, HostQueue(), monotonic)
        warm_up(cuda)
        warm = {
            "chunks": backend.noted.copy(),
            "slots": pool.transpose(1, 4).flatten(2).any(-1).nonzero().tolist(),
            "generations": int(cache.generations.sum()),
        }
        one = Text("one", random_tokens(40, vocab=512), (5, 2, 9))
        two = Text("two", random_tokens(21, seed=1, vocab=512), (1, 7))
        # Three blocks, of which the first has left the window; and the end of a block.
        batches = {
            "a prompt": (one.chunk(0, 34),),
            "decode beside a prompt": (one.chunk(34, 35), two.chunk(0, 6)),
            "two that decode": (one.chunk(35, 36), two.chunk(6, 7)),
        }
        ordered = CudaBackend(
            torch.zeros_like(pool),
            decoder.num_heads,
            tables,
            decoder.rms_norm_eps,
            is_ordered=True,
            index=index_over(decoder, cpu.cache.index_keys),
        )
        cache = type(cpu.cache)(ordered.pool, cpu.cache.generations.copy())
        in_order = Runner(
            cpu.decoder, ordered, cache, cpu.sampler, HostQueue(), monotonic
        )
        for runner, how in ((cuda, ""), (in_order, ", in one order")):
            for name, batch in batches.items():
                ours = torch.cat(logits(runner, *batch))
                theirs = torch.cat(logits(cpu, *batch))
                error = (ours - theirs).abs().max() / theirs.abs().max()
                errors[name + how] = float(error)
        stored = (pool - cpu.cache.pool)[[5, 2, 9, 1]].abs().max() / pool.abs().max()
    return {"errors": errors | {"what is stored": float(stored)}, "warm_up": warm}


def index_over(decoder: DecoderConfig, keys: Tensor | None) -> IndexPool | None:
    """An index like that over `keys`, with keys of its own."""
    index = decoder.index
    if index is None or keys is None:
        return None
    return IndexPool(torch.zeros_like(keys), index.num_heads, index.num_chosen)


def model_of(name: str) -> Path:
    """Return the folder of a small model of `MODELS`."""
    if name == "dense":
        shape = {
            "num_layers": 2,
            "vocab_size": 512,
            "hidden_size": 64,
            "intermediate_size": 96,
            "sliding_window": 16,
            "extra": json.dumps({"max_window_layers": 1}),
        }
        heads = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 32}
        return model_folder("qwen3", **shape, **heads)  # type: ignore[arg-type]
    kind, fields = MODELS[name]
    with warnings.catch_warnings(action="ignore"):
        return foreign_folder(kind, num_hidden_layers=2, **fields)


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
    patches = PatchesOnce()
    interpreter._patch_lang = patches

    def noting(self: GridExecutor, *arguments: object, **named: object) -> object:
        ran.add(self.fn.__name__)
        patches.begin()
        return run(self, *arguments, **named)

    GridExecutor.__call__ = noting
    if MODELS.keys() & sys.argv:
        print(
            json.dumps({name: beside_the_cpu(model_of(name)) for name in sys.argv[1:]})
        )
        return
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
