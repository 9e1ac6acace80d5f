"""A small Qwen3-style model folder made on the spot, so that baton runs without a download.

The launcher writes one when no model is given. The weights are random but seeded: the text is
nonsense with real words in it, and everything else (tokenizer, chat template, KV blocks, hand-over)
is as with any model. Needs neither torch nor transformers nor a network.
"""

import json
import math
import os
import secrets
import shutil
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from baton.protocol.errors import ConfigError

VOCAB_SIZE = 640
HIDDEN_SIZE = 128
INTERMEDIATE_SIZE = 384
NUM_LAYERS = 4
NUM_HEADS = 4
NUM_KV_HEADS = 2
HEAD_DIM = 32
MAX_POSITIONS = 8192

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
# The trainer numbers them first, in this order.
END_OF_TEXT_ID, TURN_END_ID = 0, 2
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT = """
In a relay race the first runner does not finish alone. She starts from the blocks, runs the curve
as fast as she can, and while she is still running the second runner begins to move. The baton
passes from hand to hand inside a short zone, and nobody stops for it. A good exchange costs almost
no time, and a bad one loses the race even when every runner is fast. Coaches therefore practise
the exchange more than the running: the mark on the track, the call, the open hand that reaches
back, the moment when the first runner lets go. The second runner never looks behind. He trusts
that the baton will be there, and he holds it before the other has let it go.

People who build machines that answer questions know the same problem. Reading a long question is
heavy work for a short time; writing the answer is light work for a long time, one word after
another. When one machine does both, the heavy work of a new question makes everybody who waits for
the next word wait longer. So the reading is given to one group of machines and the writing to
another, and what was understood is handed over between them, block by block, while the reading is
still going on. The first word comes from the reader, all the other words come from the writer, and
whoever listens hears a single voice.

What can go wrong at the exchange? The writer may have no room, so it must say in advance how much
it can take. The reader may stop in the middle, so somebody must notice and start again somewhere
else. The baton may be dropped, or an old one may be taken for the new one, so each carries a number
that is checked by both hands. Such rules are simple, but they have to hold every time: in the rain,
at night, with tired runners, and on the last lap when everything else has already gone wrong.
"""

Array = NDArray[np.float32]


def write_demo_model(folder: Path, *, seed: int = 0) -> None:
    """Write the model to `folder`, all of it or nothing; a demo model already there stays.

    Raises `ConfigError` when `folder` holds something else or cannot be written.
    """
    if (folder / "config.json").is_file():
        return
    # Beside the target, so that the rename stays inside one file system.
    draft = folder.parent / f".{folder.name}.{os.getpid()}-{secrets.token_hex(4)}"
    try:
        draft.mkdir(parents=True)
        _write(draft, seed)
        draft.rename(folder)
    except OSError as error:
        # Two processes may start at once; the one that renames second finds the work done.
        if not (folder / "config.json").is_file():
            raise ConfigError(f"cannot write the demo model to {folder}: {error}") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _write(folder: Path, seed: int) -> None:
    tokenizer = _train_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    save_file(
        _weights(seed, _readable(tokenizer)),
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    _write_json(folder / "config.json", _config())
    _write_json(folder / "generation_config.json", {"eos_token_id": [TURN_END_ID, END_OF_TEXT_ID]})
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": TURN_END,
            "pad_token": END_OF_TEXT,
            "model_max_length": MAX_POSITIONS,
            "chat_template": CHAT_TEMPLATE,
        },
    )


def _config() -> dict[str, object]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": INTERMEDIATE_SIZE,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "max_position_embeddings": MAX_POSITIONS,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "use_sliding_window": False,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "dtype": "float32",
        "bos_token_id": END_OF_TEXT_ID,
        "eos_token_id": TURN_END_ID,
        "pad_token_id": END_OF_TEXT_ID,
    }


def _train_tokenizer() -> Tokenizer:
    """Byte-level BPE over `TEXT`: every byte has an id, so every prompt can be encoded."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        min_frequency=1,
        special_tokens=[END_OF_TEXT, TURN_START, TURN_END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    assert tokenizer.get_vocab_size() == VOCAB_SIZE, "the text is long enough for every id"
    return tokenizer


def _readable(tokenizer: Tokenizer) -> NDArray[np.bool_]:
    """Which ids are whole words or their ends and beginnings, in plain ASCII."""
    readable = np.zeros(VOCAB_SIZE, dtype=np.bool_)
    for token in range(VOCAB_SIZE):
        text = tokenizer.decode([token])
        readable[token] = len(text) > 1 and text.isascii() and text.isprintable()
    return readable


def _weights(seed: int, readable: NDArray[np.bool_]) -> dict[str, Array]:
    """Scales found by trial: greedy text neither repeats itself nor hangs on rounding."""
    random = np.random.Generator(np.random.PCG64(seed))

    def matrix(rows: int, columns: int, scale: float) -> Array:
        values = random.standard_normal((rows, columns), dtype=np.float32)
        return values * np.float32(scale)

    embedding = matrix(VOCAB_SIZE, HIDDEN_SIZE, 0.5)
    # Short rows give small logits: lone bytes are read but seldom written.
    embedding[~readable] *= np.float32(0.2)
    weights = {"model.embed_tokens.weight": embedding, "model.norm.weight": _ones(HIDDEN_SIZE)}
    scale = 1.7 / math.sqrt(HIDDEN_SIZE)
    linear = {
        "self_attn.q_proj": (NUM_HEADS * HEAD_DIM, HIDDEN_SIZE),
        "self_attn.k_proj": (NUM_KV_HEADS * HEAD_DIM, HIDDEN_SIZE),
        "self_attn.v_proj": (NUM_KV_HEADS * HEAD_DIM, HIDDEN_SIZE),
        "self_attn.o_proj": (HIDDEN_SIZE, NUM_HEADS * HEAD_DIM),
        "mlp.gate_proj": (INTERMEDIATE_SIZE, HIDDEN_SIZE),
        "mlp.up_proj": (INTERMEDIATE_SIZE, HIDDEN_SIZE),
        "mlp.down_proj": (HIDDEN_SIZE, INTERMEDIATE_SIZE),
    }
    for layer in range(NUM_LAYERS):
        prefix = f"model.layers.{layer}."
        for name, (rows, columns) in linear.items():
            weights[f"{prefix}{name}.weight"] = matrix(rows, columns, scale)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}{name}.weight"] = _ones(HIDDEN_SIZE)
        for name in ("q_norm", "k_norm"):
            weights[f"{prefix}self_attn.{name}.weight"] = 2 * _ones(HEAD_DIM)
    return weights


def _ones(size: int) -> Array:
    return np.ones(size, dtype=np.float32)


def _write_json(file: Path, content: dict[str, object]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n")
