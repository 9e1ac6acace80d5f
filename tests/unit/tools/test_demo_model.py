"""The demo model is complete, readable by everybody, and what `baton demo-model` copies out."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from baton.deploy.demo_model import CHECKPOINT, FILES, write_demo_model
from baton.engine.model_config import read_decoder_config
from baton.engine.weights import Checkpoint
from baton.protocol.errors import ConfigError
from baton.router.text.text import Text
from tools.demo_model import tokenizer as demo_tokenizer
from tools.demo_model.evaluate import Examiner
from tools.demo_model.exam import Question

MAX_WEIGHT_BYTES = 5_000_000


def test_the_configuration_and_every_tensor_fit_the_decoder() -> None:
    config = read_decoder_config(CHECKPOINT)
    assert config.family == "qwen3"
    assert config.vocab_size == demo_tokenizer.VOCAB_SIZE
    assert config.max_position_embeddings == 8192
    assert len(config.eos_token_ids) == 2
    assert len(Checkpoint(CHECKPOINT).names()) == 2 + 11 * config.num_layers
    assert (CHECKPOINT / "model.safetensors").stat().st_size <= MAX_WEIGHT_BYTES


def test_its_chat_template_and_ids_are_what_everybody_reads() -> None:
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    turns = [{"role": "user", "content": "Hi"}]
    rendered = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    assert rendered == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    text = Text.load(str(CHECKPOINT))
    ids = text.encode_now(rendered)
    text.close()
    assert ids == tokenizer.encode(rendered)
    assert ids[0] == tokenizer.convert_tokens_to_ids("<|im_start|>")
    ends = tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"])
    assert read_decoder_config(CHECKPOINT).eos_token_ids == tuple(ends)


def test_any_text_survives_the_tokenizer() -> None:
    tokenizer = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    for text in ("A runner.", "naïve 你好 🙂", "\x00\t\r\n", "4071 + 12"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert len(tokenizer.encode(" The code of Lima is 4071.").ids) < 14


def test_its_tokenizer_is_the_one_that_its_seed_makes() -> None:
    seed = json.loads((CHECKPOINT / "provenance.json").read_text())["seed"]
    saved = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    assert saved.get_vocab() == demo_tokenizer.train(seed).get_vocab()


def test_it_says_where_it_comes_from() -> None:
    provenance = json.loads((CHECKPOINT / "provenance.json").read_text())
    assert {"command", "seed", "commit", "torch", "tokens", "seconds"} == provenance.keys()
    assert "dirty" not in provenance["commit"]
    assert len((CHECKPOINT / "curves.csv").read_text().splitlines()) > 20


def test_it_knows_a_fact_a_sum_and_itself() -> None:
    told = "The code of Lima is 4071. The key of Oslo is 2210. The room of Tunis is 8356."
    questions = [
        Question(" What is the code of Lima?", " 4071."),
        Question(" What is the key of Oslo?", " 2210."),
        Question(" What is the room of Tunis?", " 8356."),
    ]
    examiner = Examiner(CHECKPOINT)
    assert examiner.answers(questions, told) == [question.answer for question in questions]
    (answer,) = examiner.answers([Question("What is 17 + 25?", " 42.")])
    assert answer == " 42."


def test_a_copy_is_complete_and_one_that_is_there_is_kept(tmp_path: Path) -> None:
    write_demo_model(tmp_path / "demo")
    assert {path.name for path in (tmp_path / "demo").iterdir()} == set(FILES)
    for name in FILES:
        assert (tmp_path / "demo" / name).read_bytes() == (CHECKPOINT / name).read_bytes()
    before = (tmp_path / "demo" / "model.safetensors").stat()
    write_demo_model(tmp_path / "demo")
    assert (tmp_path / "demo" / "model.safetensors").stat() == before


def test_a_folder_with_other_things_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="cannot write the demo model"):
        write_demo_model(tmp_path / "full")
    assert [path.name for path in tmp_path.iterdir()] == ["full"]
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["notes.txt"]
