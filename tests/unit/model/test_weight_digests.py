"""Every byte of the weights is read, once; holes in them are refused, and whole models are not."""

import json
import os
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from baton.model.loading.weight_digests import SETTLED_S, WeightDigest
from baton.model.runner.rank import load_rank
from baton.model.tensor_parallel import SingleRank
from baton.protocol.errors import ConfigError
from baton.protocol.ids import Epoch
from tests.support.checkpoints import model_folder, write_checkpoint
from tests.support.compute import compute_config, no_progress, weight_digest
from tests.support.foreign_checkpoints import foreign_folder

FILE = "model.safetensors"
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
UP = "model.layers.0.mlp.up_proj.weight"
DOWN = "model.layers.0.mlp.down_proj.weight"
OUTPUT = "model.layers.0.self_attn.o_proj.weight"
EXPERT = "model.layers.0.mlp.experts.1."

Damage = Callable[[dict[str, Tensor]], None]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "baton" / "weights"


def small_model(folder: Path, family: str, dtype: str) -> Path:
    """Write a model of one layer."""
    if family != "qwen3_moe":
        return write_checkpoint(folder, family, num_layers=1, dtype=dtype)
    shutil.copytree(foreign_folder(family, num_hidden_layers=1, dtype=dtype), folder)
    return folder


def changed(folder: Path, change: Damage) -> Path:
    tensors = load_file(folder / FILE)
    change(tensors)
    save_file(tensors, folder / FILE)
    return folder


def settle(file: Path) -> None:
    """Wait until a file that was just written may be taken for one that nobody writes."""
    time.sleep(max(0.0, file.stat().st_ctime + SETTLED_S + 0.1 - time.time()))


@pytest.mark.usefixtures("cache")
def test_the_digest_depends_on_every_byte_of_every_tensor(tmp_path):
    folder = write_checkpoint(tmp_path / "m", "qwen3", num_layers=1)
    digests = {weight_digest(folder)}
    content = (folder / FILE).read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    places = range(start, len(content), (len(content) - start) // 40)
    for place in (*places, len(content) - 1):
        damaged = bytearray(content)
        damaged[place] ^= 1
        (folder / FILE).write_bytes(damaged)
        digests.add(weight_digest(folder))
    assert len(digests) == len(places) + 2


def test_a_file_is_read_once_for_as_long_as_it_is_the_same(cache, tmp_path):
    folder = write_checkpoint(tmp_path / "m", "qwen3", num_layers=1)
    settle(folder / FILE)
    digest = weight_digest(folder)
    (entry,) = cache.iterdir()
    assert (cache.stat().st_mode | entry.stat().st_mode) & 0o077 == 0
    other = bytes(16)
    entry.write_text(other.hex() + "\n")
    assert weight_digest(folder) == other, "the file was read again"
    for broken in ("", digest.hex(), "x" * 33, other.hex() + "\n\n"):
        entry.write_text(broken)
        assert weight_digest(folder) == digest
    entry.write_text(other.hex() + "\n")
    os.utime(folder / FILE)
    assert weight_digest(folder) == digest
    assert len(list(cache.iterdir())) == 2


def test_an_entry_that_other_users_could_have_written_is_not_believed(cache, tmp_path):
    folder = write_checkpoint(tmp_path / "m", "qwen3", num_layers=1)
    settle(folder / FILE)
    digest = weight_digest(folder)
    (entry,) = cache.iterdir()
    entry.write_text(bytes(16).hex() + "\n")
    for path in (entry, cache):
        mode = path.stat().st_mode
        path.chmod(mode | 0o022)
        assert weight_digest(folder) == digest
        path.chmod(mode)
    target = entry.rename(tmp_path / "elsewhere")
    entry.symlink_to(target)
    assert weight_digest(folder) == digest


def test_a_file_that_was_just_written_is_not_cached(cache, tmp_path):
    """It may be written again while its time stays the same."""
    folder = write_checkpoint(tmp_path / "m", "qwen3", num_layers=1)
    weight_digest(folder)
    (entry,) = cache.iterdir()
    assert not entry.read_bytes()


def test_readers_at_the_same_time_find_one_digest(cache, tmp_path):
    folder = write_checkpoint(tmp_path / "m", "qwen3", shards=3)
    settle(folder / "model-00003-of-00003.safetensors")
    with ThreadPoolExecutor(8) as threads:
        digests = set(threads.map(weight_digest, [folder] * 8))
    assert [len(entry.read_bytes()) for entry in cache.iterdir()] == [33] * 3
    assert digests == {weight_digest(model_folder("qwen3"))}


@pytest.mark.usefixtures("cache")
def test_a_file_that_changes_while_it_is_loaded_is_refused(tmp_path):
    folder = write_checkpoint(tmp_path / "m", "qwen3", num_layers=1)
    with WeightDigest(folder) as digest:
        os.utime(folder / FILE)
        with pytest.raises(ConfigError, match=r"model\.safetensors"):
            digest.result(no_progress)
    with WeightDigest(folder) as digest:
        (folder / FILE).unlink()
        with pytest.raises(ConfigError, match=r"model\.safetensors"):
            digest.result(no_progress)


def test_a_load_that_fails_ends_the_reading():
    before = threading.active_count()
    with pytest.raises(KeyError), WeightDigest(model_folder("qwen3")):
        raise KeyError
    assert threading.active_count() == before


def zero_rows(name: str, first: int, last: int) -> Damage:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[name].flatten(0, -2)[first:last] = 0

    return change


def nan_in(name: str) -> Damage:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[name].view(-1)[-1] = -float("nan")

    return change


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("family", "name", "damage"),
    [
        ("llama", UP, zero_rows(UP, 0, 128)),
        ("llama", UP, zero_rows(UP, 0, 256)),
        ("llama", DOWN, zero_rows(DOWN, 60, 127)),
        ("llama", HEAD, zero_rows(HEAD, 300, 900)),
        ("llama", EMBEDDING, zero_rows(EMBEDDING, 512, 1024)),
        (
            "qwen3_moe",
            EXPERT + "up_proj.weight",
            zero_rows(EXPERT + "up_proj.weight", 4, 28),
        ),
        ("llama", UP, nan_in(UP)),
        ("llama", EMBEDDING, nan_in(EMBEDDING)),
    ],
)
def test_a_node_does_not_load_weights_with_holes(family, name, damage, dtype, tmp_path):
    folder = changed(small_model(tmp_path / "m", family, dtype), damage)
    with pytest.raises(ConfigError) as raised:
        load_rank(compute_config(folder), Epoch("ab"), SingleRank(), no_progress)
    assert f"{folder / FILE}: {name} h" in raised.value.message
    assert "\n" not in raised.value.message


