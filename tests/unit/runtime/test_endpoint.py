"""Addresses: what they mean, who can reach them, and what is wrong with the others."""

import pytest

from baton.protocol.errors import ConfigError
from baton.runtime.channels.endpoint import Endpoint, bindable


@pytest.mark.parametrize(
    ("text", "endpoint", "is_loopback"),
    [
        ("tcp://10.0.0.1:5570", Endpoint("10.0.0.1", 5570), False),
        ("tcp://10.0.0.1:*", Endpoint("10.0.0.1"), False),
        ("tcp://127.8.0.1", Endpoint("127.8.0.1"), True),
        ("tcp://[::1]:80", Endpoint("::1", 80), True),
        ("tcp://*:80", Endpoint("*", 80), False),
        ("tcp://0.0.0.0:80", Endpoint("0.0.0.0", 80), False),
        ("tcp://localhost:80", Endpoint("localhost", 80), True),
        ("ipc:///tmp/socket", Endpoint(path="/tmp/socket"), True),
    ],
)
def test_an_address_is_read(text: str, endpoint: Endpoint, is_loopback: bool) -> None:
    assert bindable(text) == endpoint
    assert endpoint.is_loopback == is_loopback


@pytest.mark.parametrize(
    "text", ["", "tcp://:80", "tcp://a:b", "tcp://a:70000", "ipc://", "http://a:1", "a:1"]
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="write tcp://host:port or ipc:///path"):
        bindable(text)


@pytest.mark.parametrize("text", ["tcp://10.0.0.1", "tcp://*:80"])
def test_nobody_dials_what_is_no_single_place(text: str) -> None:
    with pytest.raises(ConfigError, match="cannot dial"):
        _ = bindable(text).dial_endpoint
