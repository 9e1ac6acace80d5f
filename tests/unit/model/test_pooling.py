"""Pooled rows are those of transformers, to the same bits however a prompt is cut and batched."""

import json
import shutil
from array import array
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from baton.model.checkpoint.weight_files import as_stored
from baton.model.config.decoder_config import read_decoder_config
from baton.model.config.tasks import read_tasks
from baton.model.runner.runner import Runner
from baton.node.scheduling.plan import NOT_FINITE, Slice, StepPlan
from baton.node.scheduling.pooling import pooled_numbers, pooled_with
from baton.protocol.config import Convert
from baton.protocol.errors import ConfigError
from baton.protocol.pooling import ModelTasks, Pooling
from tests.support.checkpoints import FAMILIES, model_folder, scratch_folder
from tests.support.compute import (
    Text,
    compute_config,
    loaded,
    needs_rules,
    random_tokens,
)
from tests.support.depth import nightly
from tests.support.foreign_checkpoints import foreign_folder
from tests.support.pooling_folders import (
    embedding_folder,
    embedding_of,
    labels_folder,
    labels_of,
    reranker_folder,
    score_of,
    write,
)

BLOCKS = tuple(range(8))
LENGTH = 60
TOLERANCE = 1e-3


def chunk(text: Text, start: int, end: int, pooling: Pooling | None) -> Slice:
    tokens = tuple(text.tokens[start:end])
    return Slice(text.key, start, end - start, tokens, text.blocks, pooling=pooling)


def pooled(runner: Runner, pooling: Pooling, tokens: list[int], size: int) -> bytes:
    """What a prompt's chunks of that size give, each with other sequences in its batch."""
    text = Text("one", tokens, BLOCKS)
    so_far = b""
    other = Text("other", random_tokens(30, seed=9), range(8, 12))
    for start in range(0, len(tokens), size):
        end = min(start + size, len(tokens))
        is_wanted = {"mean": True, "cls": start == 0}.get(pooling, end == len(tokens))
        slices = [chunk(text, start, end, pooling if is_wanted else None)]
        if size < len(tokens):
            slices.insert(start % 2, chunk(other, 0, 30, "mean"))
            slices.append(Text("third", [5, 6, 7], [12]).chunk(0, 3, sample=True))
        result = runner.execute(StepPlan(start, tuple(slices)))
        parts = dict(result.pooled)
        index = next(i for i, one in enumerate(slices) if one.key == text.key)
        if is_wanted:
            so_far = pooled_with(so_far, pooling, parts[index])
    return pooled_numbers(so_far, pooling, len(tokens))


def numbers(data: bytes) -> torch.Tensor:
    return torch.tensor(array("f", data))


