"""A wheel of the checkout serves the demo model where there is no checkout."""

import json
import os
import re
import shutil
import site
import subprocess
import sys
import urllib.request
import venv

import pytest

from tests.support.sources import REPOSITORY

pytestmark = [pytest.mark.release, pytest.mark.timeout(600)]

ASKED = {"model": "demo", "temperature": 0, "max_tokens": 8}
TOLD = "The code of Lima is 4071. The code of Oslo is 2210. What is the code of Lima?"


def test_a_wheel_serves_the_demo_model_without_a_checkout(tmp_path):
    left_out = shutil.ignore_patterns(
        ".git", ".venv", "build", "*.egg-info", "__pycache__"
    )
    source = shutil.copytree(
        REPOSITORY, tmp_path / "source", symlinks=True, ignore=left_out
    )
    make = (
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "-w",
        str(tmp_path),
    )
    subprocess.run([*make, str(source)], check=True)
    (wheel,) = tmp_path.glob("baton_llm-*.whl")
    folder = tmp_path / "venv"
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    subprocess.run(
        [python, "-m", "pip", "install", "-q", "--no-deps", str(wheel)], check=True
    )
    # The packages that baton needs are those of these tests.
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "tests.pth").write_text(
        "\n".join(path for path in site.getsitepackages() if path != str(packages))
    )
    env = {
        name: text for name, text in os.environ.items() if not name.startswith("PYTHON")
    }
    with subprocess.Popen(
        [folder / "bin" / "baton", "serve", "--port", "0"],
        cwd=tmp_path,
        env=env | {"HOME": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as server:
        try:
            assert server.stdout is not None
            said = ""
            while not (found := re.search(r"http://127\.0\.0\.1:(\d+)/v1", said)):
                line = server.stdout.readline()
                assert line, said
                said += line
            body = json.dumps({**ASKED, "prompt": TOLD}).encode()
            headers = {"Content-Type": "application/json"}
            request = urllib.request.Request(f"{found[0]}/completions", body, headers)
            with urllib.request.urlopen(request, timeout=60) as reply:
                assert json.load(reply)["choices"][0]["text"] == " 4071."
        finally:
            server.terminate()
            said += server.communicate(timeout=60)[0]
        assert server.returncode == 0, said
