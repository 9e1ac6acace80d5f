"""A real Slurm cluster of three nodes on this machine: munged, slurmctld and three slurmd."""

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from tests.support.cluster import free_port
from tests.support.waiting import TIMEOUT_S, until

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scancel", "scontrol")
NODES = ("n1", "n2", "n3")
CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
CredType=cred/munge
StateSaveLocation={folder}/saved
SlurmdSpoolDir={folder}/spool_%n
SlurmdPidFile={folder}/slurmd_%n.pid
SlurmctldPidFile={folder}/slurmctld.pid
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=bf_interval=1
ReturnToService=2
PartitionName=main Nodes={nodes} Default=YES MaxTime=INFINITE State=UP
"""


@contextlib.contextmanager
def slurm(folder: Path) -> Iterator[Mapping[str, str]]:
    """Run the cluster and yield the variables that its commands need; skip where it cannot run."""
    path = f"{os.environ['PATH']}:/usr/sbin"
    missing = [name for name in PROGRAMS if shutil.which(name, path=path) is None]
    if missing or os.geteuid() != 0:
        pytest.skip(f"needs root and the packages of Slurm and munge; missing: {missing}")
    folder.mkdir()
    munge = folder / "munge"
    munge.mkdir(mode=0o700)
    (munge / "key").write_bytes(secrets.token_bytes(1024))
    (munge / "key").chmod(0o400)
    (folder / "saved").mkdir()
    configuration = folder / "slurm.conf"
    configuration.write_text(_configuration(folder))
    env = {**os.environ, "PATH": path, "SLURM_CONF": str(configuration)}
    files = [f"--{name}-file={munge / name}" for name in ("key", "pid", "log", "seed")]
    words = [["munged", "--foreground", "--force", f"--socket={folder}/munge.sock", *files]]
    words += [["slurmctld", "-D", "-c"], *(["slurmd", "-D", "-N", name] for name in NODES)]
    with contextlib.ExitStack() as stack:
        for one in words:
            stack.enter_context(_running(one, folder / f"{one[0]}_{one[-1][-2:]}.log", env))
            if one[0] == "munged":
                until((folder / "munge.sock").exists, lambda: "munged has no socket")
        until(lambda: _num_idle(env) == len(NODES), lambda: _said(folder))
        yield {"SLURM_CONF": str(configuration)}


@contextlib.contextmanager
def _running(words: Sequence[str], log: Path, env: Mapping[str, str]) -> Iterator[None]:
    with log.open("wb") as file:
        process = subprocess.Popen(words, stdout=file, stderr=file, env=env)
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(TIMEOUT_S)


def _configuration(folder: Path) -> str:
    host = socket.gethostname()
    text = CONFIGURATION.format(host=host, port=free_port(), folder=folder, nodes=",".join(NODES))
    for name in NODES:
        text += (
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={free_port()} CPUs=2 "
            "RealMemory=4000 State=UNKNOWN\n"
        )
    return text


def _num_idle(env: Mapping[str, str]) -> int:
    words = ["sinfo", "--noheader", "--Node", "--format=%T"]
    done = subprocess.run(words, capture_output=True, text=True, env=env, check=False)
    return done.stdout.split().count("idle")


def _said(folder: Path) -> str:
    return "\n".join(path.read_text()[-2000:] for path in folder.glob("*.log"))
