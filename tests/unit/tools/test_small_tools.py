"""The small tools: floors of a tiny model, random models, and the commands of the peers."""

import re
from pathlib import Path

import pytest
import torch

from baton.model.config.decoder_config import read_decoder_config
from baton.model.loading.decoder_loading import load_decoder
from baton.model.loading.layer_weights import RankDevice
from baton.model.loading.weights import Checkpoint
from baton.model.tensor_parallel import SingleRank
from baton.protocol.errors import ConfigError
from tests.support.checkpoints import model_folder
from tests.support.compute import no_progress
from tools import embeddings, floor, random_model
from tools.gpu.floors import Shape
from tools.peers.arms import KINDS, Arm, ArmSite, commands, parse_arm

TINY = Shape("tiny", 64, 96, 2, 4, 2, 32, 300, is_tied=False)
CPU = torch.device("cpu")
PLACE = ArmSite(
    Path("/models/m"), (9000, 9001, 9002, 9003, 9004, 9005), Path("/run/x"), Path("/p")
)


def test_the_folder_has_the_shape_that_was_asked_for(tmp_path):
    folder = tmp_path / "model"
    random_model.write_model(folder, TINY, CPU)
    config = read_decoder_config(folder)
    assert (config.family, config.num_layers, config.head_dim) == ("qwen3", 2, 32)
    assert (config.vocab_size, config.eos_token_ids) == (300, (random_model.END_ID,))
    decoder = load_decoder(
        config,
        Checkpoint(folder),
        SingleRank(),
        RankDevice(torch.bfloat16, CPU),
        no_progress,
    )
    values = sum(
        layer.qkv.weight.numel()
        + layer.output.weight.numel()
        + sum(linear.weight.numel() for linear in layer.mlp.linears())
        for layer in decoder.layers
    )
    assert values == TINY.body_values
    assert decoder.head.weight.numel() == TINY.head_values


def test_a_folder_in_four_bits_is_close_to_the_one_that_it_was(tmp_path):
    folder = tmp_path / "model"
    found = []
    random_model.write_model(
        folder, Shape("", 128, 128, 1, 4, 2, 32, 300, is_tied=True), CPU
    )
    for change in (lambda _: None, random_model.in_four_bits):
        change(folder)
        config = read_decoder_config(folder)
        place = RankDevice(torch.float32, CPU)
        decoder = load_decoder(
            config, Checkpoint(folder), SingleRank(), place, no_progress
        )
        found.append(decoder.layers[0].output(torch.eye(128)))
    assert 0 < (found[0] - found[1]).abs().max() < found[0].abs().max() / 14


@pytest.mark.slow
def test_embeddings_of_a_random_model_are_counted(tmp_path, capsys):
    folder = tmp_path / "model"
    random_model.write_model(folder, TINY, CPU)
    assert embeddings.main([str(folder), "--texts", "9", "--rounds", "2"]) == 0
    (line, *_) = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"baton: [\d.]+ embeddings/s \([\d.]+ [\d.]+\)", line)


def test_every_case_gets_a_line(capsys):
    folder = model_folder("qwen3", num_layers=2)
    words = ["--prompts", "40", "--batches", "2", "--contexts", "20"]
    assert floor.main([str(folder), *words, "--rounds", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert [row[0] for row in cells] == ["step", "---", "prompt 40", "decode 2 x 20"]
    assert all(len(row) == len(cells[0]) for row in cells)
    assert all(float(value) > 0 for row in cells[2:] for value in row[1:7])


def test_an_arm_is_a_make_and_options():
    assert parse_arm("baton-split") == Arm("baton-split")
    assert parse_arm("vllm+compiled+chunk=256") == Arm("vllm", True, 256)
    assert parse_arm("vllm+compiled+chunk=256").name == "vllm-compiled-chunk256"


@pytest.mark.parametrize(
    "text", ["tgi", "vllm+fast", "vllm+chunk=", "vllm+chunk=0", "baton+compiled", ""]
)
def test_an_unknown_arm_is_refused_in_one_line(text):
    with pytest.raises(ConfigError) as refused:
        parse_arm(text)
    assert "\n" not in refused.value.message


@pytest.mark.parametrize("kind", KINDS)
def test_the_last_process_of_an_arm_answers_at_its_url(kind):
    listed = commands(Arm(kind), PLACE)
    assert listed[-1].ready_url == "http://127.0.0.1:9000/health"
    assert "9000" in listed[-1].argv
    assert len({command.name for command in listed}) == len(listed)
    for command in listed:
        assert "0.0.0.0" not in " ".join(command.argv)
        assert any(
            word == "/models/m" or word.endswith("=/models/m") for word in command.argv
        ) or (command.name.endswith("router"))
