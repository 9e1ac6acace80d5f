"""The containers of rendered manifests, run as processes: commands, environments, keys, probes."""

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import yaml

from baton.deploy.cluster.kubernetes import APPLIED, Applied, KubernetesPlatform
from baton.deploy.cluster.platform import PlatformOptions
from baton.deploy.cluster.processes import ProcessRole, plan_of
from baton.deploy.cluster.reading import read_description
from baton.deploy.cluster.running import Deployment, write_deployment
from baton.deploy.health import url_of
from baton.runtime.channels.keys import write_key
from baton.runtime.process import EXIT_TERMINATED
from tests.support.cluster import free_port
from tests.support.completions import answers, ask
from tests.support.deployed import TOLD
from tests.support.waiting import TIMEOUT_S, until

Object = dict[str, Any]
ADDRESSES = ("127.0.0.1", "::1")  # of pods
# The volumes of a pod, in a view of the file system that ends with the process. Kernels that were
# compiled before are those of the machine, so that no pod compiles them again.
VOLUMES = """
set -e
mount -t tmpfs tmpfs /run
mkdir -p /run/baton /run/secrets/baton
cp {folder}/cluster.key /run/secrets/baton/
mount -t tmpfs tmpfs /var/cache
mkdir -p /var/cache/baton/baton {compiled}
mount --bind {compiled} /var/cache/baton/baton
mount --bind {folder}/hosts /etc/hosts
{init}
exec env -i {env} {command}
"""


def described(folder: Path, address: str) -> Object:
    """Write a small cluster and return its description."""
    write_key(folder / "cluster.key")
    pools = {
        role: {"role": role, "http_port": free_port(), "settings": {"cache": {"memory_mib": 64}}}
        for role in ("prefill", "decode")
    }
    content: Object = {
        "name": "small",
        "key": "cluster.key",
        "routers": [{"port": free_port(), "control_port": free_port()}],
        "pools": pools,
        "settings": {"router": {"api_keys": ["s3cret"]}, "node": {"drain_s": 5}},
    }
    (folder / "cluster.yaml").write_text(yaml.safe_dump(content))
    (folder / "hosts").write_text(f"{address} localhost router-0\n")
    return content


def objects(folder: Path) -> list[Object]:
    platform = KubernetesPlatform(PlatformOptions())
    description = read_description(folder / "cluster.yaml")
    plan = plan_of(description, platform.places(description))
    files = platform.render(plan, folder / "manifests")
    return [one for path in files for one in yaml.safe_load_all(path.read_text())]


def environment(
    container: Object, name: str, secrets: dict[str, Object], address: str
) -> dict[str, str]:
    """Return the variables as Kubernetes fills them in for the pod `name`."""
    fields = {"status.podIP": address, "metadata.name": name}
    found: dict[str, str] = {}
    for reference in container.get("envFrom", ()):
        found |= secrets[reference["secretRef"]["name"]]["stringData"]
    for one in container["env"]:
        text = one.get("value", "")
        if "valueFrom" in one:
            text = fields[one["valueFrom"]["fieldRef"]["fieldPath"]]
        for known, value in found.items():
            text = text.replace(f"$({known})", value)
        found[one["name"]] = text
    return found


@contextmanager
def running(
    folder: Path, found: list[Object], address: str
) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """Run the first pod of each Deployment and StatefulSet."""
    secrets = {one["metadata"]["name"]: one for one in found if one["kind"] == "Secret"}
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "baton"
    processes: dict[str, subprocess.Popen[bytes]] = {}
    own = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
    try:
        for one in found:
            if one["kind"] not in ("Deployment", "StatefulSet"):
                continue
            name = one["metadata"]["name"] + ("-0" if one["kind"] == "StatefulSet" else "")
            pod = one["spec"]["template"]["spec"]
            (container,), (init,) = pod["containers"], pod["initContainers"]
            env = own | environment(container, name, secrets, address)
            script = VOLUMES.format(
                folder=shlex.quote(str(folder)),
                compiled=shlex.quote(str(cache)),
                init=shlex.join(init["command"]),
                env=shlex.join(f"{key}={text}" for key, text in env.items()),
                command=shlex.join([sys.executable, "-m", "baton", *container["args"]]),
            )
            with (folder / f"{name}.log").open("wb") as log:
                processes[name] = subprocess.Popen(
                    ["unshare", "--mount", "sh", "-c", script],
                    stdout=log, stderr=log, start_new_session=True,
                )  # fmt: skip
        yield processes
    finally:
        for process in processes.values():
            process.kill()
            process.wait(TIMEOUT_S)


