"""Train an EAGLE-3 draft for the demo model: `python -m tools.draft_head.train FOLDER`.

The texts begin as lessons do and go on as the model says, sampled at temperature 1, so the draft
learns the model's own distribution. Its loss is that to all probabilities of the next tokens.
"""

import argparse
import random
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor
from transformers import Qwen3ForCausalLM

from baton.deploy.model_folder import CHECKPOINT
from tools.demo_model.lessons import LessonMaker
from tools.draft_head.draft import Draft, DraftShape

SHARES = {"recall": 0.6, "exercise": 0.4}
BEGINNING_TOKENS = 64
TEXT_TOKENS = 160
WRITTEN_ROWS = 128  # texts that are written at once
BATCH_ROWS = 8
NUM_PASSES = 3  # drafts for which it is trained
LATER_WEIGHT = 0.8  # of a pass, relative to the one before
MATRIX_RATE = 0.02
OTHER_RATE = 3e-3
WARM_UP_STEPS = 50
REPORT_STEPS = 50


def shape_for(model: Qwen3ForCausalLM) -> DraftShape:
    """Return a draft that taps the streams behind an early, a middle and a late layer."""
    config = model.config
    last = config.num_hidden_layers - 1
    return DraftShape(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        rope_theta=config.rope_parameters["rope_theta"],
        rms_norm_eps=config.rms_norm_eps,
        max_position_embeddings=config.max_position_embeddings,
        taps=(1, (last + 1) // 2, last),
    )


@torch.inference_mode()
def written_texts(
    model: Qwen3ForCausalLM, lessons: LessonMaker, count: int
) -> Iterator[Tensor]:
    """Yield texts of `TEXT_TOKENS`, `[rows, tokens]`, that the model has continued."""
    for _ in range(-(-count // WRITTEN_ROWS)):
        rows = [lessons.draw(BEGINNING_TOKENS, SHARES)[0] for _ in range(WRITTEN_ROWS)]
        yield model.generate(
            torch.tensor(rows),
            attention_mask=torch.ones(len(rows), BEGINNING_TOKENS, dtype=torch.long),
            max_new_tokens=TEXT_TOKENS - BEGINNING_TOKENS,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            eos_token_id=None,
            pad_token_id=0,
        )


class Trainer:
    def __init__(self, model: Qwen3ForCausalLM, texts: Tensor, num_steps: int) -> None:
        self.model = model
        self.draft = Draft(shape_for(model))
        self.draft.lm_head.weight.data.copy_(model.lm_head.weight.data)
        self._texts = texts
        self._num_steps = num_steps
        named = dict(self.draft.named_parameters())
        inner = [
            of for name, of in named.items() if "_proj" in name or name.startswith("fc")
        ]
        others = [of for of in named.values() if all(of is not each for each in inner)]
        self._optimizers = (
            (torch.optim.Muon(inner, lr=MATRIX_RATE, weight_decay=0.0), MATRIX_RATE),
            (torch.optim.AdamW(others, OTHER_RATE, betas=(0.9, 0.98)), OTHER_RATE),
        )

    def run(self) -> None:
        started_s = time.monotonic()
        for step in range(self._num_steps):
            rows = torch.randint(len(self._texts), (BATCH_ROWS,))
            loss, shares = self._losses(self._texts[rows])
            share = min(1.0, (step + 1) / WARM_UP_STEPS) * (
                1.02 - step / self._num_steps
            )
            self.draft.zero_grad()
            torch.autograd.backward(loss)
            torch.nn.utils.clip_grad_norm_(self.draft.parameters(), 1.0)
            for optimizer, rate in self._optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = rate * share
                optimizer.step()  # type: ignore[no-untyped-call]
            if step % REPORT_STEPS == 0 or step == self._num_steps - 1:
                shown = " ".join(f"{share:.3f}" for share in shares)
                seconds = time.monotonic() - started_s
                print(
                    f"step={step} seconds={seconds:.0f} loss={loss:.4f} common={shown}",
                    flush=True,
                )

    def _losses(self, ids: Tensor) -> tuple[Tensor, list[float]]:
        """Return the loss, and how much of its probability each draft shares with the model."""
        with torch.no_grad():
            said = self.model(ids, output_hidden_states=True)
            wanted = said.logits.softmax(-1)
            streams = torch.cat(
                [said.hidden_states[tap] for tap in self.draft.shape.taps], dim=-1
            )
            embedded = self.model.model.embed_tokens(ids)
        total = torch.zeros(())
        shares = []
        for number, logits in enumerate(
            self.draft.unrolled(embedded, streams, NUM_PASSES)
        ):
            target = wanted[:, number:]
            losses = F.cross_entropy(logits.flatten(0, 1), target.flatten(0, 1))
            total = total + LATER_WEIGHT**number * losses
            shares.append(
                float(torch.minimum(logits.softmax(-1), target).sum(-1).mean().detach())
            )
        return total, shares


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.draft_head.train",
        description="Train a draft for the demo model.",
    )
    parser.add_argument("folder", type=Path, help="the folder to write")
    parser.add_argument("--model", type=Path, default=CHECKPOINT)
    parser.add_argument("--texts", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args(arguments)
    torch.manual_seed(given.seed)
    torch.set_num_threads(given.threads)
    model = Qwen3ForCausalLM.from_pretrained(given.model, dtype=torch.float32).eval()
    model.requires_grad_(requires_grad=False)
    tokenizer = Tokenizer.from_file(str(given.model / "tokenizer.json"))
    lessons = LessonMaker(tokenizer, random.Random(given.seed))
    texts = torch.cat([*written_texts(model, lessons, given.texts)])
    trainer = Trainer(model, texts.clone(), given.steps)
    trainer.run()
    trainer.draft.write(given.folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
