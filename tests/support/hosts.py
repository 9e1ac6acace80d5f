"""Hosts on a network of their own: namespaces on one bridge, with the addresses 10.0.0.1 to N.

A process in one reaches the others over TCP alone, as between machines, but for memory and files.
Making namespaces takes the rights of root and iproute2's `ip`.
"""

import ctypes
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

CLONE_NEWNET = 0x40000000


class Hosts:
    """Made by `hosts`. Host 1 has the address 10.0.0.1."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix

    def start(
        self,
        host: int,
        command: Sequence[str],
        output: Path,
        env: Mapping[str, str] | None = None,
    ) -> subprocess.Popen[bytes]:
        with output.open("ab") as file:
            return subprocess.Popen(
                [*self._inside(host), *command],
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(env or {})},
                cwd=output.parent,
                start_new_session=True,
            )

    def run(self, host: int, *command: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [*self._inside(host), *command], capture_output=True, text=True, check=False
        )

    def launcher(self, path: Path) -> str:
        """Write a program that hands a host's shell a command, as ssh does; return how to call it.

        `{host}` in it stands for the address of the host.
        """
        inside = f"ip netns exec {self._prefix}${{1##*.}}"
        path.write_text(
            f'#!/bin/sh\ninside="{inside}"\nshift\nexec $inside sh -c "$*"\n'
        )
        path.chmod(0o755)
        return f"{path} {{host}}"

    def namespace(self, host: int) -> Path:
        return Path(f"/run/netns/{self._prefix}{host}")

    def plug(self, host: int, *, is_in: bool) -> None:
        """Pull a host's cable at the switch, or put it in again."""
        state = "up" if is_in else "down"
        _ip_must("-n", f"{self._prefix}switch", "link", "set", f"port{host}", state)

    def drop(self, host: int, *rules: str) -> None:
        """Drop what comes in on a host and meets one of nftables' rules; no rule drops nothing.

        Skips the test where nftables does not work.
        """
        chain = "".join(f"{rule} drop\n" for rule in rules)
        table = (
            "table inet cut {}\ndelete table inet cut\n"
            f"table inet cut {{ chain in {{ type filter hook input priority 0;\n{chain}}}\n}}\n"
        )
        try:
            done = subprocess.run(
                [*self._inside(host), "nft", "-f", "-"],
                input=table,
                capture_output=True,
                text=True,
                check=False,
            )
        except FileNotFoundError:
            pytest.skip("dropping packets needs nftables' `nft`")
        if done.returncode != 0:
            pytest.skip(f"nftables does not work here: {done.stderr.strip()}")

    def enter(self, host: int) -> None:
        """Let the sockets that this thread opens from now on be those of a host."""
        with self.namespace(host).open("rb") as namespace:
            if (
                ctypes.CDLL(None, use_errno=True).setns(
                    namespace.fileno(), CLONE_NEWNET
                )
                != 0
            ):
                raise OSError(ctypes.get_errno(), "setns")

    def _inside(self, host: int) -> list[str]:
        return ["ip", "netns", "exec", f"{self._prefix}{host}"]


@contextmanager
def hosts(count: int) -> Iterator[Hosts]:
    """Make `count` hosts; skips the test where that is not possible."""
    prefix = f"baton-{os.getpid()}-"
    switch = f"{prefix}switch"
    with ExitStack() as stack:
        for name in (switch, *(f"{prefix}{host}" for host in range(1, count + 1))):
            try:
                done = _ip("netns", "add", name)
            except FileNotFoundError:
                pytest.skip("network namespaces need iproute2's `ip`")
            if done.returncode != 0:
                pytest.skip(f"no network namespaces here: {done.stderr.strip()}")
            stack.callback(_ip, "netns", "delete", name)
        _ip_must("-n", switch, "link", "add", "bridge", "type", "bridge")
        _ip_must("-n", switch, "link", "set", "bridge", "up")
        for host in range(1, count + 1):
            _plug_in(f"{prefix}{host}", switch, host)
        yield Hosts(prefix)


def _plug_in(name: str, switch: str, host: int) -> None:
    """Connect a host to the bridge by a pair of virtual Ethernet devices."""
    port = f"port{host}"
    _ip_must(
        "-n",
        name,
        "link",
        "add",
        "eth0",
        "type",
        "veth",
        "peer",
        "name",
        port,
        "netns",
        switch,
    )
    _ip_must("-n", switch, "link", "set", port, "master", "bridge", "up")
    _ip_must("-n", name, "address", "add", f"10.0.0.{host}/24", "dev", "eth0")
    _ip_must("-n", name, "link", "set", "eth0", "up")
    _ip_must("-n", name, "link", "set", "lo", "up")


def _ip(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        ["ip", *arguments], capture_output=True, text=True, check=False
    )


def _ip_must(*arguments: str) -> None:
    done = _ip(*arguments)
    assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr}"
