"""Fill in the chart with the real `helm`, where one is installed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from baton.deploy.cluster.platforms.helm import CHART

Object = dict[str, Any]
Objects = dict[tuple[str, str], Object]

# Where `make install-test` puts helm and kubectl.
os.environ["PATH"] += os.pathsep + str(Path(sys.executable).parent)
needs_helm = pytest.mark.skipif(
    shutil.which("helm") is None, reason="helm is not installed"
)


def helm(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["helm", *words], capture_output=True, text=True, check=False)


def refusal(*words: str, release: str = "small") -> str:
    """Return why helm does not fill in the chart with these flags."""
    done = helm("template", release, str(CHART), *words)
    assert done.returncode != 0
    return done.stderr


def objects_of(*words: str, release: str = "small") -> Objects:
    """Return the objects that helm makes with these flags, by kind and name."""
    done = helm("template", release, str(CHART), "--namespace", release, *words)
    assert done.returncode == 0, done.stderr
    found = [one for one in yaml.safe_load_all(done.stdout) if one]
    names = [(one["kind"], one["metadata"]["name"]) for one in found]
    assert len(set(names)) == len(names)
    return dict(zip(names, found, strict=True))


def values_file(folder: Path, **values: Any) -> str:
    path = folder / "more.yaml"
    path.write_text(yaml.safe_dump(values))
    return str(path)
