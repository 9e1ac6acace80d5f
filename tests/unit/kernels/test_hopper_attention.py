"""Attention on Hopper as far as a CPU can try it: machine code, plans, launches, order of sums.

The code of its prefill kernel runs on a GPU alone, where nodes prove it before they use it.
"""

import json
from typing import Any

import msgspec
import pytest

pytest.importorskip("triton")

from baton.kernels.hopper.attention import (
    latent_proof,
    one_order_proof,
    prefill_proof,
)
from baton.kernels.hopper.attention.latent_prefill import Prompt, items_of, passes_of
from baton.kernels.proofs import LatentDims, ModelShapes
from tests.support.module_process import said_by

# Far more than it takes on a machine that others use.
pytestmark = pytest.mark.timeout(300)
SHARED_BYTES = 227 << 10
INTERPRETED = {"TRITON_INTERPRET": "1"}
RIGHT = ("options", "one order", "heads of 256", "latent", "FP8", "FP8, one order")
QWEN3_8B = ModelShapes((), 32, 8, 128, 16)


def interpreted(*words: str) -> dict[str, Any]:
    said = said_by("tests.support.interpret_hopper", *words, env=INTERPRETED)
    found: dict[str, Any] = json.loads(said[-1])
    return found


def compiled(folder: str, *cases: str) -> list[dict[str, object]]:
    env = {"TRITON_CACHE_DIR": folder}
    said = said_by("tests.support.compile_hopper", *cases, env=env)
    reports: list[dict[str, object]] = json.loads(said[-1])
    return reports


def check(reports: list[dict[str, object]]) -> None:
    """Every kernel fits, its loops spill nothing, and products do not wait for one another."""
    assert [r for r in reports if int(str(r["shared_bytes"])) > SHARED_BYTES] == []
    assert [r for r in reports if r["warnings"]] == []
    spills = [(r["case"], r["spills_in_loops"]) for r in reports]
    # Rows of guesses with heads of 256 read two words of a thread again for each tile.
    few = [case.startswith("guesses, heads of 256") * 2 for case, _ in spills]
    assert [one for one, most in zip(spills, few, strict=True) if one[1] > most] == []
    for report in reports:
        kernel = report["kernel"]
        if kernel in {"prefill_kernel", "_decode_kernel"}:
            assert report["loops"], report
            # So prefill and decode add the products of the same 16 numbers at once.
            assert report["k_widths"] == [2], report
        if kernel == "prefill_kernel":
            # Two or three warpgroups share the registers of a multiprocessor.
            assert report["registers"] in (168, 255), report
            is_fp8 = str(report["case"]).startswith("FP8")
            assert bool(report["widening_loops"]) == is_fp8, report


def test_chunks_and_guesses_of_heads_of_64_fit_hopper_and_spill_in_no_loop(tmp_path):
    cases = "few, cuts, heads of 64", "guesses, heads of 64"
    reports = compiled(str(tmp_path), *cases, "FP8 few, cuts, heads of 64")
    assert len(reports) == 9
    check(reports)


@pytest.mark.release
@pytest.mark.parametrize(
    "cases",
    [
        ("plain", "window", "cap", "sinks", "fp16"),
        ("few, group*", "few, all options"),
        ("head of*", "blocks*"),
        ("cuts", "few, cuts"),
        ("cuts, heads of 64*",),
        ("cuts, heads of 128*",),
        ("few, cuts, heads of 64*",),
        ("few, cuts, heads of 128*",),
        ("cuts, heads of 256*",),
        ("few, cuts, heads of 256*",),
        ("FP8 plain", "FP8 few, group of 7", "FP8 few, all options"),
        ("FP8 cuts", "FP8 few, cuts"),
        ("FP8 cuts, heads of 64*", "FP8 few, cuts, heads of 64*"),
        ("FP8 cuts, heads of 128*",),
        ("FP8 few, cuts, heads of 128*",),
        ("FP8 cuts, heads of 256*",),
        ("FP8 few, cuts, heads of 256*",),
        ("FP8 decode*", "FP8 guesses*"),
        ("cuts, heads of 80", "cuts, heads of 96", "cuts, heads of 112"),
        ("decode*", "latent"),
        ("guesses, heads of 64*", "guesses, heads of 128*"),
        ("guesses, heads of [89]*", "guesses, heads of 112", "guesses, group*"),
        ("guesses, heads of 256*",),
    ],
)
def test_every_form_of_the_kernels_fits_hopper_and_spills_in_no_loop(cases, tmp_path):
    reports = compiled(str(tmp_path), *cases)
    assert len({report["case"] for report in reports}) >= len(cases)
    check(reports)


