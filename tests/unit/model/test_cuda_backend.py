"""The CUDA backend computes what the CPU backend computes; its kernels run interpreted here."""

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import model_folder
from tests.support.foreign_checkpoints import foreign_folder
from tests.support.module_process import said_by

STEP_KERNELS = {
    "_split_kernel",
    "_combine_kernel",
    "_prefill_kernel",
    "_rope_store_kernel",
    "_add_rms_norm_kernel",
    "_gate_mul_kernel",
    "_grouped_product_kernel",
    "_add_experts_kernel",
    "scan_kernel",
    "weigh_kernel",
    "choose_kernel",
    "gather_kernel",
    "sweep_kernel",
    "_penalize_kernel",
}
DENSE_KERNELS = {
    "_split_kernel",
    "_combine_kernel",
    "_prefill_kernel",
    "_rope_store_kernel",
}
LATENT_KERNELS = {
    "_latent_split_kernel",
    "_latent_merge_kernel",
    "_latent_prefill_kernel",
    "_turn_store_kernel",
}
SPARSE_KERNELS = {
    "_latent_split_kernel",
    "_latent_merge_kernel",
    "_turn_store_kernel",
    "_index_scores_kernel",
    "_take_best_kernel",
}
HOPPER_PREFILL = {"_measure_units_kernel", "_plan_prefill_kernel", "prefill_kernel"}
HOPPER_KERNELS = {
    "_plan_decode_kernel",
    "_decode_kernel",
    "_merge_cuts_kernel",
    "_rope_store_kernel",
    *HOPPER_PREFILL,
}
STATE_KERNELS = {
    "_state_convolve_kernel",
    "_state_intra_kernel",
    "_state_scan_kernel",
    "_state_step_kernel",
    "_state_tails_kernel",
    "_state_norm_kernel",
}
EAGER = (
    "eager",
    "ordered",
    "latent",
    "latent expanded",
    "sparse",
    "states",
    "kinds",
    "hopper",
    "hopper ordered",
    "hopper fp8",
    "drafts",
    "hopper drafts",
)
GRAPHS = (
    "graphs",
    "latent graphs",
    "states graphs",
    "sparse graphs",
    "kinds graphs",
    "drafts graphs",
)

_WINDOW = {
    "head_dim": 32,
    "sliding_window": 16,
    "layer_types": ("sliding_attention", "full_attention"),
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("qwen3", {}),
    "latent": ("deepseek_v3", {"n_routed_experts": 4}),
    # With heads whose prompts Hopper expands.
    "expanded": (
        "deepseek_v3",
        {
            "n_routed_experts": 4,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
        },
    ),
    "sparse": (
        "glm_moe_dsa",
        {"n_routed_experts": 4, "indexer_types": ("full", "shared")},
    ),
    "gemma2": ("gemma2", _WINDOW),
    "gemma3_text": ("gemma3_text", _WINDOW),
    "gpt_oss": ("gpt_oss", _WINDOW),
    # Chunks of two blocks, and heads of which two share blocks of the others.
    "llama4_text": ("llama4_text", {"num_hidden_layers": 5, "head_dim": 32}),
    "gemma4_text": (
        "gemma4_text",
        {"num_hidden_layers": 7, "head_dim": 32, "global_head_dim": 64},
    ),
}
# Far more than it takes on a machine that others use.
pytestmark = pytest.mark.timeout(300)


def model_of(name: str) -> Path:
    if name == "dense":
        shape = {
            "num_layers": 2,
            "vocab_size": 512,
            "hidden_size": 64,
            "intermediate_size": 96,
            "sliding_window": 16,
            "extra": json.dumps({"max_window_layers": 1}),
        }
        heads = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 32}
        return model_folder("qwen3", **shape, **heads)  # type: ignore[arg-type]
    kind, fields = MODELS[name]
    with warnings.catch_warnings(action="ignore"):
        return foreign_folder(kind, **{"num_hidden_layers": 2, **fields})


@pytest.fixture(
    scope="module", params=["quick", pytest.param("others", marks=pytest.mark.release)]
)
def found(request):
    if sys.platform != "linux":
        pytest.skip("Triton runs on Linux only")
    # Between them, the quick ones have a window, experts, latent rows and an index.
    names = ("dense", "sparse")
    if request.param == "others":
        names = (
            "latent",
            "expanded",
            "gpt_oss",
            "gemma2",
            "gemma3_text",
            "llama4_text",
            "gemma4_text",
        )
    *_, line = said_by(
        "tests.support.interpret_models",
        *(str(model_of(name)) for name in names),
        env={"TRITON_INTERPRET": "1"},
    )
    said: list[dict[str, Any]] = json.loads(line)
    return dict(zip(names, said, strict=True))


