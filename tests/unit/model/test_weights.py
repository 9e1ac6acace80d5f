"""Tensors are found in any number of files and told apart; random checkpoints are worth using."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.model.checkpoint.tensors import decoder_tensors
from baton.model.checkpoint.weight_files import check_tensors
from baton.model.config.decoder_config import read_decoder_config
from baton.model.loading.decoder_loading import load_decoder
from baton.model.loading.layer_weights import RankDevice
from baton.model.loading.weights import Checkpoint
from baton.model.tensor_parallel import SingleRank
from baton.protocol.errors import ConfigError
from tests.support.checkpoints import FAMILIES, model_folder, write_checkpoint
from tests.support.compute import model_fingerprint, no_progress

EMBEDDING = "model.embed_tokens.weight"


@pytest.mark.parametrize("shards", [1, 3])
def test_every_tensor_reads_as_it_was_saved(shards):
    checkpoint = Checkpoint(model_folder("qwen2", shards=shards))
    saved = load_file(model_folder("qwen2") / "model.safetensors")
    assert checkpoint.shapes().keys() == saved.keys()
    for name, tensor in saved.items():
        assert torch.equal(checkpoint.read(name), tensor)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_part_is_the_part_of_the_whole(dtype):
    checkpoint = Checkpoint(model_folder("llama", dtype=dtype))
    whole = checkpoint.read(EMBEDDING)
    assert whole.dtype == getattr(torch, dtype)
    rows = slice(100, 300)
    columns = slice(32, 64)
    assert torch.equal(checkpoint.read(EMBEDDING, rows=rows), whole[rows])
    assert torch.equal(checkpoint.read(EMBEDDING, columns=columns), whole[:, columns])
    assert torch.equal(
        checkpoint.read(EMBEDDING, rows=rows, columns=columns), whole[rows, columns]
    )
    norm = "model.norm.weight"
    assert torch.equal(
        checkpoint.read(norm, rows=columns), checkpoint.read(norm)[columns]
    )


def test_damaged_folders_are_refused_in_one_line(tmp_path):
    with pytest.raises(ConfigError, match=r"neither model\.safetensors"):
        Checkpoint(tmp_path)
    single = tmp_path / "model.safetensors"
    for content in (
        b"",
        b"short",
        (1 << 60).to_bytes(8, "little"),
        b"\x02" + bytes(7) + b"[]",
    ):
        single.write_bytes(content)
        with pytest.raises(ConfigError, match=r"model\.safetensors"):
            Checkpoint(tmp_path)
    single.unlink()
    index = tmp_path / "model.safetensors.index.json"
    index.write_text("{}")
    with pytest.raises(ConfigError, match="weight_map"):
        Checkpoint(tmp_path)
    index.write_text(json.dumps({"weight_map": {"a": "model-2.safetensors"}}))
    with pytest.raises(ConfigError, match=r"model-2\.safetensors"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("data_offsets", [0, 131072]),  # those of another tensor
        ("dtype", "BF16"),
        ("dtype", "F99"),
        ("shape", [2, 2]),
    ],
)
def test_a_header_that_contradicts_itself_is_refused_before_a_tensor_is_read(
    field, value, tmp_path
):
    file = write_checkpoint(tmp_path / "m", "llama", num_layers=1) / "model.safetensors"
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header["model.layers.0.mlp.up_proj.weight"][field] = value
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
    with pytest.raises(ConfigError, match=r"model\.safetensors") as raised:
        Checkpoint(file.parent)
    assert "\n" not in raised.value.message


def test_a_file_that_lost_its_end_is_a_config_error(tmp_path):
    folder = write_checkpoint(tmp_path / "m", "llama", num_layers=1)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-5000])
    with pytest.raises(ConfigError, match=r"model\.safetensors"):
        Checkpoint(folder).read(EMBEDDING)
    with pytest.raises(ConfigError, match=r"model\.safetensors"):
        model_fingerprint(folder)


def test_equal_models_have_one_fingerprint_however_they_are_stored(tmp_path):
    one = model_fingerprint(model_folder("qwen3"))
    assert model_fingerprint(model_folder("qwen3", shards=3)) == one
    copy = write_checkpoint(tmp_path / "copy", "qwen3")
    config = json.loads((copy / "config.json").read_text())
    config |= {"transformers_version": "9.9", "_name_or_path": "elsewhere"}
    (copy / "config.json").write_text(json.dumps(config))
    assert model_fingerprint(copy) == one


def test_models_of_equal_shape_have_other_fingerprints(tmp_path):
    folder = write_checkpoint(tmp_path / "m", "qwen3")
    seen = {model_fingerprint(folder), model_fingerprint(folder, "bfloat16")}
    seen.add(model_fingerprint(model_folder("qwen3", seed=1)))
    tensors = load_file(folder / "model.safetensors")
    # One number of a large one.
    tensors["model.layers.2.mlp.up_proj.weight"][100, 50] += 1e-3
    save_file(tensors, folder / "model.safetensors")
    seen.add(model_fingerprint(folder))
    config = json.loads((folder / "config.json").read_text()) | {"rope_theta": 20000.0}
    (folder / "config.json").write_text(json.dumps(config))
    seen.add(model_fingerprint(folder))
    assert len(seen) == 5


def checked(folder: Path) -> None:
    check_tensors(folder, read_decoder_config(folder))


def changed(folder: Path, **tensors: torch.Tensor | None) -> Path:
    """A copy of a folder with these tensors, of which None means none."""
    file = folder / "model.safetensors"
    stored = {
        **load_file(file),
        **{name.replace("__", "."): new for name, new in tensors.items()},
    }
    save_file({name: new for name, new in stored.items() if new is not None}, file)
    return folder


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tie", [True, False])
def test_the_tensors_of_a_model_are_those_that_its_decoder_reads(family, tie):
    has_bias = family in ("llama", "qwen3")
    is_llama = family == "llama"
    folder = model_folder(
        family, num_layers=2, tie=tie, attention_bias=has_bias, mlp_bias=is_llama
    )
    checked(folder)
    read: set[str] = set()

    class Noting(Checkpoint):
        def read(self, name: str, **part: slice | None) -> torch.Tensor:
            read.add(name)
            return super().read(name, **part)

    config = read_decoder_config(folder)
    place = RankDevice(torch.float32, torch.device("cpu"))
    load_decoder(config, Noting(folder), SingleRank(), place, no_progress)
    assert read == decoder_tensors(config).shapes().keys()


@pytest.mark.parametrize("number", [float("nan"), float("inf"), 3e38])
@pytest.mark.parametrize(
    ("name", "tie"),
    [("lm_head", False), ("model.embed_tokens", True), ("model.norm", False)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_whose_logits_might_not_be_finite_are_refused(
    number, name, tie, dtype, tmp_path
):
    """Steps look at hidden states only."""
    folder = write_checkpoint(tmp_path / "m", "llama", num_layers=1, tie=tie)
    tensors = load_file(folder / "model.safetensors")
    tensors[f"{name}.weight"].view(-1)[7] = number
    save_file(tensors, folder / "model.safetensors")
    place = RankDevice(dtype, torch.device("cpu"))
    with pytest.raises(ConfigError, match="holds NaN"):
        load_decoder(
            read_decoder_config(folder),
            Checkpoint(folder),
            SingleRank(),
            place,
            no_progress,
        )


ONE = torch.ones(1)
LAYER = "model__layers__1__"


@pytest.mark.parametrize(
    ("tensors", "why"),
    [
        (
            {LAYER + "self_attn__q_proj__weight_scale": ONE},
            "nothing in config.json calls for",
        ),
        (
            {LAYER + "self_attn__q_proj__weight_scale_inv": ONE},
            "nothing in config.json calls for",
        ),
        (
            {LAYER + "self_attn__o_proj__bias": torch.ones(128)},
            "nothing in config.json calls for",
        ),
        (
            {"model__layers__2__input_layernorm__weight": ONE},
            "nothing in config.json calls for",
        ),
        (
            {LAYER + "self_attn__q_proj__weight": None},
            "model.layers.1.self_attn.q",
        ),
        ({"lm_head__weight": None}, "lm_head.weight"),
        (
            {LAYER + "self_attn__k_proj__weight": torch.ones(128, 128)},
            "implies [64, 128]",
        ),
        (
            {LAYER + "self_attn__k_proj__weight": torch.ones(32, 128)},
            "implies [64, 128]",
        ),
        ({"model__embed_tokens__weight": torch.ones(1000, 128)}, "implies [1024, 128]"),
        (
            {LAYER + "mlp__up_proj__weight": torch.ones(256, 128, dtype=torch.int8)},
            "is I8",
        ),
        (
            {
                LAYER + "mlp__up_proj__weight": torch.ones(256, 128).to(
                    torch.float8_e4m3fn
                )
            },
            "F8_E4M3",
        ),
        (
            {LAYER + "mlp__up_proj__weight": torch.ones(256, 128, dtype=torch.float64)},
            "F64",
        ),
    ],
)
def test_files_that_contradict_the_configuration_are_refused(tensors, why, tmp_path):
    folder = changed(write_checkpoint(tmp_path / "m", "llama", num_layers=2), **tensors)
    with pytest.raises(ConfigError) as raised:
        checked(folder)
    assert why in raised.value.message
    assert "\n" not in raised.value.message


def test_what_follows_from_the_configuration_may_be_stored_too(tmp_path):
    folder = write_checkpoint(tmp_path / "m", "qwen3", num_layers=2, tie=True)
    embedding = load_file(folder / "model.safetensors")[EMBEDDING]
    changed(
        folder,
        lm_head__weight=embedding,
        **{LAYER + "self_attn__rotary_emb__inv_freq": ONE},
    )
    checked(folder)
    changed(folder, lm_head__weight=embedding + 1)
    with pytest.raises(ConfigError, match="tie_word_embeddings"):
        checked(folder)


def test_one_file_hides_the_shards_beside_it_and_no_tensor_is_there_twice(tmp_path):
    folder = write_checkpoint(tmp_path / "m", "llama", num_layers=2, shards=3)
    whole = load_file(
        write_checkpoint(tmp_path / "n", "llama", num_layers=2) / "model.safetensors"
    )
    whole[EMBEDDING] = whole[EMBEDDING] + 1
    save_file(whole, folder / "model.safetensors")
    assert torch.equal(Checkpoint(folder).read(EMBEDDING), whole[EMBEDDING])
    (folder / "model.safetensors").unlink()
    checked(folder)
    first, second, *_ = sorted(folder.glob("model-*.safetensors"))
    twice = load_file(first)
    save_file({**load_file(second), **twice}, second)
    checked(folder)  # the bytes are equal
    save_file(
        {**load_file(second), **{name: one + 1 for name, one in twice.items()}}, second
    )
    with pytest.raises(ConfigError, match=r"lm_head\.weight"):
        checked(folder)
