"""TLS by files: what is served with them, and which of them stop a start."""

import http.client
import shutil
import ssl
import subprocess

import msgspec
import pytest

from baton.__main__ import main
from baton.protocol.config import ClusterConfig, RouterConfig
from baton.runtime.tls import server_context
from tests.support.certificates import Certificate, make_certificate
from tests.support.router_process import WAIT_S


@pytest.fixture
def made(tmp_path):
    return make_certificate(tmp_path)


def with_tls(config: ClusterConfig, made: Certificate) -> ClusterConfig:
    router = msgspec.structs.replace(
        config.router, ssl_certfile=str(made.cert), ssl_keyfile=str(made.key)
    )
    return msgspec.structs.replace(config, router=router)


def test_tls_is_at_least_1_2_and_plain_http_gets_no_answer(config, start, made):
    changed = with_tls(config, made)
    context = server_context(changed.router)
    assert context.minimum_version == ssl.TLSVersion.TLSv1_2
    router = start(changed)
    url = router.wait_for_url()
    host, port = url.removeprefix("https://").split(":")
    plain = http.client.HTTPConnection(host, int(port), timeout=WAIT_S)
    plain.request("GET", "/live")
    with pytest.raises((http.client.HTTPException, OSError)):
        plain.getresponse()
    plain.close()
    router.end_well()


def missing(made: Certificate) -> None:
    made.cert.unlink()


def folder(made: Certificate) -> None:
    made.key.unlink()
    made.key.mkdir()


def mismatching(made: Certificate) -> None:
    shutil.copy(make_certificate(made.key.parent, "other").key, made.key)


def swapped(made: Certificate) -> None:
    made.key.rename(made.key.with_suffix(".old"))
    made.cert.rename(made.key)
    made.key.with_suffix(".old").rename(made.cert)


def encrypted(made: Certificate) -> None:
    words = ["rsa", "-aes256", "-passout", "pass:secret", "-in", str(made.key)]
    text = subprocess.run(
        ["openssl", *words], check=True, capture_output=True, timeout=60
    ).stdout
    made.key.write_bytes(text)


@pytest.mark.parametrize("command", ["serve", "router"])
@pytest.mark.parametrize(
    ("damage", "hint"),
    [
        (missing, "(router.ssl_certfile): No such file"),
        (folder, "(router.ssl_keyfile): Is a directory"),
        (mismatching, "do not belong together"),
        (swapped, "in PEM form"),
        (encrypted, "without a password"),
    ],
)
def test_a_file_that_cannot_be_used_is_one_line(damage, hint, command, made, capsys):
    damage(made)
    flags = ["--ssl-certfile", str(made.cert), "--ssl-keyfile", str(made.key)]
    assert main([command, *flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert hint in line
    assert str(made.key.parent) in line


def test_a_key_may_be_in_the_file_of_its_certificate_but_not_alone(made, capsys):
    both = made.cert.with_suffix(".pem")
    both.write_bytes(made.cert.read_bytes() + made.key.read_bytes())
    assert server_context(RouterConfig(ssl_certfile=str(both))) is not None
    assert main(["router", "--ssl-keyfile", str(made.key)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--ssl-certfile" in line
