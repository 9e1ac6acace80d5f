"""Self-signed certificates for 127.0.0.1, made by openssl."""

import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest


class Certificate(NamedTuple):
    """Two files in PEM form. The certificate is its own authority."""

    cert: Path
    key: Path


def make_certificate(folder: Path, name: str = "server") -> Certificate:
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl to make a certificate")
    made = Certificate(folder / f"{name}.crt", folder / f"{name}.key")
    words = ["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=127.0.0.1"]
    words += ["-addext", "subjectAltName=IP:127.0.0.1"]
    words += ["-keyout", str(made.key), "-out", str(made.cert)]
    subprocess.run(["openssl", *words], check=True, capture_output=True, timeout=60)
    return made
