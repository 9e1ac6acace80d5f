"""Settings: where they come from, which source wins, what a mistake says, and those of `LLM`."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest
import torch
import yaml

from baton.command_line import COMMANDS
from baton.deploy.model_folder import CHECKPOINT
from baton.llm_settings import IGNORED, NEUTRAL, Model, config_of
from baton.protocol.config import (
    CacheConfig,
    ClusterConfig,
    EngineConfig,
    ModelConfig,
    NodeConfig,
    RouterConfig,
)
from baton.protocol.errors import ConfigError
from baton.runtime.fields import fields_of
from baton.runtime.settings import (
    FOREIGN_FLAGS,
    FOREIGN_VALUES,
    SHORT_FLAGS,
    flags_of,
    ignored_variables,
    load,
    to_yaml,
)
from tests.support.small_tokenizers import write_tokenizer
from tests.support.sources import REPOSITORY

SERVE = COMMANDS["serve"]


def write(folder: Path, text: str) -> str:
    path = folder / "cluster.yaml"
    path.write_text(text)
    return str(path)


def test_later_sources_win(tmp_path):
    file = write(tmp_path, "router: {port: 1, host: a, max_queued: 5}\n")
    variables = {
        "BATON_ROUTER_PORT": "2",
        "BATON_ROUTER_HOST": "b",
        "BATON_DECODE": "4",
    }
    config = load(
        SERVE, ["--config", file, "--port", "9", "--set", "router.port=3"], variables
    )
    assert (config.router.port, config.router.host, config.router.max_queued) == (
        3,
        "b",
        5,
    )
    assert config.decode == 4
    with pytest.raises(ConfigError, match="BATON_ROUTER_PORT cannot be 'http'"):
        load(SERVE, [], {"BATON_ROUTER_PORT": "http"})


def test_a_blank_secret_opens_no_router():
    with pytest.raises(ConfigError, match="has an empty key"):
        load(SERVE, [], {"BATON_ROUTER_API_KEYS": "\n"})
    assert load(SERVE, [], {"BATON_ROUTER_API_KEYS": ""}).router.api_keys == ()


def test_entries_of_a_list_have_no_white_space_around_them(tmp_path):
    wanted = ("abc", "def")
    secret = {"BATON_ROUTER_API_KEYS": "abc\n, def\n"}
    assert load(SERVE, [], secret).router.api_keys == wanted
    flags = ["--api-key", "abc\n", "--api-key", " def"]
    assert load(SERVE, flags, {}).router.api_keys == wanted
    file = write(tmp_path, 'router: {api_keys: ["abc\\n", " def"]}\n')
    assert load(SERVE, ["--config", file], {}).router.api_keys == wanted


def test_text_files_are_read_as_utf_8_in_every_locale(tmp_path):
    """Each of these would be read with the encoding of the locale, which is ASCII here."""
    folder = tmp_path / "model"
    write_tokenizer(folder)
    (folder / "chat_template.jinja").write_text("<\uff5cUser\uff5c>", encoding="utf-8")
    (tmp_path / "keys").write_text("# \u00e9\n", encoding="utf-8")
    (tmp_path / "cluster.yaml").write_text(
        "model: {served_model_name: \u00e9}", encoding="utf-8"
    )
    command = [
        sys.executable,
        "-X",
        "warn_default_encoding",
        "-W",
        "error",
        "-c",
        READ_ALL,
    ]
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(
        [*command, str(tmp_path)],
        env={**os.environ, **plain},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


READ_ALL = """
import sys
from pathlib import Path
from baton.command_line import COMMANDS
from baton.model.sampling.token_masks import TokenMasks
from baton.router.http.auth import add_key, read_keys
from baton.router.text.chat_template import ChatTemplate
from baton.runtime.settings import load

