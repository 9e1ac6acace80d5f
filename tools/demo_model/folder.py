"""The demo model as a Hugging Face folder: its tokenizer, its configuration, and their files."""

import json
import random
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from tools.demo_model import text
from tools.demo_model.text import END_OF_TEXT, TURN_END

VOCAB_SIZE = 768
END_OF_TEXT_ID, TURN_START_ID, TURN_END_ID = 0, 1, 2  # the trainer numbers them first
MAX_POSITIONS = 8192
# Of a chat that sets no limit: text that the model was not taught may never come to an end.
MAX_ANSWER_TOKENS = 256
CHAT_TEMPLATE = (
    Path(__file__).with_name("chat_template.jinja").read_text(encoding="utf-8")
)


def train_tokenizer(seed: int) -> Tokenizer:
    """Train byte-level BPE over the demo model's own text, with a token per digit."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(" ?[0-9]"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[text.END_OF_TEXT, text.TURN_START, text.TURN_END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_lines(random.Random(seed)), trainer)
    return tokenizer


def _lines(rng: random.Random) -> Iterator[str]:
    for fact in text.facts(rng, 4000):
        yield _plain(text.statement(fact) + text.question(fact))
    for _ in range(2000):
        yield _plain(text.exercise(rng) + text.filler(rng))


def _plain(document: text.Document) -> str:
    """Return the text without the marks of turns, which have ids of their own."""
    return "".join(
        piece.text.replace(text.TURN_START, "").replace(text.TURN_END, "")
        for piece in document
    )


def config() -> Qwen3Config:
    return Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_POSITIONS,
        # With a large base, the slow half of the rotations hardly turns within 4,096 tokens, so
        # attention finds content at any distance.
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=True,
        bos_token_id=END_OF_TEXT_ID,
        eos_token_id=TURN_END_ID,
        pad_token_id=END_OF_TEXT_ID,
        attn_implementation="sdpa",
    )


def write(folder: Path, model: Qwen3ForCausalLM, tokenizer: Tokenizer) -> None:
    """Write the tokenizer, and the model in float32 with its tied tensors stored once."""
    model.generation_config = GenerationConfig(
        eos_token_id=[TURN_END_ID, END_OF_TEXT_ID], max_new_tokens=MAX_ANSWER_TOKENS
    )
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "model_max_length": MAX_POSITIONS,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(
        json.dumps(described, indent=2) + "\n"
    )
