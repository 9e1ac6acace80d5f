"""Log lines that cannot be forged, and the event ring."""

import contextlib
import io
import json
import shutil
import stat
import subprocess
import sys
from datetime import datetime, timedelta

import pytest

from baton.node.records import EventRing, folder_for_dumps
from baton.node.scheduling.plan import StepResult
from baton.node.sockets import FromRouter
from baton.protocol.config import LogConfig
from baton.protocol.ids import Key, RequestId
from baton.protocol.messages import Load, Prefill, TokenLogprobs
from baton.protocol.sampling import Sampling
from baton.runtime.log import logger, say, setup


def test_a_line_names_its_process_and_its_fields():
    stream = io.StringIO()
    setup(LogConfig(), "twice", stream)
    setup(LogConfig(), "decode-0", stream)
    logger("node").debug("below the level")
    logger("node").info("ready", blocks=7, why="two words", share=0.5)
    stamp, _, line = stream.getvalue().partition(" ")
    assert datetime.fromisoformat(stamp).utcoffset() is not None
    assert line == 'INFO    decode-0: ready blocks=7 why="two words" share=0.5\n'


def test_a_field_cannot_forge_a_line():
    stream = io.StringIO()
    setup(LogConfig(), "router", stream)
    logger("node").warning(
        "odd\nmessage", client="x\n12:00:00.000 ERROR router: forged"
    )
    assert len(stream.getvalue().splitlines()) == 1


OWNED = """
import logging, sys, threading, warnings
from baton.protocol.config import LogConfig
from baton.runtime.log import setup_process_log, relayed, print_failure
setup_process_log(LogConfig(json=True), "router")
warnings.warn("old", DeprecationWarning)
logging.getLogger("aiohttp.server").error("bad %s", "request")
print_failure("no port", "no_port")
sys.stderr.write(relayed("decode-0", "a line of a library") + "\\n")
sys.stderr.write(relayed("decode-0", '{"process": "decode-0"}') + "\\n")
thread = threading.Thread(target=lambda: 1 / 0)
thread.start()
thread.join()
raise ValueError("the end")
"""


def test_with_json_every_line_of_a_process_is_json():
    """Those of libraries, of Python's warnings, of children and of uncaught errors too."""
    command = [sys.executable, "-W", "default", "-c", OWNED]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    told = [line.get("message", "").partition("\n")[0] for line in lines]
    assert "old" in told.pop(0)
    assert told == [
        "bad request",
        "no port",
        "a line of a library",
        "",
        "an unexpected error ended a thread",
        "an unexpected error ends the process",
    ]
    assert [line["process"] for line in lines[2:5]] == [
        "router",
        "decode-0",
        "decode-0",
    ]
    assert "ZeroDivisionError" in lines[-2]["traceback"]
    assert "ValueError: the end" in lines[-1]["traceback"]
    assert done.returncode == 1
    # As RFC 3339 writes it, which collectors of logs read.
    times = [datetime.fromisoformat(line["time"]) for line in lines if "time" in line]
    assert len(times) >= len(lines) - 1  # all but the line of a child
    assert all(time.utcoffset() == timedelta(0) for time in times)


def test_a_line_for_people_on_a_full_disk_ends_nothing():
    with open("/dev/full", "w") as full:
        say("baton serves", full)
        with contextlib.suppress(OSError):
            full.close()


def test_a_ring_keeps_the_latest_events(tmp_path):
    ring = EventRing(capacity=2)
    for number in range(4):
        ring.begin_turn()
        assert ring.is_turn_empty
        ring.record(float(number), Load(number), rank=number)
        assert not ring.is_turn_empty
    assert ring.dump(tmp_path / "events") == len(ring) == 2
    lines = [
        json.loads(line) for line in (tmp_path / "events").read_text().splitlines()
    ]
    assert [(line["turn"], line["now_s"], line["rank"]) for line in lines] == [
        (3, 2.0, 2),
        (4, 3.0, 3),
    ]
    assert lines[0]["type"] == "Load"


def test_a_dump_is_a_new_file_that_only_its_owner_can_read(tmp_path):
    ring = EventRing()
    ring.record(0.0, Load(1))
    folder = folder_for_dumps("")
    ring.dump(folder / "events")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "events").stat().st_mode) == 0o600
    assert folder_for_dumps(str(tmp_path)) == tmp_path
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for taken in (folder / "events", tmp_path / "link"):
        with pytest.raises(FileExistsError):
            ring.dump(taken)
    shutil.rmtree(folder)


PREFILL = Prefill(Key(RequestId("r1")), [5] * 400, 400, Sampling(seed=0, max_tokens=1))


def test_a_ring_holds_a_bounded_number_of_tokens():
    ring = EventRing(capacity=100, max_tokens=1_000)
    for _ in range(10):
        ring.record(0.0, FromRouter(0, PREFILL))
        ring.record(0.0, Load(1))
    assert len(ring) == 5  # two prompts and what came around them


def test_a_ring_keeps_no_log_probabilities(tmp_path):
    """2,000 steps of 256 sequences with 20 likeliest tokens each would take a gigabyte."""
    ring = EventRing()
    scores = ((0, (TokenLogprobs(-0.5, 1, ((7, -0.5),) * 20),)),)
    ring.record(0.0, StepResult(1, ((7,),), 0.0, 1.0, (), scores, ((0, b"12345678"),)))
    ring.dump(tmp_path / "events")
    event = json.loads((tmp_path / "events").read_text())["event"]
    assert (event["tokens"], event["logprobs"], event["prompt_logprobs"]) == (
        [[7]],
        [],
        [],
    )