folder = Path(sys.argv[1])
assert chr(0xFF5C) in ChatTemplate.load(str(folder / "model")).source
assert load(COMMANDS["serve"], ["--config", str(folder / "cluster.yaml")], {})
add_key(folder / "keys", "name")
assert read_keys(folder / "keys")
masks = TokenMasks(folder / "model", 400, ())
assert masks._compiled_now('start: "a"')
"""


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("BATON_ROUTR_PORT", "did you mean BATON_ROUTER_PORT?"),
        ("BATON_APIKEY", "did you mean BATON_API_KEY?"),
        ("BATON_XYZ", "docs/config.md lists them"),
    ],
)
def test_a_variable_that_is_none_of_ours_is_warned_of(name, hint):
    ours = {"BATON_ROUTER_PORT": "1", "BATON_BENCH_API_KEY": "x", "HOME": "/"}
    (warning,) = ignored_variables({name: "secret", **ours})
    assert name in warning
    assert warning.endswith(hint)
    assert "secret" not in warning


def test_the_sample_of_settings_can_be_loaded():
    config = load(SERVE, ["--config", str(REPOSITORY / "docs/sample-settings.yaml")])
    assert config == msgspec.structs.replace(
        ClusterConfig(),
        model=ModelConfig(served_model_name="demo"),
        router=RouterConfig(host="0.0.0.0", api_key_file="keys.txt"),
        cache=CacheConfig(memory_mib=2048),
    )


@pytest.mark.parametrize(
    ("words", "section", "field", "value"),
    [
        (["--enable-prefix-caching=false"], "cache", "enable_prefix_caching", False),
        (["--api-key", "a", "--api-key", "b,c"], "router", "api_keys", ("a", "b,c")),
        (
            ["--set", "node.routers=tcp://a:1,tcp://b:2"],
            "node",
            "routers",
            ("tcp://a:1", "tcp://b:2"),
        ),
        (["--set", "transfer.device=a=b"], "transfer", "device", "a=b"),
        (
            ["/models/tiny", "--served-model-name", "tiny"],
            "model",
            "served_model_name",
            "tiny",
        ),
        (["--enable-prefix-caching"], "cache", "enable_prefix_caching", True),
        (
            ["--served-model-name", "a", "--served-model-name", "b,c"],
            "model",
            "served_model_name",
            "a,b,c",
        ),
        (["--max-model-len", "100k"], "model", "max_model_len", 100_000),
        (["--max-model-len", "1.5K"], "model", "max_model_len", 1536),
        (["--set", "cache.memory_mib=2k"], "cache", "memory_mib", 2000),
        ([], "engine", "deterministic", "auto"),
        (["--engine-deterministic"], "engine", "deterministic", "true"),
        (["--engine-deterministic=False"], "engine", "deterministic", "false"),
        (["--set", "engine.deterministic=auto"], "engine", "deterministic", "auto"),
    ],
)
def test_words_become_values(words, section, field, value):
    assert getattr(getattr(load(SERVE, words), section), field) == value


@pytest.mark.parametrize("text", ["true", "false", "auto"])
def test_a_file_may_write_true_and_false_beside_other_values(text):
    (field,) = (f for f in fields_of(ClusterConfig) if f.key == "deterministic")
    assert field.from_yaml(yaml.safe_load(text)) == text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--blok-size", "8"], "unknown flag --blok-size; did you mean --block-size?"),
        (["--set", "cache.block_sise=8"], "did you mean cache.block_size?"),
        (["--set", "cache.block_size"], "write it as section.field=value"),
        (
            ["--port", "many"],
            "setting router.port cannot be 'many': expected a whole number",
        ),
        (["--dtype", "fp7"], "choose one of auto, float32, bfloat16"),
        (["--engine-deterministic", "yes"], "choose one of auto, true, false"),
        (["--dtype", "half"], "baton computes in bfloat16 and float32"),
        (["--max-model-len", "1.0001k"], "expected a whole number"),
        (["--quantization", "awq"], "the model's folder says how it is quantized"),
        (["--data-parallel-size=2"], "use --prefill N and --decode N"),
        (["folder", "stray"], "does not take 'stray'"),
        (
            ["--prefill", "0", "--local-prefill", "never"],
            "no node could compute a prompt",
        ),
        (["--set", "node.routers="], "name the router's control endpoint"),
        (["--api-key", " \n"], "has an empty key"),
        (["--set", "router.api_keys= "], "has an empty key"),
    ],
)
def test_a_mistake_is_named(words, said):
    with pytest.raises(ConfigError) as raised:
        load(SERVE, words)
    assert said in raised.value.message
    assert "\n" not in raised.value.message


def test_what_is_said_instead_of_flags_of_other_servers_names_flags_that_exist():
    known = {flag for field in fields_of(ClusterConfig) for flag in flags_of(field)}
    assert not known & FOREIGN_FLAGS.keys()
    for text in (*FOREIGN_FLAGS.values(), *FOREIGN_VALUES.values()):
        # Of another command.
        named = set(re.findall(r"--[a-z-]+", text)) - {"--revision"}
        assert named <= known


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("cash: {}", "did you mean cache?"),
        ("cache: {block_sise: 8}", "did you mean cache.block_size?"),
        ("cache: 8", "cache is a section"),
        (
            "router: {port: '8'}",
            "setting router.port cannot be '8': expected a whole number",
        ),
        ("- 1", "expected settings"),
        ("a: [", "not valid YAML"),
        ("prefill: !!python/object/apply:os.getpid []", "not valid YAML"),
        ("node: {routers: tcp://a:1}", "node.routers"),
    ],
)
def test_a_mistake_in_a_file_is_named(text, said, tmp_path):
    with pytest.raises(ConfigError) as raised:
        load(SERVE, ["--config", write(tmp_path, text)])
    assert said in raised.value.message


def test_settings_survive_a_file(tmp_path):
    node = NodeConfig(routers=("ipc:///a b", "tcp://c:1"), id="yes")
    config = ClusterConfig(
        prefill=3, node=node, cache=CacheConfig(gpu_memory_utilization=0.5)
    )
    assert load(SERVE, ["--config", write(tmp_path, to_yaml(config))]) == config


def test_a_model_has_the_names_between_commas_or_that_of_its_folder():
    assert ModelConfig(served_model_name="a, b/c,").served_names == ("a", "b/c")
    assert ModelConfig(path="/models/tiny").served_names == ("tiny",)
    assert ModelConfig(path="/models/tiny", served_model_name="a,b").shown_name == "a"


DEMO = ModelConfig(path=str(CHECKPOINT), served_model_name="demo")
MAPPED: list[tuple[str, object, object]] = [
    ("served_model_name", "mine", "mine"),
    ("served_model_name", ["mine", "also mine"], "mine,also mine"),
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
    shutil.copytree(CHECKPOINT, tmp_path, dirs_exist_ok=True)
    forms: list[Model] = [str(tmp_path), tmp_path, {"path": str(tmp_path)}]
    forms.append(ModelConfig(path=str(tmp_path)))
    for form in forms:
        assert made(form).model == ModelConfig(
            path=str(tmp_path), served_model_name=tmp_path.name
        )
    assert made(
        {"path": str(tmp_path), "max_model_len": 9}, dtype="float32"
    ).model == ModelConfig(
        path=str(tmp_path),
        served_model_name=tmp_path.name,
        max_model_len=9,
        dtype="float32",
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
