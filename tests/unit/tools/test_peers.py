"""The peers' commands; no process is started."""

from pathlib import Path

import pytest

from baton.protocol.errors import ConfigError
from tools.peers.arms import KINDS, Arm, Place, commands, parse_arm

PLACE = Place(Path("/models/m"), (9000, 9001, 9002, 9003, 9004, 9005), Path("/run/x"), Path("/p"))


def test_an_arm_is_a_make_and_options() -> None:
    assert parse_arm("baton-split") == Arm("baton-split")
    assert parse_arm("vllm+compiled+chunk=256") == Arm("vllm", True, 256)
    assert parse_arm("vllm+compiled+chunk=256").name == "vllm-compiled-chunk256"


@pytest.mark.parametrize(
    "text", ["tgi", "vllm+fast", "vllm+chunk=", "vllm+chunk=0", "baton+compiled", ""]
)
def test_an_unknown_arm_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_arm(text)
    assert "\n" not in refused.value.message


@pytest.mark.parametrize("kind", KINDS)
def test_the_last_process_of_an_arm_answers_at_its_url(kind: str) -> None:
    listed = commands(Arm(kind), PLACE)
    assert listed[-1].ready_url == "http://127.0.0.1:9000/health"
    assert "9000" in listed[-1].argv
    assert len({command.name for command in listed}) == len(listed)
    for command in listed:
        assert "0.0.0.0" not in " ".join(command.argv)
        assert any(word == "/models/m" or word.endswith("=/models/m") for word in command.argv) or (
            command.name.endswith("router")
        )


def test_the_pair_of_vllm_has_a_core_for_each_role_unless_it_shares_both() -> None:
    prefill, decode, router = commands(Arm("vllm-pair"), PLACE)
    assert (prefill.cpus, decode.cpus, router.cpus) == ((0,), (1,), ())
    assert prefill.env["VLLM_CPU_OMP_THREADS_BIND"] == "0"
    for server in commands(parse_arm("vllm-pair+shared"), PLACE)[:2]:
        assert server.cpus == ()
        assert server.env["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"


def test_the_pair_of_vllm_talks_over_loopback_through_nixl() -> None:
    prefill, decode, router = commands(Arm("vllm-pair"), PLACE)
    for server in (prefill, decode):
        assert "NixlConnector" in " ".join(server.argv)
        assert server.env["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "127.0.0.1"
        assert server.env["NIXL_PTHR_DELAY_US"] == "1000"
    ports = {server.env["VLLM_NIXL_SIDE_CHANNEL_PORT"] for server in (prefill, decode)}
    assert len(ports) == 2
    assert {"http://127.0.0.1:9001", "http://127.0.0.1:9002"} <= set(router.argv)
