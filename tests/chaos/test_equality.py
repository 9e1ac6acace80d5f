"""What a request asks for has equal bits however it is served.

Each is computed aggregated, disaggregated and with guesses; alone, with a cached prefix and in a
crowd; and again by another process, since its decode node is killed.
"""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.adapters import write_adapter
from tests.support.checkpoints import model_folder, tiny_cluster
from tests.support.cluster import Cluster
from tests.support.foreign_checkpoints import foreign_folder
from tests.support.stream_reader import StreamReader

PROMPT = [10 + (i * i + 7 * i) % 241 for i in range(70)]
ASKED: dict[str, object] = {
    "model": "tiny",
    "prompt": PROMPT,
    "max_tokens": 300,
    "return_token_ids": True,
    "seed": 7,
    "ignore_eos": True,
}
FEATURES: dict[str, dict[str, object]] = {
    "greedy": {"temperature": 0},
    "seeded": {"top_p": 0.9},
    "regex": {"structured_outputs": {"regex": "[a-z ]{200,280}"}, "ignore_eos": False},
    "penalties": {
        "presence_penalty": 0.5,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.1,
    },
    "bias": {"logit_bias": {"50": 4.0, "60": -100, "77": 2.0}},
    "logprobs": {"logprobs": 5},
    "adapter": {"model": "one"},
    "several": {
        "model": "two",
        "structured_outputs": {"regex": "[a-z ]{200,280}"},
        "ignore_eos": False,
        "presence_penalty": 0.5,
        "logit_bias": {"50": 4.0},
    },
}
OF_ADAPTERS = ("adapter", "several")
WAYS: dict[str, dict[str, Any]] = {
    "aggregated": {"prefill": 0, "router": {"local_prefill": "always"}},
    "disaggregated": {"router": {"local_prefill": "never"}},
    "with guesses": {
        "router": {"local_prefill": "never"},
        "engine": {"num_speculative_tokens": 4},
    },
}


def answers(
    folder: Path, dtype: str, kv: str, way: dict[str, Any], foreign: str
) -> dict[tuple[str, str], object]:
    """What every feature says, in each way in which a cluster comes to compute it.

    A `foreign` family, such as one with states, has no adapters here.
    """
    model = model_folder("qwen3", eos_token_id=2)
    adapters = list[str]()
    names = ("tiny", "one", "two")
    features = FEATURES
    if foreign:
        model = foreign_folder(foreign, eos_token_id=2)
        names = ("tiny",) * 3
        features = {
            name: FEATURES[name] for name in FEATURES if name not in OF_ADAPTERS
        }
    else:
        adapters = [
            f"{name}={write_adapter(model, rank=r)}"
            for name, r in (("one", 4), ("two", 8))
        ]
    named = {"path": str(model), "served_model_name": "tiny", "dtype": dtype}
    engine = {
        "max_num_batched_tokens": 64,
        "kv_cache_dtype": kv,
        **way.get("engine", {}),
    }
    sections = way | {"engine": engine}
    config = tiny_cluster(
        model,
        model=named | {"lora_modules": adapters},
        cache={"num_blocks": 900},
        **sections,
    )
    found: dict[tuple[str, str], object] = {}
    with Cluster(folder, config) as cluster, ThreadPoolExecutor(8) as pool:

        def said(asked: dict[str, object]) -> tuple[list[int], str]:
            choice: Any = cluster.complete(**asked)["choices"][0]
            return choice["token_ids"], json.dumps(choice["logprobs"])

        for name, feature in features.items():
            asked = ASKED | feature
            found[name, "alone"], found[name, "cached"] = said(asked), said(asked)
            others = [
                pool.submit(
                    said, asked | {"seed": i, "prompt": PROMPT[i:], "model": model_name}
                )
                for i, model_name in enumerate(names * 2)
            ]
            found[name, "in a crowd"] = pool.submit(said, asked).result()
            assert all(other.result() for other in others)
        for name, feature in features.items():
            if name != "logprobs":  # their streams cannot be resumed
                reader = StreamReader(cluster, ASKED | feature)
                reader.wait_for_more(20)
                cluster.kill("decode-0")
                cluster.start_node("decode", 0)
                reader.join()
                found[name, "resumed"] = reader.token_ids, "null"
    return found


@pytest.mark.release
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("dtype", "kv", "foreign"),
    [
        ("float32", "auto", ""),
        ("bfloat16", "auto", ""),
        ("bfloat16", "fp8", ""),
        ("float32", "auto", "qwen3_next"),
        ("bfloat16", "auto", "granitemoehybrid"),
        ("float32", "auto", "deepseek_v32"),
        ("bfloat16", "auto", "glm_moe_dsa"),
        ("float32", "auto", "gemma4_text"),
        ("bfloat16", "auto", "kimi_linear"),
    ],
)
def test_features_have_equal_bits_in_every_way(dtype, kv, foreign, tmp_path):
    expected: dict[str, object] = {}
    for name, way in WAYS.items():
        (tmp_path / name).mkdir()
        for (feature, how), answer in answers(
            tmp_path / name, dtype, kv, way, foreign
        ).items():
            assert answer == expected.setdefault(feature, answer), (
                f"{feature}, {name}, {how}"
            )
    num_features = len(FEATURES) - (len(OF_ADAPTERS) if foreign else 0)
    assert len({json.dumps(answer) for answer in expected.values()}) == num_features
