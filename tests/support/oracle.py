"""What transformers generates, and a comparison that forgives ties and nothing else."""

from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from transformers import AutoModelForCausalLM

FIRST_ID, LAST_ID = 10, 250  # ordinary tokens of every test checkpoint
TIE = 1e-3  # gap between the reference's two best logits


def prompt(length: int, salt: int = 0) -> list[int]:
    """Seeded tokens; a shorter prompt of the same salt is a prefix of a longer one."""
    rng = Random(salt)
    return [rng.randint(FIRST_ID, LAST_ID) for _ in range(length)]


@dataclass(frozen=True, slots=True)
class Expected:
    """Greedy tokens of one prompt; `gaps[i]` is the reference's top-2 gap at token i."""

    token_ids: list[int]
    gaps: list[float]


class Oracle:
    """transformers' own model of `folder`, in fp32, one prompt at a time."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32
        ).eval()

    def greedy(self, prompt: list[int], num_tokens: int) -> Expected:
        with torch.inference_mode():
            out = self.model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=num_tokens,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
                output_logits=True,
                return_dict_in_generate=True,
            )
        best = torch.stack(out.logits)[:, 0].float().topk(2).values
        return Expected(
            out.sequences[0, len(prompt) :].tolist(), (best[:, 0] - best[:, 1]).tolist()
        )


def count_ties(expected: Expected, got: list[int]) -> int:
    """0 when equal, 1 when they part at a tie of the reference; anything else fails."""
    assert len(got) == len(expected.token_ids)
    for position, (ours, theirs) in enumerate(
        zip(got, expected.token_ids, strict=True)
    ):
        if ours != theirs:
            gap = expected.gaps[position]
            assert gap < TIE, (
                f"token {position} is {ours}, not {theirs}; top-2 gap {gap:.4g}"
            )
            return 1
    return 0
