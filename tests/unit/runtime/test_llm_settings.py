"""The constructor of `LLM` as users of vLLM call it: what it takes, and what it refuses and how."""

from collections.abc import Mapping

import msgspec
import pytest
import torch

from baton.deploy.model_folder import CHECKPOINT, write_demo_model
from baton.llm_settings import IGNORED, NEUTRAL, Model, config_of
from baton.protocol.config import CacheConfig, ClusterConfig, EngineConfig, ModelConfig
from baton.protocol.errors import ConfigError
from baton.runtime.settings import SHORT_FLAGS

DEMO = ModelConfig(path=str(CHECKPOINT), served_model_name="demo")
MAPPED: list[tuple[str, object, object]] = [
    ("served_model_name", "mine", "mine"),
    ("dtype", "bfloat16", "bfloat16"),
    ("dtype", torch.float32, "float32"),
    ("enable_prefix_caching", False, False),
    ("max_num_batched_tokens", 256, 256),
]
WRONG: list[tuple[dict[str, object], str]] = [
    ({"decod": 2}, "unknown setting decod; did you mean decode?"),
    ({"quantization": "awq"}, "unknown setting quantization; docs/config.md"),
    ({"dtype": "float16"}, "float32 or bfloat16"),
    ({"tensor_parallel_size": "2"}, "engine.tensor_parallel_size"),
    ({"cache": {"memory": 5}}, "memory"),
    ({"cache": 5, "block_size": 16}, "cache must be a dict"),
    ({"prefill": 0, "router": {"local_prefill": "never"}}, "no node could compute"),
]


def made(model: Model = "", **settings: object) -> ClusterConfig:
    return config_of(model, settings, None)


def test_a_model_may_be_text_a_path_a_section_or_a_struct(tmp_path):
    write_demo_model(tmp_path)
    forms: list[Model] = [str(tmp_path), tmp_path, {"path": str(tmp_path)}]
    forms.append(ModelConfig(path=str(tmp_path)))
    for form in forms:
        assert made(form).model == ModelConfig(path=str(tmp_path), served_model_name=tmp_path.name)
    assert made({"path": str(tmp_path), "max_model_len": 9}, dtype="float32").model == ModelConfig(
        path=str(tmp_path), served_model_name=tmp_path.name, max_model_len=9, dtype="float32"
    )


@pytest.mark.parametrize(("name", "value", "wanted"), MAPPED)
def test_a_keyword_of_vllm_sets_what_means_the_same(name, value, wanted):
    section, _, key = SHORT_FLAGS[name.replace("_", "-")].partition(".")
    assert getattr(getattr(made(**{name: value}), section), key) == wanted
    assert made(**{name: None}) == made()


def test_a_keyword_joins_the_settings_of_its_section():
    sections: list[Mapping[str, object] | msgspec.Struct]
    sections = [{"num_blocks": 50}, CacheConfig(num_blocks=50)]
    for section in sections:
        config = made(cache=section, block_size=8, max_num_seqs=4)
        assert config.cache == CacheConfig(num_blocks=50, block_size=8)
        assert config.engine == EngineConfig(max_num_seqs=4)


def test_what_changes_nothing_here_is_ignored():
    assert made(**dict.fromkeys(IGNORED, True)) == made()
    for name, neutral in NEUTRAL.items():
        assert made(**{name: neutral}) == made(**{name: None}) == made()
        with pytest.raises(ConfigError, match=f"unknown setting {name}"):
            made(**{name: "another"})


@pytest.mark.parametrize(("settings", "text"), WRONG, ids=str)
def test_what_is_wrong_is_named(settings, text):
    with pytest.raises(ConfigError) as error:
        made(**settings)
    assert text in error.value.message


def test_a_config_stands_alone_and_an_empty_model_is_the_demo():
    config = ClusterConfig(decode=2)
    assert config_of("", {}, config) == msgspec.structs.replace(config, model=DEMO)
    assert (made().model, made().log.level) == (DEMO, "warning")
    for model, settings in (("x", {}), ("", {"decode": 2})):
        with pytest.raises(ConfigError, match="not both"):
            config_of(model, settings, config)
