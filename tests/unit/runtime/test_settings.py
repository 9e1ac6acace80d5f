"""Settings: where they come from, which source wins, and what a mistake says."""

from pathlib import Path

import msgspec
import pytest

from baton.command_line import COMMANDS
from baton.protocol.config import CacheConfig, ClusterConfig, ModelConfig, RouterConfig
from baton.protocol.errors import ConfigError
from baton.runtime.fields import fields_of
from baton.runtime.settings import ignored_variables, load, parser, to_yaml
from tests.support.sources import REPOSITORY

SERVE = COMMANDS["serve"]


def write(folder: Path, text: str) -> str:
    path = folder / "cluster.yaml"
    path.write_text(text)
    return str(path)


def test_later_sources_win(tmp_path: Path) -> None:
    file = write(tmp_path, "router: {port: 1, host: a, max_queued: 5}\nprefill: 3\n")
    flags = ["--config", file, "--port", "2", "--host", "b"]
    config = load(SERVE, [*flags, "--set", "router.port=3"])
    assert (config.router.port, config.router.host) == (3, "b")
    assert (config.router.max_queued, config.prefill) == (5, 3)


def test_variables_win_over_the_file_and_flags_over_variables(tmp_path: Path) -> None:
    file = write(tmp_path, "router: {port: 1, host: a, max_queued: 5}\n")
    variables = {"BATON_ROUTER_PORT": "2", "BATON_ROUTER_HOST": "b", "BATON_DECODE": "4"}
    config = load(SERVE, ["--config", file, "--port", "3"], variables)
    assert (config.router.port, config.router.host, config.router.max_queued) == (3, "b", 5)
    assert config.decode == 4
    with pytest.raises(ConfigError, match="BATON_ROUTER_PORT cannot be 'http'"):
        load(SERVE, [], {"BATON_ROUTER_PORT": "http"})
    assert load(SERVE, [], {"BATON_ROUTER_PORT": "tcp://10.0.0.1:80"}) == ClusterConfig()


@pytest.mark.parametrize(
    ("name", "text", "hint"),
    [
        ("BATON_ROUTR_PORT", "1", "did you mean BATON_ROUTER_PORT?"),
        ("BATON_APIKEY", "secret", "did you mean BATON_API_KEY?"),
        ("BATON_XYZ", "", "docs/config.md lists them"),
        ("BATON_ROUTER_PORT", "1", None),
        ("BATON_BENCH_API_KEY", "secret", None),
        ("NOT_BATON_ROUTR_PORT", "1", None),
        # Kubernetes sets these for services called baton and baton-routr.
        ("BATON_SERVICE_HOST", "10.0.0.1", None),
        ("BATON_ROUTR_SERVICE_PORT_HTTP", "80", None),
        ("BATON_ROUTR_PORT", "tcp://10.0.0.1:80", None),
        ("BATON_ROUTR_PORT_80_TCP_ADDR", "10.0.0.1", None),
    ],
)
def test_a_variable_that_is_none_of_ours_is_warned_of(
    name: str, text: str, hint: str | None
) -> None:
    warnings = list(ignored_variables({name: text, "HOME": "/"}))
    assert len(warnings) == (hint is not None)
    for warning in warnings:
        assert name in warning
        assert hint is not None
        assert warning.endswith(hint)
        assert "secret" not in warning


def test_each_api_key_has_a_flag_of_its_own_and_may_hold_a_comma() -> None:
    keys = load(SERVE, ["--api-key", "a", "--api-key", "b,c"]).router.api_keys
    assert keys == ("a", "b,c")
    assert load(SERVE, [], {"BATON_ROUTER_API_KEYS": "a,b"}).router.api_keys == ("a", "b")