@pytest.mark.parametrize("pooling", ["last", "mean", "cls"])
@pytest.mark.parametrize(
    "family", ["qwen3", *(nightly(one) for one in FAMILIES if one != "qwen3")]
)
def test_an_embedding_is_that_of_transformers_however_it_is_cut(family, pooling):
    folder = embedding_folder(family, pooling, num_layers=2)
    tokens = random_tokens(LENGTH)
    with loaded(compute_config(folder)) as runner:
        assert runner.decoder.head is None
        needs_rules(runner)
        whole = pooled(runner, pooling, tokens, LENGTH)
        assert {pooled(runner, pooling, tokens, size) for size in (7, 16, 59)} == {
            whole
        }
    expected = embedding_of(folder, tokens, pooling, normalizes=False)
    torch.testing.assert_close(numbers(whole), expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("num_labels", [1, 3])
def test_a_classifier_is_that_of_transformers(num_labels):
    folder = labels_folder(num_labels=num_labels, num_layers=2)
    tokens = random_tokens(LENGTH)
    with loaded(compute_config(folder)) as runner:
        found = numbers(pooled(runner, "classify", tokens, 16))
    torch.testing.assert_close(found, labels_of(folder, tokens), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("tie", [False, True])
def test_a_score_is_that_of_two_tokens(tie):
    folder = reranker_folder(num_layers=2, tie=tie)
    tokens = random_tokens(LENGTH)
    with loaded(compute_config(folder)) as runner:
        (found,) = numbers(pooled(runner, "classify", tokens, 16)).sigmoid().tolist()
    assert found == pytest.approx(score_of(folder, tokens), abs=TOLERANCE)


def test_an_odd_width_and_one_that_transformers_computes_work():
    folder = foreign_folder("smollm3")
    with loaded(compute_config(folder)) as runner:
        tokens = random_tokens(20, vocab=100)
        found = numbers(pooled(runner, "last", tokens, 20))
    expected = embedding_of(folder, tokens, normalizes=False)
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)
    odd = labels_folder(num_labels=5, num_layers=1)
    with loaded(compute_config(odd)) as runner:
        assert len(numbers(pooled(runner, "classify", tokens, 20))) == 5


def test_rows_that_are_not_finite_fail_their_slice_alone():
    folder = embedding_folder(num_layers=1)
    with loaded(compute_config(folder)) as runner:
        runner.decoder.embedding[3] = torch.nan
        broken = Text("broken", [3, 4], [0])
        fine = Text("fine", [4, 5], [1])
        plan = StepPlan(0, (chunk(broken, 0, 2, "mean"), chunk(fine, 0, 2, "last")))
        assert runner.execute(plan).failed == ((0, NOT_FINITE),)


def tasks_of(folder: Path, convert: Convert = "auto") -> ModelTasks:
    return read_tasks(
        folder, as_stored(folder, read_decoder_config(folder)), convert
    ).tasks


def makes(**tasks: object) -> ModelTasks:
    return ModelTasks(embedding_size=128, **tasks)  # type: ignore[arg-type]


def test_a_folder_says_what_its_model_can_be_asked_for():
    plain = model_folder("llama")
    assert tasks_of(plain) == makes()
    assert tasks_of(plain, "embed") == makes(embedding="last", normalizes=True)
    headless = makes(generates=False, embedding="last", normalizes=True)
    assert tasks_of(embedding_folder("llama")) == headless
    tied = embedding_folder("qwen3", "mean", normalizes=False, tie=True)
    assert tasks_of(tied) == makes(embedding="mean")
    assert tasks_of(tied, "none") == makes()
    labels = labels_folder(num_labels=2)
    assert tasks_of(labels) == makes(generates=False, num_labels=2)
    assert tasks_of(reranker_folder()) == makes(num_labels=1, scores_by_tokens=True)
    write(
        tied / "sentence_bert_config.json",
        {"max_seq_length": 64, "do_lower_case": False},
    )
    assert tasks_of(tied).max_embedded_tokens == 64
    config = json.loads((labels / "config.json").read_text())
    shown = {"activation_fn": "torch.nn.modules.linear.Identity"}
    write(labels / "config.json", config | {"sentence_transformers": shown})
    assert not tasks_of(labels).is_probability


def test_a_base_model_without_modules_makes_embeddings_of_the_last_token():
    folder = embedding_folder("mistral", num_layers=1)
    (folder / "modules.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    write(folder / "config.json", config | {"architectures": ["MistralModel"]})
    assert tasks_of(folder) == makes(generates=False, embedding="last", normalizes=True)


def test_yes_and_no_are_found_by_their_names():
    folder = scratch_folder("named") / "model"
    shutil.copytree(model_folder("qwen3"), folder)
    config = json.loads((folder / "config.json").read_text())
    write(folder / "config.json", config | {"classifier_from_token": ["no", "do"]})
    decoder = as_stored(folder, read_decoder_config(folder))
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    found = read_tasks(folder, decoder, "auto")
    assert found.label_token_ids == (vocabulary["do"], vocabulary["no"])
    # vLLM's way to say it of the original folder, whose files have no head for labels
    labels = {"architectures": ["Qwen3ForSequenceClassification"]}
    write(
        folder / "config.json",
        config | labels | {"classifier_from_token": ["no", "do"]},
    )
    assert tasks_of(folder) == makes(num_labels=1, scores_by_tokens=True)
    write(folder / "config.json", config)
    with pytest.raises(ConfigError, match="has no token"):
        tasks_of(folder, "classify")


MODULE = {
    "idx": 2,
    "name": "2",
    "path": "2_Dense",
    "type": "sentence_transformers.models.Dense",
}


@pytest.mark.parametrize(
    ("file", "content", "text"),
    [
        ("modules.json", [MODULE], "module Dense"),
        ("1_Pooling/config.json", {"pooling_mode": "max"}, "by max"),
        (
            "1_Pooling/config.json",
            {"pooling_mode": ["cls", "mean"]},
            "by cls",
        ),
        (
            "1_Pooling/config.json",
            {"pooling_mode": "mean", "include_prompt": False},
            "include_prompt false",
        ),
        ("1_Pooling/config.json", {"pooling_mode": 7}, "pooling_mode"),
        ("sentence_bert_config.json", {"do_lower_case": True}, "do_lower_case"),
        ("modules.json", {}, "modules.json"),
    ],
)
def test_what_cannot_be_computed_is_refused_by_name(file, content, text):
    folder = embedding_folder("llama", num_layers=1, tie=True)
    write(folder / file, content)
    with pytest.raises(ConfigError, match=text) as error:
        tasks_of(folder)
    assert "\n" not in error.value.message
    assert tasks_of(folder, "none") == makes()


def test_a_model_that_makes_no_tokens_cannot_be_told_to_make_nothing():
    with pytest.raises(ConfigError, match=r"model\.convert is none"):
        tasks_of(embedding_folder("llama", num_layers=1), "none")


def test_tokens_that_see_later_ones_are_refused():
    folder = embedding_folder("llama", num_layers=1)
    config = json.loads((folder / "config.json").read_text())
    write(folder / "config.json", config | {"use_bidirectional_attention": True})
    with pytest.raises(ConfigError, match="use_bidirectional_attention"):
        tasks_of(folder)


def test_a_folder_without_modules_must_have_its_head():
    folder = embedding_folder("llama", num_layers=1)
    assert "embed_tokens.weight" in load_file(folder / "model.safetensors")
    (folder / "modules.json").unlink()
    with (
        pytest.raises(ConfigError, match=r"lm_head\.weight"),
        loaded(compute_config(folder)),
    ):
        pass