@pytest.mark.parametrize(
    ("changes", "prefill", "one_order"),
    [
        ({}, "", ""),
        ({"head_dim": 64}, "", ""),
        ({"head_dim": 96}, "", ""),
        ({"head_dim": 256}, "", ""),
        ({"head_dim": 72}, "heads of 72", "heads of 72"),
        ({"windows": (128,), "softcap": 50.0, "has_sinks": True}, "", ""),
        ({"kv_heads": 1}, "", "32 heads share a KV head"),
        ({"block_size": 128}, "blocks of 128", "blocks of 128"),
        ({"pool_dtype": "uint8"}, "", ""),
        ({"pool_dtype": "uint8", "head_dim": 256, "block_size": 64}, "", ""),
        ({"pool_dtype": "float16"}, "a pool of float16", "a pool of float16"),
        ({"dtype": "float16", "pool_dtype": "float16"}, "", ""),
        ({"dtype": "float32"}, "numbers of float32", "numbers of float32"),
        ({"is_latent": True}, "latent attention", "latent attention"),
    ],
)
def test_a_model_that_the_kernels_cannot_compute_is_named(changes, prefill, one_order):
    shapes = msgspec.structs.replace(QWEN3_8B, **changes)
    assert prefill_proof.missing_for(shapes, (9, 0)) == prefill
    assert one_order_proof.missing_for(shapes, (9, 0)) == one_order
    assert "capability (10, 0)" in prefill_proof.missing_for(shapes, (10, 0))


@pytest.mark.parametrize(
    ("changes", "missing"),
    [
        ({}, ""),
        ({"dtype": "float16", "pool_dtype": "float16"}, ""),
        ({"block_size": 128}, ""),
        ({"pool_dtype": "uint8"}, "a pool of uint8"),
        ({"latent": None}, "no latent attention, or one with an index"),
        ({"latent": LatentDims(512, 192, 64, 256)}, "heads of 192, 64, 256"),
    ],
)
def test_latent_attention_that_the_kernels_cannot_expand_is_named(changes, missing):
    dims = LatentDims(512, 128, 64, 128)
    deepseek = ModelShapes((), 16, 1, 576, 16, is_latent=True, latent=dims)
    shapes = msgspec.structs.replace(deepseek, **changes)
    assert latent_proof.missing_for(shapes, (9, 0)) == missing
    assert "capability (10, 0)" in latent_proof.missing_for(shapes, (10, 0))