def test_the_sample_of_settings_can_be_loaded() -> None:
    config = load(SERVE, ["--config", str(REPOSITORY / "docs/sample-settings.yaml")])
    assert config == msgspec.structs.replace(
        ClusterConfig(),
        model=ModelConfig(served_model_name="demo"),
        router=RouterConfig(host="0.0.0.0", api_key_file="keys.txt"),
        cache=CacheConfig(memory_mib=2048),
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_every_setting_of_a_command_has_a_flag(command: str) -> None:
    text = parser(COMMANDS[command]).format_help()
    for field in fields_of(ClusterConfig):
        flag = "--" + field.name.replace(".", "-").replace("_", "-")
        assert (flag in text) == (field.section in COMMANDS[command].sections), field.name


@pytest.mark.parametrize(
    ("words", "section", "field", "value"),
    [
        (["--enable-prefix-caching=false"], "cache", "enable_prefix_caching", False),
        (["--log-stats-s", "0.5"], "log", "stats_s", 0.5),
        (["--set", "node.routers=tcp://a:1,tcp://b:2"], "node", "routers",
         ("tcp://a:1", "tcp://b:2")),
        (["--set", "transfer.device=a=b"], "transfer", "device", "a=b"),
        (["/models/tiny", "--threads", "2"], "model", "path", "/models/tiny"),
        (["/models/tiny", "--served-model-name", "tiny"], "model", "served_model_name", "tiny"),
        (["--enable-prefix-caching"], "cache", "enable_prefix_caching", True),
    ],
)  # fmt: skip
def test_words_become_values(words: list[str], section: str, field: str, value: object) -> None:
    assert getattr(getattr(load(SERVE, words), section), field) == value


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--blok-size", "8"], "unknown flag --blok-size; did you mean --block-size?"),
        (["--swap-space", "4"], "unknown flag --swap-space"),
        (["--set", "cache.block_sise=8"], "did you mean cache.block_size?"),
        (["--set", "cache.block_size"], "write it as section.field=value"),
        (["--port", "many"], "setting router.port cannot be 'many': expected a whole number"),
        (["--log-stats-s", "soon"], "expected a number"),
        (["--dtype", "fp7"], "choose one of auto, float32, bfloat16"),
        (["--port"], "--port"),
        (["folder", "stray"], "does not take 'stray'"),
        (["--prefill", "0", "--local-prefill", "never"], "no node could compute a prompt"),
        (["--set", "node.routers="], "name the router's control endpoint"),
    ],
)
def test_a_mistake_is_named(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load(SERVE, words)
    assert said in raised.value.message
    assert "\n" not in raised.value.message


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("cash: {}", "did you mean cache?"),
        ("cache: {block_sise: 8}", "did you mean cache.block_size?"),
        ("cache: 8", "cache is a section"),
        ("port: 8", "unknown setting"),
        ("router: {port: '8'}", "setting router.port cannot be '8': expected a whole number"),
        ("- 1", "expected settings"),
        ("a: [", "not valid YAML"),
        ("node: {routers: tcp://a:1}", "node.routers"),
    ],
)
def test_a_mistake_in_a_file_is_named(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        load(SERVE, ["--config", write(tmp_path, text)])
    assert said in raised.value.message


def test_a_file_of_code_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not valid YAML"):
        load(SERVE, ["--config", write(tmp_path, "prefill: !!python/object/apply:os.getpid []\n")])


def test_settings_survive_a_file(tmp_path: Path) -> None:
    config = ClusterConfig(prefill=3)
    for field in fields_of(ClusterConfig):
        if field.section and field.plain_type in (int, float):
            section = getattr(config, field.section)
            value = 7 if field.meta.le != 1 else 1
            changed = msgspec.structs.replace(section, **{field.key: value})
            config = msgspec.structs.replace(config, **{field.section: changed})
    node = msgspec.structs.replace(config.node, routers=("ipc:///a b", "tcp://c:1"), id="yes")
    config = msgspec.structs.replace(config, node=node)
    assert load(SERVE, ["--config", write(tmp_path, to_yaml(config))]) == config
