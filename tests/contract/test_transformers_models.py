"""Models that transformers' own code computes: right, or refused in one line that says why."""

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from baton import LLM
from baton.deploy.model_folder import with_model
from baton.model.runner.compute_digest import compute_path, is_batch_invariant
from baton.model.runner.rank_plan import plan_rank
from baton.protocol.config import ClusterConfig
from baton.protocol.errors import ConfigError, NodeError
from baton.runtime.fields import with_values
from tests.support.compute import (
    Text,
    compute_config,
    greedy,
    loaded,
    logits,
    needs_rules,
)
from tests.support.foreign_checkpoints import changed, foreign_folder, small_folder
from tests.support.oracle import Expected, Oracle, count_ties, prompt

pytestmark = pytest.mark.timeout(300)  # the first one imports transformers' modelling
NUM_TOKENS = 20
# For the families that baton's own decoder has, too.
IMPL = {"model_impl": "transformers"}
RUNS = ("qwen3_moe", "olmo2", "gemma3_text", "gpt_oss")
OTHERS = (
    "deepseek_v3",
    "mixtral",
    "phi3",
    "granite",
    "cohere",
    "smollm3",
    "glm4",
    "gpt2",
    "gemma2",
)
REFUSED = {
    "bloom": "0 of 2 layers attend",
    "mamba": "layers of the kind linear_attention",
    "llama4_text": "layers of the kind chunked_attention",
    "phimoe": "logits differ from the whole model's",
}


def settings(kind: str, dtype: str = "auto", **model: object) -> ClusterConfig:
    config = compute_config(foreign_folder(kind), dtype)
    model = {**IMPL, **model}
    return msgspec.structs.replace(
        config, model=msgspec.structs.replace(config.model, **model)
    )


@pytest.mark.parametrize(
    "kind", [*RUNS, *(pytest.param(one, marks=pytest.mark.release) for one in OTHERS)]
)
def test_chunks_beside_others_give_the_tokens_of_generate(kind):
    expected = Oracle(foreign_folder(kind)).greedy(prompt(100), NUM_TOKENS)
    assert said(settings(kind), expected) == 0


def said(config: ClusterConfig, expected: Expected) -> int:
    """Compute a prompt in chunks beside another one; return the ties with what was expected."""
    with loaded(config) as runner:
        text = Text("a", prompt(100), range(20))
        other = Text("b", prompt(37, 1), range(20, 24))
        logits(runner, text.chunk(0, 64), other.chunk(0, 5))
        logits(runner, other.chunk(5, 37), text.chunk(64, 99))
        return count_ties(expected, greedy(runner, text, NUM_TOKENS))


@pytest.mark.parametrize(
    "kind",
    ["qwen3_moe", "olmo2", pytest.param("deepseek_v3", marks=pytest.mark.release)],
)
@pytest.mark.parametrize(
    "dtype", [pytest.param("float32", marks=pytest.mark.release), "bfloat16"]
)
def test_a_row_has_the_same_bits_whole_in_chunks_and_in_a_crowd(kind, dtype):
    with loaded(settings(kind, dtype)) as runner:
        needs_rules(runner)
        assert is_batch_invariant(runner)
        text = Text("a", prompt(90), range(10))
        other = Text("b", prompt(70, 1), range(20, 30))
        (whole,) = logits(runner, text.chunk(0, 90))
        parts = [
            logits(runner, text.chunk(0, 33))[0],
            logits(runner, other.chunk(0, 70), text.chunk(33, 89))[1],
            logits(runner, text.chunk(89, 90), other.chunk(69, 70))[0],
        ]
        assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize(
    "kind", [pytest.param("deepseek_v3", marks=pytest.mark.release), "gemma3_text"]
)
def test_a_prompt_that_another_runner_computed_goes_on_from_its_blocks(kind):
    expected = Oracle(foreign_folder(kind)).greedy(prompt(100), NUM_TOKENS)
    with loaded(settings(kind)) as prefill, loaded(settings(kind)) as decode:
        assert compute_path(prefill) == compute_path(decode)
        logits(prefill, Text("a", prompt(100), range(10, 20)).chunk(0, 99))
        decode.cache.pool[30:37] = prefill.cache.pool[10:17]
        text = Text("a", prompt(100), range(30, 45))
        assert count_ties(expected, greedy(decode, text, NUM_TOKENS)) == 0


def test_a_family_of_batons_own_can_be_computed_by_transformers():
    with (
        loaded(settings("qwen3", model_impl="auto")) as own,
        loaded(settings("qwen3")) as other,
    ):
        text = Text("a", prompt(50), range(4))
        ours, theirs = (logits(runner, text.chunk(0, 50))[0] for runner in (own, other))
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
        assert compute_path(own) != compute_path(other)