def test_the_kernels_behind_the_backend_give_the_same_logits(found):
    batches = (
        "a prompt",
        "decode beside a prompt",
        "two that decode",
        "guesses beside a prompt",
        "many guesses",
    )
    named = {*batches, *(f"{name}, in one order" for name in batches), "what is stored"}
    for name, one in found.items():
        assert one["is_expanded"] == (name == "expanded")
        errors = one["errors"]
        assert set(errors) == named
        assert all(error < 2e-5 for error in errors.values()), errors


def test_a_warm_up_runs_both_attentions_and_stores_in_the_first_block_only(found):
    """Two prompts and three decode steps. What the test above compares was computed after it."""
    for one in found.values():
        assert one["warm_up"] == {
            "chunks": [[0, 2], [0, 65], [1, 1], [112, 1], [112, 2]],
            "slots": [[0, slot] for slot in range(16)],
            "generations": 0,
        }


@pytest.fixture(scope="module")
def launched():
    if sys.platform != "linux":
        pytest.skip("Triton runs on Linux only")
    *_, line = said_by("tests.support.list_variants")
    said: dict[str, Any] = json.loads(line)
    assert set(said) == {*EAGER, *GRAPHS}
    return said


@pytest.mark.release
@pytest.mark.timeout(600)
def test_warm_up_compiles_every_variant_that_random_batches_take(launched):
    """A kernel that is compiled while requests are served holds them all up for seconds."""
    for name, kernels in (
        ("eager", STEP_KERNELS),
        ("ordered", STEP_KERNELS | {"_product_kernel", "_add_parts_kernel"}),
    ):
        found = launched[name]
        assert found["is_batch_invariant"] == (name == "ordered")
        assert found["added"] == [], name
        # The first norm of a step has no residual to add; sequences have one row or several.
        twice = ("_add_rms_norm_kernel", "_split_kernel", "_combine_kernel")
        once = dict.fromkeys(kernels, 1)
        assert found["warm_up"] == once | dict.fromkeys(twice, 2), name
    # Few tokens and many take two tiles of prefill.
    hopper = launched["hopper"]
    assert hopper["added"] == []
    assert set(hopper["warm_up"]) == STEP_KERNELS - {"_prefill_kernel"} | HOPPER_PREFILL
    one_order = [launched[name] for name in ("hopper ordered", "hopper fp8")]
    for found in one_order:
        assert found["is_batch_invariant"]
        assert found["added"] == []
        assert set(found["warm_up"]) == (
            STEP_KERNELS - DENSE_KERNELS
            | HOPPER_KERNELS
            | {"_product_kernel", "_add_parts_kernel"}
        )
    counts = {found["warm_up"]["prefill_kernel"] for found in (hopper, *one_order)}
    assert counts == {2}
    latent = launched["latent"]
    assert latent["added"] == []
    assert set(latent["warm_up"]) == STEP_KERNELS - DENSE_KERNELS | LATENT_KERNELS
    expanded = launched["latent expanded"]
    assert expanded["added"] == []
    assert set(expanded["warm_up"]) == set(latent["warm_up"]) - {
        "_latent_prefill_kernel"
    } | {"prefill_kernel"}
    assert expanded["warm_up"]["prefill_kernel"] == 1
    sparse = launched["sparse"]
    assert sparse["added"] == []
    assert set(sparse["warm_up"]) == STEP_KERNELS - DENSE_KERNELS | SPARSE_KERNELS
    kinds = launched["kinds"]
    assert kinds["added"] == []
    # Each kind of layers has its own; a chunk is not long enough to be split.
    several = {name for name, count in kinds["warm_up"].items() if count >= 2}
    assert several > DENSE_KERNELS - {"_combine_kernel"}
    states = launched["states"]
    assert states["added"] == []
    assert set(states["warm_up"]) == STEP_KERNELS | STATE_KERNELS
    for name in ("drafts", "hopper drafts"):
        assert launched[name]["added"] == [], name
    assert [launched[name]["added"] for name in GRAPHS] == [[]] * len(GRAPHS)


@pytest.mark.release
@pytest.mark.timeout(600)
def test_no_launch_reads_the_host_and_a_replayed_one_only_sends_its_inputs(launched):
    """On `meta` nothing can be read; an operation that waits or mixes devices fails at once."""
    # Whether and where queries are absorbed is said by two more.
    expanded = launched["latent expanded"]["copies"]
    assert expanded == [1, 3]
    copies = [
        found["copies"] for name, found in launched.items() if "expand" not in name
    ]
    assert copies == [[1]] * (len(launched) - 1)
    # An index weighs its heads in fp32, and a head that drafts counts in two types.
    converted = [
        found["converted"]
        for name, found in launched.items()
        if not {"sparse", "drafts"} & set(name.split())
    ]
    assert not any(converted), "logits are widened"
    # Into block tables, and into the counts of sequences that have just begun.
    written = {"index_copy_", "index_fill_"}
    for graphs in (launched[name] for name in GRAPHS):
        assert graphs["num_replays"] > 20
        assert set(graphs["replayed"]) == written, "it allocates or computes"