def switched_off(tensors: dict[str, Tensor]) -> None:
    tensors[OUTPUT].zero_()
    tensors[DOWN].zero_()


def without_expert(tensors: dict[str, Tensor]) -> None:
    for part in ("gate_proj", "up_proj", "down_proj"):
        tensors[f"{EXPERT}{part}.weight"].zero_()


def without_biases(tensors: dict[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if name.endswith("bias"):
            tensor.zero_()


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("llama", switched_off),
        ("llama", without_biases),
        ("llama", zero_rows(UP, 200, 256)),  # padded, so that ranks can share it
        ("qwen3_moe", without_expert),
    ],
)
def test_zeros_of_whole_models_are_no_damage(family, change, tmp_path):
    weight_digest(changed(small_model(tmp_path / "m", family, "float32"), change))


def test_rows_that_the_tokenizer_never_names_do_not_count(tmp_path):
    folder = write_checkpoint(tmp_path / "m", "llama", num_layers=1)
    changed(folder, zero_rows(EMBEDDING, 400, 1024))
    with pytest.raises(ConfigError, match=r"embed_tokens\.weight has 61%"):
        weight_digest(folder)
    vocab = {f"w{number}": number for number in range(400)}
    added = [{"id": 400, "content": "<pad>"}]
    for model in (
        {"vocab": vocab},
        {"type": "Unigram", "vocab": [[w, 0.5] for w in vocab]},
    ):
        tokenizer = {"model": model, "added_tokens": added}
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
        weight_digest(folder)
    (folder / "tokenizer.json").unlink()
    weight_digest(folder)  # the zeros are at the end, where padding is
    changed(folder, zero_rows(EMBEDDING, 0, 300))
    with pytest.raises(ConfigError, match=r"embed_tokens\.weight"):
        weight_digest(folder)


@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float16]
)
def test_nan_is_seen_in_every_type_and_infinity_is_not_taken_for_it(dtype, tmp_path):
    """Infinity is judged where it matters, in the head."""
    numbers = torch.randn(64, 64).to(dtype)
    numbers[3, 3] = torch.finfo(dtype).max
    numbers[4, 4] = -torch.finfo(dtype).max
    if dtype != torch.float8_e4m3fn:
        numbers[5, 5] = -float("inf")
    save_file({"a.weight": numbers}, tmp_path / FILE)
    weight_digest(tmp_path)
    for number in (float("nan"), -float("nan")):
        numbers[9, 9] = number
        save_file({"a.weight": numbers}, tmp_path / FILE)
        with pytest.raises(ConfigError, match=r"a\.weight holds NaN"):
            weight_digest(tmp_path)
