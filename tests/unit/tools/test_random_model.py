"""A random model's folder is one that baton, and any server of Hugging Face folders, can load."""

from pathlib import Path

import torch
from tokenizers import Tokenizer

from baton.engine.compute.loading import Placement, load_decoder
from baton.engine.compute.model_config import read_decoder_config
from baton.engine.compute.tensor_parallel import SingleRank
from baton.engine.compute.weights import Checkpoint
from baton.router.text import Text
from tests.support.compute import no_progress
from tools import random_model
from tools.gpu.floors import Shape

TINY = Shape("tiny", 64, 96, 2, 4, 2, 32, 300, is_tied=False)
CPU = torch.device("cpu")


def test_the_folder_has_the_shape_that_was_asked_for(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    random_model.write_model(folder, TINY, CPU)
    config = read_decoder_config(folder)
    assert (config.family, config.num_layers, config.head_dim) == ("qwen3", 2, 32)
    assert (config.vocab_size, config.eos_token_ids) == (300, (random_model.END_ID,))
    decoder = load_decoder(
        config, Checkpoint(folder), SingleRank(), Placement(torch.bfloat16, CPU), no_progress
    )
    values = sum(
        layer.qkv.weight.numel() + layer.output.weight.numel()
        + layer.gate_up.weight.numel() + layer.down.weight.numel()
        for layer in decoder.layers
    )  # fmt: skip
    assert values == TINY.body_values
    assert decoder.head.weight.numel() == TINY.head_values


def test_any_text_can_be_its_prompt(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    random_model.write_model(folder, TINY, CPU)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.decode(tokenizer.encode("Grüße, 世界").ids) == "Grüße, 世界"
    Text.load(str(folder)).close()  # the router takes it