@pytest.mark.parametrize("split", [128, 384, 1 << 15])
def test_each_token_of_a_prompt_sees_each_expanded_key_once_and_in_order(split):
    starts = (0, 300, 1000, 5, 127)
    lengths = (700, 129, 1, 128, 2)
    rows = [sum(lengths[:number]) for number in range(len(lengths))]
    prompts = [
        Prompt(number, row, start, length)
        for number, (row, start, length) in enumerate(
            zip(rows, starts, lengths, strict=True)
        )
    ]
    seen: dict[tuple[int, int], list[int]] = {}
    for segments in passes_of([prompt.context for prompt in prompts], split):
        assert len({one.prompt for one in segments}) == len(segments)
        owners: dict[int, tuple[int, int]] = {}  # prompt and key of each row
        for one in segments:
            assert one.first % split == 0
            for key in range(one.first, one.end):
                row = one.row + key - one.first
                assert row not in owners
                owners[row] = one.prompt, key
        assert len(owners) == sum(one.end - one.first for one in segments) <= split
        plan = items_of(prompts, segments, 3, 7)
        bounds = plan.reshape(-1)[:14].reshape(7, 2)
        for first, end in bounds.tolist():
            for item in plan[first:end].tolist():
                token, position, count, begin, stop, head, base, _ = item
                for step in range(count):
                    keys = seen.setdefault((token + step, head), [])
                    last = min(stop * 128, position + step + 1)
                    for key in range(begin * 128, last):
                        number, own = owners[base + key]
                        assert rows[number] <= token < rows[number] + lengths[number]
                        assert own == key
                        keys.append(key)
    assert len(seen) == 3 * sum(lengths)
    for prompt in prompts:
        for step in range(prompt.num_tokens):
            for head in range(3):
                keys = seen[prompt.row + step, head]
                assert keys == list(range(prompt.start + step + 1))


def test_plans_proofs_steps_and_sums_are_right_in_the_interpreter():
    """In one process: each alone takes as long to start as it runs."""
    parts = "proofs", "backend", "orders", "guesses", "measured", "latent"
    said = interpreted("plans", "8", *parts)
    check_proofs(said.pop("proofs"))
    # A step has one plan for all layers, and sequences that decode beside chunks.
    names = "triton-hopper", "hopper-ordered"
    backends = [name + suffix for name in names for suffix in ("", "-fp8")]
    assert said.pop("backend") == dict.fromkeys(backends, "")
    check_orders(said.pop("orders"), 1)
    # Rows of a sequence that share tiles.
    check_orders(said.pop("guesses"), 3)
    # The forms that the benchmark measures over an FP8 pool.
    assert said.pop("measured") == {
        "": "",
        ", ordered": "",
        ", on Hopper in one order": "",
    }
    # Tokens before a prompt's last one attend to expanded keys, in slices of any length.
    latent = said.pop("latent")
    assert latent == {"beside absorbed": "", "changed": True, "token by token": ""}
    assert not said


def check_proofs(said: dict[str, str]) -> None:
    """Proofs find nothing in right launches, and name what is wrong."""
    assert {name: said.pop(name) for name in RIGHT} == dict.fromkeys(RIGHT, "")
    assert "are wrong" in said.pop("reads past the end")
    assert "are wrong" in said.pop("forgets the window")
    assert "are wrong" in said.pop("forgets exponents, FP8")
    assert "other bits than decode" in said.pop("widens apart, FP8, one order")
    assert "are wrong" in said.pop("forgets the keys before")
    assert "other bits" in said.pop("rounds apart")
    assert "other bits than decode" in said.pop("rounds apart, in one order")
    assert "other bits than decode" in said.pop("forgets the window, in one order")
    assert "a replayed step" in said.pop("replays what it has computed")
    assert not said


def check_orders(said: dict[str, dict[str, Any]], count: int) -> None:
    """No output has other bits, whatever the batch and the number of programs."""
    assert len(said) == count
    for option in said.values():
        assert int(option.pop("compared")) > 1000
        assert option == {"differing": 0, "changed": []}


@pytest.mark.release
def test_many_plans_have_each_row_once_with_the_keys_that_it_sees():
    assert interpreted("plans", "100") == {}


@pytest.mark.release
@pytest.mark.timeout(600)
@pytest.mark.parametrize("head_dim", ["64", "80", "128", "256"])
def test_rows_of_a_sequence_have_the_bits_of_each_alone_over_long_contexts(head_dim):
    check_orders(interpreted("long guesses", head_dim), 8)


@pytest.mark.release
@pytest.mark.parametrize("head_dim", ["64", "80", "128", "256"])
def test_decode_adds_in_the_order_that_is_written_down_over_long_contexts(head_dim):
    options = ("plain", "window", "sinks", "all")
    check_orders(interpreted("long", head_dim, *options), len(options))
