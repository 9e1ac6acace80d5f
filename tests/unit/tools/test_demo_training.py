"""Training the demo model for a few steps: it learns, it repeats itself, and its folder loads."""

import csv
from pathlib import Path

import pytest
import torch

from baton.engine.model_config import read_decoder_config
from tools.demo_model import folder, train
from tools.demo_model.evaluate import Examiner
from tools.demo_model.exam import Question
from tools.demo_model.train import CURRICULUM, Stage, Trainer

LESSONS = Stage(64, 8, 24, {"recall": 0.5, "echo": 0.25, "exercise": 0.25}, short_share=0.1)


@pytest.fixture(autouse=True)
def _note_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "REPORT_STEPS", 4)
    monkeypatch.setattr(train, "WARM_UP_STEPS", 4)


def test_a_few_steps_lower_the_loss_and_the_folder_loads(tmp_path: Path) -> None:
    trainer = Trainer(0, [LESSONS])
    trainer.run(LESSONS)
    losses = [noted["loss"] for noted in trainer.curves]
    assert losses[-1] < losses[0] - 0.5
    folder.write(tmp_path, trainer.model, trainer.tokenizer)
    assert read_decoder_config(tmp_path).family == "qwen3"
    # It knows nothing yet, but it answers.
    assert len(Examiner(tmp_path).answers([Question("What is 1 + 1?", " 2.")])) == 1
    train.write_curves(tmp_path / "curves.csv", trainer.curves)
    with (tmp_path / "curves.csv").open() as opened:
        assert [float(row["loss"]) for row in csv.DictReader(opened)] == losses


def test_a_seed_draws_the_same_lessons_and_weights() -> None:
    few = Stage(64, 2, 3, LESSONS.shares)
    states = []
    for seed in (1, 1, 2):
        trainer = Trainer(seed, [few])
        trainer.run(few)
        states.append(torch.cat([p.detach().flatten() for p in trainer.model.parameters()]))
    assert torch.equal(states[0], states[1])
    assert not torch.equal(states[0], states[2])


def test_the_curriculum_ends_at_the_length_that_is_promised() -> None:
    assert [stage.length for stage in CURRICULUM] == sorted(stage.length for stage in CURRICULUM)
    assert CURRICULUM[-1].length == 4096
