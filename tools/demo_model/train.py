"""Train the demo model: `python -m tools.demo_model.train FOLDER`, or `make demo-model`.

The lessons of the curriculum grow in length: the model learns copying on short lessons within
minutes, and the skill carries over to long ones. Everything is drawn from the seed. Each stage
writes the folder anew at its end, so that a long run can be inspected while it goes on.

Matrices are trained by Muon (K. Jordan and others, 2024), the rest by AdamW.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Qwen3ForCausalLM

from baton.bench.report.provenance import collect
from tools.demo_model import folder as model_folder
from tools.demo_model.lessons import LessonMaker
from tools.demo_model.text import ANSWER

MATRIX_RATE = 0.02
OTHER_RATE = 3e-3
WARM_UP_STEPS, DECAY_SHARE = 100, 0.5  # the rate rises, stays, then falls to a fiftieth
REPORT_STEPS = 50


@dataclass(frozen=True, slots=True)
class Stage:
    """`steps` batches of `rows` lessons; `short_share` of the batches are of 256 tokens instead."""

    length: int
    rows: int
    steps: int
    shares: Mapping[str, float]
    short_share: float = 0.0


CURRICULUM = (
    Stage(128, 32, 1500, {"recall": 0.45, "echo": 0.25, "exercise": 0.3}),
    Stage(512, 8, 1500, {"recall": 0.5, "echo": 0.05, "exercise": 0.45}, 0.3),
    Stage(2048, 3, 1000, {"recall": 0.85, "exercise": 0.15}, 0.4),
    Stage(4096, 2, 450, {"recall": 1.0}, 0.4),
)
SHORT = Stage(256, 20, 0, {"recall": 0.3, "exercise": 0.7})


class Trainer:
    def __init__(self, seed: int, curriculum: Sequence[Stage] = CURRICULUM) -> None:
        torch.manual_seed(seed)
        self.model = Qwen3ForCausalLM(model_folder.config())
        self.tokenizer = model_folder.train_tokenizer(seed)
        self.noted: dict[str, float] = {}
        self._rng = random.Random(seed)
        self._lessons = LessonMaker(self.tokenizer, self._rng)
        self._optimizers = _optimizers(self.model)
        self._num_steps = sum(stage.steps for stage in curriculum)
        self._step, self._num_tokens, self._started_s = 0, 0, time.monotonic()
        self._next_note = REPORT_STEPS

    def run(self, stage: Stage) -> None:
        for _ in range(stage.steps):
            is_short = self._rng.random() < stage.short_share
            self._learn(stage, SHORT if is_short else stage)

    def _learn(self, stage: Stage, drawn: Stage) -> None:
        rows = [
            self._lessons.draw(drawn.length + 1, drawn.shares)
            for _ in range(drawn.rows)
        ]
        ids = torch.tensor([row for row, _ in rows])  # [rows, length + 1]
        weights = torch.tensor([weights for _, weights in rows])[:, 1:]
        asked = weights > 0
        hidden = self.model.model(ids[:, :-1], use_cache=False).last_hidden_state
        # [num_asked, vocabulary].
        logits = F.linear(hidden[asked], self.model.lm_head.weight)
        losses = F.cross_entropy(logits, ids[:, 1:][asked], reduction="none")
        loss = (losses * weights[asked]).sum() / weights[asked].sum()
        self._descend(loss)
        self._num_tokens += drawn.length * drawn.rows
        if self._step >= self._next_note and drawn is not SHORT:
            self._next_note = self._step + REPORT_STEPS
            is_answer = weights[asked] == ANSWER
            right = logits.argmax(-1) == ids[:, 1:][asked]
            self._note(stage, losses[is_answer].mean(), right[is_answer].float().mean())

    def _descend(self, loss: Tensor) -> None:
        share = _rate_share(self._step, self._num_steps)
        for optimizer, rate in zip(
            self._optimizers, (MATRIX_RATE, OTHER_RATE), strict=True
        ):
            optimizer.zero_grad()
            for group in optimizer.param_groups:
                group["lr"] = rate * share
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self._optimizers:
            optimizer.step()
        self._step += 1

    def _note(self, stage: Stage, loss: Tensor, right: Tensor) -> None:
        """Print loss and accuracy over the tokens of answers."""
        self.noted = {
            "step": self._step,
            "tokens": self._num_tokens,
            "seconds": round(time.monotonic() - self._started_s, 1),
            "length": stage.length,
            "loss": round(loss.item(), 5),
            "accuracy": round(right.item(), 5),
        }
        print(
            " ".join(f"{name}={value}" for name, value in self.noted.items()),
            flush=True,
        )


def _optimizers(model: Qwen3ForCausalLM) -> list[torch.optim.Optimizer]:
    matrices = {name: p for name, p in model.named_parameters() if "_proj" in name}
    others = [p for name, p in model.named_parameters() if name not in matrices]
    return [
        torch.optim.Muon(matrices.values(), lr=MATRIX_RATE, weight_decay=0.01),
        torch.optim.AdamW(others, lr=OTHER_RATE, betas=(0.9, 0.98), weight_decay=0.01),
    ]


def _rate_share(step: int, num_steps: int) -> float:
    left = (num_steps - step) / (DECAY_SHARE * num_steps)
    return max(0.02, min(1.0, (step + 1) / WARM_UP_STEPS, left))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.demo_model.train", description="Train the demo model."
    )
    parser.add_argument("folder", type=Path, help="the model folder to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args(arguments)
    torch.set_num_threads(given.threads)
    trainer = Trainer(given.seed)
    for stage in CURRICULUM:
        trainer.run(stage)
        model_folder.write(given.folder, trainer.model, trainer.tokenizer)
    provenance = {
        "command": "python -m tools.demo_model.train FOLDER "
        f"--seed {given.seed} --threads {given.threads}",
        "seed": given.seed,
        "commit": collect(sys.argv).revision,
        "torch": torch.__version__,
        "tokens": trainer.noted["tokens"],
        "seconds": trainer.noted["seconds"],
    }
    (given.folder / "provenance.json").write_text(
        json.dumps(provenance, indent=2) + "\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
