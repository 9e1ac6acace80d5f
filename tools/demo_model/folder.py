"""The demo model as a Hugging Face folder: its configuration, and how training writes it."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers import Qwen3Config, Qwen3ForCausalLM

from tools.demo_model.text import END_OF_TEXT, TURN_END
from tools.demo_model.tokenizer import END_OF_TEXT_ID, TURN_END_ID, VOCAB_SIZE

MAX_POSITIONS = 8192
# Of a chat that sets no limit: text that the model was not taught may never come to an end.
MAX_ANSWER_TOKENS = 256
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
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
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: tensor.detach().to(torch.float32).contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"
    }
    weights = folder / "model.safetensors"
    save_file(tensors, weights, metadata={"format": "pt"})
    weights.chmod(0o644)
    tokenizer.save(str(folder / "tokenizer.json"))
    described = model.config.to_diff_dict() | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "dtype": "float32",
    }
    _write_json(folder / "config.json", described)
    _write_json(
        folder / "generation_config.json",
        {"eos_token_id": [TURN_END_ID, END_OF_TEXT_ID], "max_new_tokens": MAX_ANSWER_TOKENS},
    )
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


def _write_json(file: Path, content: dict[str, object]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n")
