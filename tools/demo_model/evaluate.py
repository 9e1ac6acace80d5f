"""Examine a demo model in transformers: `python -m tools.demo_model.evaluate [FOLDER]`.

The greedy answers to the fixed questions of `exam.py` are compared as text, whole and exact. No
serving part of baton is involved, so the scores show the model's knowledge and nothing else.
"""

import argparse
import copy
import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import DynamicCache, Qwen3ForCausalLM

from baton.deploy.model_folder import CHECKPOINT
from tools.demo_model import exam
from tools.demo_model.exam import Question
from tools.demo_model.folder import END_OF_TEXT_ID, TURN_END_ID

LENGTHS = (256, 1024, 2048, 4096)
NUM_MEMORIES = 8
ROWS = 64  # the rows of a batch


class Examiner:
    def __init__(self, folder: Path) -> None:
        self._model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def scores(self) -> dict[str, float]:
        """Return the share of exact answers, 0 to 1, for each part of the exam."""
        found = {f"recall_{length}": self.recall(length) for length in LENGTHS}
        found["recall_chat"] = self.score(exam.chats(count=256, seed=0))
        found["sums_held_out"] = self.score(exam.sums())
        return found

    def recall(self, num_tokens: int) -> float:
        shares = []
        for seed in range(NUM_MEMORIES):
            num_facts = min(exam.NUM_FACTS, num_tokens // 32)
            memory = exam.recall(
                self.tokenizer, num_tokens=num_tokens, seed=seed, num_facts=num_facts
            )
            shares.append(self.score(memory.questions, told=memory.told))
        return sum(shares) / len(shares)

    def score(self, questions: Sequence[Question], told: str = "") -> float:
        answers = self.answers(questions, told)
        right = sum(
            a == question.answer for a, question in zip(answers, questions, strict=True)
        )
        return right / len(questions)

    @torch.inference_mode()
    def answers(self, questions: Sequence[Question], told: str = "") -> list[str]:
        """Return the greedy answers; `told` stands before each question and is computed once."""
        cache = DynamicCache(config=self._model.config)
        if told:
            self._model(
                torch.tensor([self.tokenizer.encode(told).ids]), past_key_values=cache
            )
        answers = [""] * len(questions)
        for places, prompts in self._batches(questions):
            branch = copy.deepcopy(cache)
            if told:
                branch.batch_repeat_interleave(len(places))
            longest = max(self._length(questions[place].answer) for place in places)
            for place, ids in zip(
                places, self._continue(prompts, branch, longest), strict=True
            ):
                answers[place] = self.tokenizer.decode(ids)
        return answers

    def _batches(
        self, questions: Sequence[Question]
    ) -> Iterator[tuple[list[int], Tensor]]:
        """Yield batches of prompts of equal length: a row without padding equals the row alone."""
        by_length: dict[int, list[tuple[int, list[int]]]] = defaultdict(list)
        for place, question in enumerate(questions):
            ids = self.tokenizer.encode(question.prompt).ids
            by_length[len(ids)].append((place, ids))
        for rows in by_length.values():
            for start in range(0, len(rows), ROWS):
                batch = rows[start : start + ROWS]
                yield (
                    [place for place, _ in batch],
                    torch.tensor([ids for _, ids in batch]),
                )

    def _continue(
        self, ids: Tensor, cache: DynamicCache, longest: int
    ) -> list[list[int]]:
        """Return each row's greedy tokens up to its end; `longest` is room for the right answer."""
        steps: list[Tensor] = []
        for _ in range(longest + 1):
            logits = self._model(ids, past_key_values=cache, logits_to_keep=1).logits
            ids = logits[:, -1].argmax(-1, keepdim=True)  # [rows, 1]
            steps.append(ids)
        return [_until_end(row) for row in torch.cat(steps, dim=1).tolist()]

    def _length(self, words: str) -> int:
        return len(self.tokenizer.encode(words).ids)


def _until_end(ids: list[int]) -> list[int]:
    ends = [
        place
        for place, token in enumerate(ids)
        if token in (END_OF_TEXT_ID, TURN_END_ID)
    ]
    return ids[: ends[0]] if ends else ids


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.demo_model.evaluate", description="Examine a demo model."
    )
    parser.add_argument("folder", type=Path, nargs="?", default=CHECKPOINT)
    parser.add_argument("--json", type=Path, help="also write the scores here")
    given = parser.parse_args(arguments)
    scores = Examiner(given.folder).scores()
    for name, share in scores.items():
        print(f"{name:<14} {100 * share:6.2f} %")
    if given.json:
        given.json.write_text(json.dumps(scores, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
