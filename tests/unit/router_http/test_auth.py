"""API keys from settings and from a file of hashes."""

import os
import stat
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from baton.protocol.config import RouterConfig
from baton.protocol.errors import ConfigError, RequestError
from baton.router.http.auth import Access, add_key, digest_of, read_keys


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
    keys = read_keys(path)
    assert [digest_of(key.encode()) in keys for key in (first, second, "other")] == [
        True, True, False,
    ]  # fmt: skip


@pytest.mark.parametrize("damage", ["sha256:12", "secret", "\ud800"])
def test_a_damaged_or_missing_file_stops_a_start(damage: str, path: Path) -> None:
    path.write_bytes(b"\n" + damage.encode(errors="surrogatepass"))
    with pytest.raises(ConfigError, match=r"line 2|not text"):
        read_keys(path)
    path.unlink()
    with pytest.raises(ConfigError, match="No such file"):
        read_keys(path)


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
