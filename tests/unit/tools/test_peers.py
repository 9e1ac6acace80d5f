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
