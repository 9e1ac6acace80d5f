"""The demo model: its text, its training for a few steps, and the folder that is shipped."""

import dataclasses
import random
import re

import pytest
from transformers import AutoTokenizer

from baton.deploy.model_folder import CHECKPOINT
from baton.model.config.decoder_config import read_decoder_config
from baton.router.text.tokenizer import Text
from tools.demo_model import folder, text, train, vocabulary
from tools.demo_model.evaluate import Examiner
from tools.demo_model.exam import Question
from tools.demo_model.lessons import LessonMaker
from tools.demo_model.train import Stage, Trainer

KINDS = ("recall", "echo", "exercise")


@pytest.fixture(scope="module")
def tokenizer():
    return folder.train_tokenizer(0)


def test_training_never_shows_a_name_a_number_or_a_sum_that_is_held_out(tokenizer):
    lessons = LessonMaker(tokenizer, random.Random(1))
    seen = " ".join(
        tokenizer.decode(lessons.draw(1024, {kind: 1.0})[0], skip_special_tokens=False)
        for kind in KINDS
        for _ in range(40)
    )
    # The last words of a lesson are cut anywhere.
    facts = re.findall(r"The \w+ of (\w+) is (\d{4})\.", seen)
    sums = re.findall(r"What is (\d+) \+ (\d+)\?", seen)
    assert len(facts) > 1000
    assert len(sums) > 500
    assert not [
        fact for fact in facts if any(vocabulary.is_held_out(word) for word in fact)
    ]
    assert not [
        pair for pair in sums if text.is_held_out_sum(int(pair[0]), int(pair[1]))
    ]


LESSONS = Stage(
    64, 8, 24, {"recall": 0.5, "echo": 0.25, "exercise": 0.25}, short_share=0.1
)


@pytest.fixture(autouse=True)
def _note_often(monkeypatch):
    monkeypatch.setattr(train, "REPORT_STEPS", 4)
    monkeypatch.setattr(train, "WARM_UP_STEPS", 4)


@pytest.mark.release
def test_a_few_steps_lower_the_loss_and_the_folder_loads(tmp_path):
    trainer = Trainer(0, [LESSONS])
    losses = []
    for _ in range(4):
        trainer.run(dataclasses.replace(LESSONS, steps=6))
        losses.append(trainer.noted["loss"])
    assert losses[-1] < losses[0] - 0.5
    folder.write(tmp_path, trainer.model, trainer.tokenizer)
    assert read_decoder_config(tmp_path).family == "qwen3"
    # It knows nothing yet, but it answers.
    assert len(Examiner(tmp_path).answers([Question("What is 1 + 1?", " 2.")])) == 1


def test_its_chat_template_and_ids_are_what_everybody_reads():
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    turns = [{"role": "user", "content": "Hi"}]
    rendered = tokenizer.apply_chat_template(
        turns, add_generation_prompt=True, tokenize=False
    )
    assert rendered == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    text = Text.load(str(CHECKPOINT))
    ids = text.encode_now(rendered)
    text.close()
    assert ids == tokenizer.encode(rendered)
    assert ids[0] == tokenizer.convert_tokens_to_ids("<|im_start|>")
    ends = tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"])
    assert read_decoder_config(CHECKPOINT).eos_token_ids == tuple(ends)
