"""Flags and servers' own words in one form, and what differs between arms."""

import pytest

from baton.bench.parity import (
    UNKNOWN,
    facts_of_flags,
    facts_of_json,
    facts_of_metrics,
    parity,
    warnings,
)
from baton.protocol.errors import ConfigError


def values(name: str, **arms: str) -> dict[str, str]:
    rows = parity({arm: facts_of_flags(text) for arm, text in arms.items()}, {})
    return next(row.values for row in rows if row.name == name)


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("vllm serve m --dtype bfloat16", "dtype", "bfloat16"),
        ("baton serve --dtype=bf16", "dtype", "bfloat16"),
        ("vllm serve Qwen/Qwen3-8B --block-size 16", "model", "Qwen/Qwen3-8B"),
        ("vllm serve Qwen/Qwen3-8B --block-size 16", "block size", "16"),
        ("--torch-dtype torch.float32", "dtype", "float32"),
        ("--set cache.block_size=32", "block size", "32"),
        ("--cache-block-size 32 --block_size 16", "block size", "16"),
        ("launch --page-size 64", "block size", "64"),
        ("OMP_NUM_THREADS=2 vllm serve m", "threads", "2"),
        ("engine:\n  threads: 4  # cores", "threads", "4"),
        ("--enforce-eager", "CUDA graphs", "false"),
        ("--disable-cuda-graph", "CUDA graphs", "false"),
        ("--enforce-eager false", "CUDA graphs", "true"),
        ("--no-enable-prefix-caching", "prefix cache", "false"),
        ("--tp 2", "tensor parallel", "2"),
        ("a \\\n  --block-size 8", "block size", "8"),
        ("--speculative -1 --dtype half", "dtype", "float16"),
    ],
)
def test_a_decisive_setting_has_one_name_and_form(text: str, name: str, value: str) -> None:
    assert facts_of_flags(text)[name] == value


def test_flags_that_cannot_be_read_are_refused() -> None:
    with pytest.raises(ConfigError, match="cannot read these flags"):
        facts_of_flags("--dtype 'half")


def test_labels_of_info_metrics_are_facts() -> None:
    text = (
        "# HELP vllm:cache_config_info x\n"
        'vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="0"} 1.0\n'
        'vllm:num_requests_running{engine="0"} 3.0\n'
    )
    facts = facts_of_metrics(text)
    assert facts["block size"] == "16"
    assert facts["KV dtype"] == "auto"


def test_values_anywhere_in_a_servers_description_are_facts() -> None:
    facts = facts_of_json({"version": "1", "args": {"dtype": "bf16", "disable_cuda_graph": True}})
    assert facts == {"version": "1", "dtype": "bfloat16", "CUDA graphs": "false"}
    assert facts_of_json("nothing") == {}


def test_a_servers_own_word_counts_before_a_flag() -> None:
    rows = parity({"a": {"dtype": "auto"}}, {"a": {"dtype": "bfloat16"}})
    assert rows[0].values == {"a": "bfloat16"}


def test_what_nobody_said_is_unknown() -> None:
    assert values("dtype", a="--dtype half", b="") == {"a": "float16", "b": UNKNOWN}


def test_other_settings_are_shown_where_arms_differ() -> None:
    flags = {
        "a": facts_of_flags("--max-len 5 --seed 1"),
        "b": facts_of_flags("--max-len 6 --seed 1"),
    }
    names = [row.name for row in parity(flags, {})]
    assert "max-len" in names
    assert "seed" not in names


def test_a_decisive_difference_is_a_warning() -> None:
    flags = {"a": facts_of_flags("--threads 1"), "b": facts_of_flags("--threads 2 --dtype half")}
    lines = warnings(parity(flags, {}))
    assert "WARNING: the arms differ in threads (a: 1, b: 2)" in lines
    assert "WARNING: the arms differ in dtype (a: not said, b: float16)" in lines
    assert lines[-1].startswith("Neither flags nor servers say: KV dtype, quantization, block size")


def test_arms_that_are_known_to_be_alike_need_no_warning() -> None:
    text = "--dtype half --kv-cache-dtype half --quantization none --block-size 1 --threads 1"
    facts = facts_of_flags(text + " --enforce-eager")
    assert warnings(parity({"a": facts, "b": facts}, {})) == []


def test_keys_are_no_settings_to_compare() -> None:
    flags = {arm: facts_of_flags(f"HF_TOKEN={arm} serve --api-key {arm}") for arm in ("one", "two")}
    said = {arm: facts_of_json({"admin_api_key": arm, "name": arm}) for arm in flags}
    different = [row.name for row in parity(flags, said) if not row.same]
    assert different == ["name"]
