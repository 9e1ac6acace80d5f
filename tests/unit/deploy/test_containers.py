"""deploy/containers: what the image and compose.yaml say is what the code understands."""

import ast
import inspect
import json
import re
import tomllib
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from baton.command_line import COMMANDS
from baton.deploy.cluster.kubernetes import CACHE_FOLDER, KEY_FOLDER, USER
from baton.engine import node_http
from baton.protocol.config import ClusterConfig
from baton.router.http import app
from baton.runtime.fields import fields_of
from baton.runtime.settings import VARIABLE_PREFIX, load, variable_of
from tests.support.sources import REPOSITORY, ROOMS

CONTAINERS = REPOSITORY / "deploy/containers"
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
COMPOSE: dict[str, Any] = yaml.safe_load((CONTAINERS / "compose.yaml").read_text())
PROCESSES = ("router", "prefill", "decode")
VARIABLES = {variable_of(field) for field in fields_of(ClusterConfig)}


def instructions() -> Iterator[tuple[str, str]]:
    """Yield each instruction of the Dockerfile and the rest of it as one line."""
    text = re.sub(r"(?m)^#.*\n", "", (CONTAINERS / "Dockerfile").read_text())
    for line in text.replace("\\\n", " ").splitlines():
        if line.strip():
            word, _, rest = line.strip().partition(" ")
            yield word, rest


def said(word: str) -> list[str]:
    return [rest for name, rest in instructions() if name == word]


def settings(service: dict[str, Any]) -> ClusterConfig:
    """Return the settings of a process, with compose.yaml's own variables at their defaults."""
    environment = {
        name: re.sub(r"\$\{\w+:-(.*?)\}", r"\1", value)
        for name, value in service["environment"].items()
    }
    named = {name for name in environment if name.startswith(VARIABLE_PREFIX)}
    assert named <= VARIABLES, "an unknown variable is not refused"
    subcommand, *words = service["command"]
    return load(COMMANDS[subcommand], words, environment)


def test_the_image_starts_a_command_that_is_there_as_the_user_that_pods_have() -> None:
    assert json.loads(said("ENTRYPOINT")[0]) == list(PROJECT["scripts"]) == ["baton"]
    subcommand, *words = json.loads(said("CMD")[0])
    assert load(COMMANDS[subcommand], words, {}).router.host == "0.0.0.0"
    assert said("USER") == [f"{USER}:{USER}"]
    (made,) = (rest for rest in said("RUN") if rest.startswith("install -d"))
    assert f"-o {USER} -g {USER} {CACHE_FOLDER} {KEY_FOLDER}" in made
    for name in ("HOME", "XDG_CACHE_HOME"):
        assert f"{name}={CACHE_FOLDER}" in said("ENV")[-1].split()


def test_the_image_is_built_from_named_versions() -> None:
    arguments = dict(one.split("=", 1) for one in said("ARG"))
    assert set(arguments) == {"BASE", "TORCH_INDEX", "EXTRAS", "PACKAGES"}
    _, _, tag = arguments["BASE"].partition(":")
    assert re.match(r"3\.\d+", tag)
    assert {stage.split()[0] for stage in said("FROM")} == {"${BASE}"}
    assert set(arguments["EXTRAS"].split(",")) <= set(PROJECT["optional-dependencies"])
    installs = [part for rest in said("RUN") for part in rest.split("&&") if "pip install" in part]
    assert installs
    assert all(re.search(r"--constraint constraints\.txt|--no-deps", part) for part in installs)
    # A run of baton would leave kernels of the builder's CPU in the cache.
    assert not any(re.search(r"(^|&& |bin/)baton\b(?!/)", rest) for rest in said("RUN"))


def test_the_health_check_asks_for_a_path_that_routers_and_nodes_serve() -> None:
    (check,) = said("HEALTHCHECK")
    words = json.loads(check.partition("CMD ")[2])
    ast.parse(words[-1])
    (path,) = re.findall(r"\{port\}(/\w+)'", words[-1])
    assert f'add("{path}", GET=' in inspect.getsource(app)
    assert f'web.get("{path}"' in inspect.getsource(node_http)
    (variable, port) = re.findall(r"environ\.get\('(\w+)', '(\d+)'\)", words[-1])[0]
    assert variable in VARIABLES
    assert int(port) == ClusterConfig().router.port == int(said("EXPOSE")[0])
    for name in ("prefill", "decode"):
        assert settings(COMPOSE["services"][name]).node.http.endswith(f":{port}")


def test_the_build_sees_every_room_and_no_key() -> None:
    lines = (REPOSITORY / ".dockerignore").read_text().splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    assert rules[0] == "*"
    shown = {rule[1:] for rule in rules if rule.startswith("!")}
    copied = {
        word for rest in said("COPY") for word in rest.split() if word.endswith((".txt", ".toml"))
    }
    assert shown >= {*ROOMS, "src", *copied, *PROJECT["license-files"], PROJECT["readme"]}
    assert all((REPOSITORY / name).exists() for name in shown)
    assert "**/*.key" in rules


@pytest.mark.parametrize("name", PROCESSES)
def test_a_service_is_a_process_that_the_others_reach(name: str) -> None:
    services = COMPOSE["services"]
    config, router = settings(services[name]), settings(services["router"])
    assert services[name]["hostname"] == services[name]["command"][0] == name
    assert config.keys.file.startswith(f"{KEY_FOLDER}/")
    assert f"exec baton keygen {config.keys.file}" in services["key"]["command"][0]
    assert f"key:{KEY_FOLDER}:ro" in services[name]["volumes"]
    drain_s = max(config.router.drain_s, config.node.drain_s)
    assert int(services[name]["stop_grace_period"].removesuffix("s")) > drain_s
    if name == "router":
        assert router.router.host == "0.0.0.0"
        assert services[name]["ports"] == [f"${{PORT:-8000}}:{router.router.port}"]
    else:
        assert config.node.routers == (router.router.control,) == ("tcp://router:5570",)
        assert config.node.bind == f"tcp://{name}"
        assert config.transfer.transport == "nixl"
        assert "ports" not in services[name]


def test_the_services_run_confined_and_their_volumes_are_described() -> None:
    services = COMPOSE["services"]
    assert set(services) == {"key", *PROCESSES}
    build = services["key"]["build"]
    assert (CONTAINERS / build["context"]).resolve() == REPOSITORY
    assert (REPOSITORY / build["dockerfile"]).samefile(CONTAINERS / "Dockerfile")
    assert set(build["args"]) <= {argument.partition("=")[0] for argument in said("ARG")}
    for service in services.values():
        assert service["read_only"]
        assert service["cap_drop"] == ["ALL"]
        assert service["tmpfs"] == ["/tmp"]
        assert {one.split(":")[0] for one in service["volumes"]} <= set(COMPOSE["volumes"])
