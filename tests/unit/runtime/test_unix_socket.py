import os
import socket
import stat
from pathlib import Path

import pytest

from baton.protocol.config import ClusterConfig, RouterConfig
from baton.protocol.errors import ConfigError
from baton.runtime.settings import checked
from baton.runtime.unix_socket import (
    bind_socket,
    check_socket_path,
    connection_to,
    remove_left_socket,
)


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "baton.sock")


def test_this_user_and_group_alone_may_connect(path):
    with bind_socket(path):
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o660


def test_a_socket_that_a_killed_server_left_is_replaced(path):
    bind_socket(path).close()
    with bind_socket(path) as bound:
        bound.listen()
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(path)


def test_a_socket_on_which_a_server_listens_stays(path):
    with bind_socket(path) as bound:
        bound.listen()
        with pytest.raises(ConfigError, match="a server listens on it"):
            bind_socket(path)
        remove_left_socket(path)
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(path)


def test_a_file_that_is_no_socket_stays(path):
    Path(path).write_text("kept")
    with pytest.raises(ConfigError, match="another file is there"):
        bind_socket(path)
    remove_left_socket(path)
    assert Path(path).read_text() == "kept"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [("/nowhere/baton.sock", "No such file"), ("/tmp/" + 120 * "x", "too long")],
)
def test_a_path_that_cannot_be_bound_is_named_with_the_reason(wrong, said):
    with pytest.raises(ConfigError, match=said):
        check_socket_path(wrong)


def test_a_check_leaves_nothing_behind(path):
    check_socket_path(path)
    assert not os.path.exists(path)


@pytest.mark.parametrize(
    "config",
    [
        ClusterConfig(router=RouterConfig(uds="/tmp/a"), router_processes=2),
        ClusterConfig(router=RouterConfig(uds="/tmp/a", ssl_certfile="/tmp/b")),
    ],
)
def test_what_a_socket_cannot_serve_is_refused(config):
    with pytest.raises(ConfigError, match=r"router\.uds"):
        checked(config)


@pytest.mark.parametrize(
    ("url", "host", "base"),
    [
        ("http://127.0.0.1:8000", "127.0.0.1", ""),
        ("http://[::1]:8000/llm", "::1", "/llm"),
        ("unix:/tmp/baton.sock", "localhost", ""),
    ],
)
def test_a_url_leads_to_its_host_and_path(url, host, base):
    connection, path = connection_to(url, 1.0)
    assert (connection.host, path) == (host, base)