def test_other_rotations_run_in_transformers_code(tmp_path):
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    folder = changed(tmp_path, "qwen3", rope_parameters=rope)
    expected = Oracle(folder).greedy(prompt(100), NUM_TOKENS)
    config = compute_config(folder)
    model = msgspec.structs.replace(config.model, model_impl="transformers")
    assert said(msgspec.structs.replace(config, model=model), expected) == 0


@pytest.mark.parametrize("kind", REFUSED)
def test_a_model_with_more_than_keys_and_values_is_refused(kind):
    with pytest.raises(ConfigError, match=REFUSED[kind]) as refused:
        plan_rank(settings(kind), 1)
    assert "\n" not in refused.value.message


def test_ranks_cannot_share_a_model_of_transformers():
    with pytest.raises(ConfigError, match="Olmo2ForCausalLM has no plan for 2 ranks"):
        plan_rank(settings("olmo2"), 2)


def test_longrope_is_exact_up_to_its_original_length_only(tmp_path):
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 8,
        "long_factor": [2.0] * 8,
        "original_max_position_embeddings": 256,
    }
    folder = changed(
        tmp_path, "phi3", rope_parameters=rope, original_max_position_embeddings=256
    )
    config = with_values(compute_config(folder), {"model.model_impl": "transformers"})
    with pytest.raises(ConfigError, match=r"model\.max_model_len"):
        plan_rank(config, 1)
    plans = [
        plan_rank(
            with_values(compute_config(folder), {"model.max_model_len": 256, **impl}), 1
        )
        for impl in ({}, {"model.model_impl": "transformers"})
    ]
    assert plans[0].layout == plans[1].layout


def test_nodes_that_store_the_numbers_of_keys_in_different_orders_never_pair():
    own, other = (
        plan_rank(settings("glm4_moe", model_impl=impl), 1)
        for impl in ("auto", "transformers")
    )
    assert own.layout.groups == other.layout.groups
    assert own.layout.fingerprint != other.layout.fingerprint


@pytest.mark.parametrize("what", ["missing", "unexpected", "mismatched"])
def test_weights_that_do_not_fit_are_named(what, tmp_path):
    folder = changed(tmp_path, "olmo2")
    file = folder / "model.safetensors"
    weights = load_file(file)
    name = "model.layers.1.mlp.up_proj.weight"
    match what:
        case "missing":
            del weights[name]
        case "unexpected":
            name += "_scale_inv"
            weights[name] = torch.ones(1)
        case "mismatched":
            weights[name] = weights[name][:-1].clone()
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=name), loaded(compute_config(folder)):
        pass


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"architectures": ["GrokForCausalLM"]}, "names GrokForCausalLM; baton runs"),
        (
            {"architectures": ["Llama4ForConditionalGeneration"]},
            "which sees, hears or encodes",
        ),
        (
            {"model_type": "granite"},
            "transformers takes model_type 'granite' for Granite",
        ),
        ({"quantization_config": {"quant_method": "fp8"}}, "the weights are quantized"),
    ],
)
def test_a_folder_is_refused_before_a_process_starts(fields, reason, tmp_path):
    config = compute_config(changed(tmp_path, "olmo2", **fields))
    with pytest.raises(ConfigError, match=reason):
        with_model(config)


@pytest.mark.release
def test_a_refusal_of_a_node_ends_the_start_with_its_line():
    folder = foreign_folder("gemma2")
    with pytest.raises(
        NodeError, match=r"Gemma2ForCausalLM cannot run: .* softcap"
    ) as refused:
        LLM(folder, engine={"device": "cpu"})
    assert "Traceback" not in refused.value.message


@pytest.mark.release
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
def test_a_decoder_is_right_or_refused_in_one_line(kind):
    try:
        folder = small_folder(kind)
        expected = Oracle(folder).greedy(prompt(100), NUM_TOKENS)
    except Exception as error:  # noqa: BLE001  (any code of transformers)
        pytest.skip(f"no small model of {kind} generates: {type(error).__name__}")
    config = compute_config(folder)
    outcome = "equal"
    model = msgspec.structs.replace(config.model, model_impl="transformers")
    try:
        assert said(msgspec.structs.replace(config, model=model), expected) == 0
    except ConfigError as error:
        outcome = f"refused: {error.message}"
    assert "\n" not in outcome
    print(f"OUTCOME of {kind}: {outcome}")  # `pytest -rA` shows them
