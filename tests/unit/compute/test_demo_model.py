"""The demo model is complete, readable by everybody, and says something."""

import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from baton.deploy.demo_model import VOCAB_SIZE, write_demo_model
from baton.engine.model_config import read_decoder_config
from baton.engine.weights import Checkpoint, fingerprint
from baton.protocol.errors import ConfigError
from baton.router.text import Text
from tests.support.oracle import Oracle


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "demo"
    write_demo_model(folder)
    return folder


def test_greedy_text_is_varied_for_different_prompts(demo: Path) -> None:
    oracle, tokenizer = Oracle(demo), Tokenizer.from_file(str(demo / "tokenizer.json"))
    answers = set()
    for prompt in ("Hello", "The baton passes", "<|im_start|>user\nHi<|im_end|>\n"):
        expected = oracle.greedy(tokenizer.encode(prompt).ids, 40)
        assert len(set(expected.token_ids)) >= 20
        answers.add(tokenizer.decode(expected.token_ids))
    assert len(answers) == 3
    assert all(answer.isascii() for answer in answers)


def test_the_configuration_and_every_tensor_fit_the_decoder(demo: Path) -> None:
    config = read_decoder_config(demo)
    assert config.family == "qwen3"
    assert config.vocab_size == VOCAB_SIZE
    assert config.max_position_embeddings == 8192
    assert len(config.eos_token_ids) == 2
    assert len(Checkpoint(demo).names()) == 2 + 11 * config.num_layers


def test_its_chat_template_and_ids_are_what_everybody_reads(demo: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo)
    turns = [{"role": "user", "content": "Hi"}]
    rendered = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    assert rendered == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    text = Text.load(str(demo))
    ids = text.encode_now(rendered)
    text.close()
    assert ids == tokenizer.encode(rendered)
    assert ids[0] == tokenizer.convert_tokens_to_ids("<|im_start|>")
    ends = tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"])
    assert read_decoder_config(demo).eos_token_ids == tuple(ends)


def test_any_text_survives_the_tokenizer(demo: Path) -> None:
    tokenizer = Tokenizer.from_file(str(demo / "tokenizer.json"))
    for text in ("A runner.", "naïve 你好 🙂", "\x00\t\r\n"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert len(tokenizer.encode("the runner passes the baton").ids) < 12


def test_a_seed_gives_one_model(demo: Path, tmp_path: Path) -> None:
    write_demo_model(tmp_path / "again")
    write_demo_model(tmp_path / "other", seed=1)
    for file in sorted(path.name for path in demo.iterdir()):
        assert (tmp_path / "again" / file).read_bytes() == (demo / file).read_bytes()
    assert fingerprint(tmp_path / "other", "float32") != fingerprint(demo, "float32")


def test_a_model_that_is_there_is_kept(tmp_path: Path) -> None:
    write_demo_model(tmp_path / "demo")
    before = (tmp_path / "demo" / "model.safetensors").stat()
    write_demo_model(tmp_path / "demo", seed=1)
    assert (tmp_path / "demo" / "model.safetensors").stat() == before


def test_a_folder_with_other_things_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="cannot write the demo model"):
        write_demo_model(tmp_path / "full")
    assert [path.name for path in tmp_path.iterdir()] == ["full"]
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["notes.txt"]


def test_writing_it_loads_neither_torch_nor_transformers(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path\n"
        "from baton.deploy.demo_model import write_demo_model\n"
        f"write_demo_model(Path({str(tmp_path / 'demo')!r}))\n"
        "assert not {'torch', 'transformers'} & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