@pytest.mark.parametrize("address", ADDRESSES)
def test_the_containers_of_the_manifests_serve_answer_their_probes_and_drain(
    address: str, tmp_path: Path
) -> None:
    if shutil.which("unshare") is None or os.geteuid() != 0:
        pytest.skip("views of the file system need root and util-linux' `unshare`")
    try:
        socket.create_server(
            (address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET
        ).close()
    except OSError as error:
        pytest.skip(f"no address {address} here: {error}")
    content = described(tmp_path, address)
    found = objects(tmp_path)

    def said() -> str:
        return "\n".join(path.read_text() for path in tmp_path.glob("*.log"))

    with running(tmp_path, found, address) as processes:
        assert set(processes) == {"router-0", "prefill-0", "decode-0"}
        for one in found:
            if one["kind"] in ("Deployment", "StatefulSet"):
                (container,) = one["spec"]["template"]["spec"]["containers"]
                ports = {port["name"]: port["containerPort"] for port in container["ports"]}
                for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
                    asked = container[kind]["httpGet"]
                    url = url_of(address, ports[asked["port"]]) + asked["path"]
                    until(lambda u=url: answers(u), said)
        (clients,) = [
            one for one in found if one["kind"] == "Service" and one["metadata"]["name"] == "baton"
        ]
        assert clients["spec"]["ports"][0]["targetPort"] == "http"
        url = url_of(address, content["routers"][0]["port"])
        body = {"prompt": TOLD, "max_tokens": 8, "temperature": 0}
        with ask(url, body, Authorization="Bearer s3cret") as reply:
            assert json.load(reply)["choices"][0]["text"] == " 4071."
        for process in processes.values():
            process.send_signal(signal.SIGTERM)
        assert [process.wait(TIMEOUT_S) for process in processes.values()] == [0, 0, 0], said()


# Stands for the cluster's API: two pods, whose commands run here.
KUBECTL = """\
#!/bin/sh
[ "$1" = get ] && exec cat {folder}/pods.json
shift 5
exec "$@"
"""


def test_doctor_runs_inside_the_pods(tmp_path: Path) -> None:
    content = described(tmp_path, ADDRESSES[0])
    content["settings"]["keys"] = {"insecure": True}
    del content["key"]
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(content))
    state = tmp_path / "state"
    state.mkdir(mode=0o700)
    names: dict[str, tuple[str, ProcessRole]] = {
        "prefill-0": ("prefill", "prefill"),
        "decode-0": ("decode", "decode"),
    }
    write_deployment(state, Deployment("small", "kubernetes", "cluster.yaml", ()))
    (state / APPLIED).write_bytes(msgspec.json.encode(Applied("small", "base", names)))
    pods = [{"metadata": {"name": name}, "status": {"podIP": ADDRESSES[0]}} for name in names]
    (tmp_path / "pods.json").write_text(json.dumps({"items": pods}))
    (tmp_path / "kubectl").write_text(KUBECTL.format(folder=tmp_path))
    (tmp_path / "kubectl").chmod(0o755)
    path = f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        [sys.executable, "-m", "baton", "doctor", str(tmp_path / "cluster.yaml"),
         "--state", str(state)],
        capture_output=True, text=True, check=False, env={**os.environ, "PATH": path},
        timeout=TIMEOUT_S,
    )  # fmt: skip
    faults = re.findall(r"fault +(.*)", done.stdout)
    # The names of services mean nothing here, and everything else is well.
    assert len(faults) == 2, done.stdout + done.stderr
    assert all("no answer from router-0:" in fault for fault in faults)
    assert re.search(r"paths:\n  ok       decode-0 reads prefill-0  .* by shm", done.stdout)


@pytest.mark.parametrize("words", [["-m", "baton", "router"], ["-m", "baton.deploy.model_folder"]])
def test_the_first_process_of_a_container_ends_while_it_fetches_a_model(words: list[str]) -> None:
    """The kernel drops SIGTERM to it unless it has a handler."""
    if shutil.which("unshare") is None or os.geteuid() != 0:
        pytest.skip("a container's process ids need root and util-linux' `unshare`")
    with socket.create_server(("127.0.0.1", 0)) as hub:  # it takes requests and never answers
        hub.settimeout(TIMEOUT_S)
        endpoint = f"http://127.0.0.1:{hub.getsockname()[1]}"
        env = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": "0", "HF_HOME": "/nowhere"}
        outer = subprocess.Popen(
            ["unshare", "--pid", "--fork", "--kill-child", sys.executable, *words, "some/model"],
            env=env, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            asked, _ = hub.accept()
            (inner,) = psutil.Process(outer.pid).children()
            inner.terminate()
            assert outer.wait(TIMEOUT_S) == EXIT_TERMINATED
            asked.close()
        finally:
            outer.kill()
            outer.wait()
