"""Compare a model's folder, as baton serves it here, with transformers on the same device.

This is a section of the GPU benchmark, run for `--model FOLDER` or a small random model.
transformers computes the logits of baton's greedy tokens in one pass: where its own choice differs,
the two logits must be as near as rounding makes them.
"""

import tempfile
from functools import partial
from pathlib import Path

import torch

from baton.llm import LLM
from baton.protocol.config import CacheConfig, EngineConfig
from baton.protocol.sampling import SamplingParams
from tools.gpu.floors import Shape
from tools.gpu.rows import Check
from tools.gpu.section import Desk
from tools.random_model import write_model

NUM_TOKENS = 64
PROMPT = 100
LARGEST_GAP = 0.25  # between logits of bf16
# A tied random model repeats its last token, whatever its layers say.
THIN = Shape("2 layers of 0.6B", 1024, 3072, 2, 16, 8, 128, 640, is_tied=False)
TINY = Shape("tiny", 64, 96, 2, 2, 1, 32, 640, is_tied=False)


def run(desk: Desk, folder: Path | None) -> None:
    """Run the section."""
    with tempfile.TemporaryDirectory(prefix="baton-gpu-") as scratch:
        name = "a folder" if folder is not None else "a random model"
        if folder is None:
            folder = Path(scratch) / "model"
            write_model(
                folder, TINY if desk.device.type == "cpu" else THIN, desk.device
            )
        key = f"tokens of {name}, baton against transformers"
        desk.check(key, partial(_compare, key, folder, desk.device), 30.0)


def _compare(key: str, folder: Path, device: torch.device) -> Check:
    from transformers import AutoConfig, AutoModelForCausalLM

    vocab = AutoConfig.from_pretrained(folder).vocab_size
    prompt = torch.randint(
        3, vocab, (PROMPT,), generator=torch.Generator().manual_seed(1)
    ).tolist()
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    engine = EngineConfig(device=device.type)  # type: ignore[arg-type]
    cache = CacheConfig(memory_mib=64 if device.type == "cpu" else 0)
    with LLM(str(folder), engine=engine, cache=cache) as llm:
        ours = llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").to(device)
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + ours], device=device)).logits[
            0, PROMPT - 1 : -1
        ]
    chosen = logits.gather(1, torch.tensor(ours, device=device)[:, None])[:, 0]
    gaps = (logits.max(1).values - chosen).float()
    detail = (
        f"{int((gaps == 0).sum())} of {len(ours)} tokens, "
        f"largest gap of logits {gaps.max():.3g}"
    )
    return Check(key, bool(gaps.max() <= LARGEST_GAP), detail)
