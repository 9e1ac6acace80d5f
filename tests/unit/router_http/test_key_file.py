"""API keys from a file of hashes: made, taken, read again while the router runs."""

import os
import stat
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from baton.protocol.config import RouterConfig
from baton.protocol.errors import ConfigError, RequestError
from baton.router.http.access import Access
from baton.router.http.key_file import LOOK_AGAIN_S, KeyFile, add_key, digest_of
from tests.support.virtual_clock import VirtualClock


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys"


def test_a_key_is_added_without_touching_the_others_and_is_stored_nowhere(path: Path) -> None:
    first = add_key(path, "alice")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.write_text(path.read_text().rstrip() + "\n\n# of the batch job")  # edited by hand
    second = add_key(path, "")
    assert first != second
    assert first not in path.read_text()
    assert " alice\n" in path.read_text()
    keys = KeyFile(str(path), VirtualClock())
    assert [digest_of(key.encode()) in keys for key in (first, second, "other")] == [
        True, True, False,
    ]  # fmt: skip


def test_a_change_of_the_file_is_noticed_within_a_second(path: Path) -> None:
    clock = VirtualClock()
    first = digest_of(add_key(path, "alice").encode())
    keys = KeyFile(str(path), clock)
    second = digest_of(add_key(path, "bob").encode())
    assert second not in keys
    clock.advance(LOOK_AGAIN_S)
    assert second in keys
    path.write_text(path.read_text().splitlines()[1] + "\n")
    clock.advance(LOOK_AGAIN_S)
    assert first not in keys
    assert second in keys


@pytest.mark.parametrize("damage", ["sha256:12", "secret", "\ud800"])
def test_a_damaged_file_stops_a_start_and_leaves_a_running_router_its_keys(
    damage: str, path: Path
) -> None:
    clock = VirtualClock()
    key = digest_of(add_key(path, "alice").encode())
    keys = KeyFile(str(path), clock)
    path.write_bytes(b"\n" + damage.encode(errors="surrogatepass"))
    clock.advance(LOOK_AGAIN_S)
    assert key in keys
    with pytest.raises(ConfigError, match=r"line 2|not text"):
        KeyFile(str(path), clock)
    path.unlink()
    clock.advance(LOOK_AGAIN_S)
    assert key in keys
    with pytest.raises(ConfigError, match="No such file"):
        KeyFile(str(path), clock)


def test_a_name_of_two_lines_is_refused(path: Path) -> None:
    with pytest.raises(ConfigError, match="one line"):
        add_key(path, "alice\nsha256:0")
    assert not path.exists()
    with pytest.raises(ConfigError, match="cannot write"):
        add_key(Path(os.devnull) / "keys", "alice")


def test_keys_of_the_file_and_of_the_settings_are_both_taken(path: Path) -> None:
    key = add_key(path, "alice")
    access = Access(RouterConfig(api_keys=("plain",), api_key_file=str(path)))
    only_file = Access(RouterConfig(api_key_file=str(path)))
    for given in (key, "plain"):
        access.check(request_with(given))
    only_file.check(request_with(key))
    for refusing, given in ((access, "other"), (only_file, "plain"), (only_file, "")):
        with pytest.raises(RequestError, match="valid API key"):
            refusing.check(request_with(given))


def request_with(key: str) -> web.Request:
    return make_mocked_request("GET", "/v1/models", {"Authorization": f"Bearer {key}"})
