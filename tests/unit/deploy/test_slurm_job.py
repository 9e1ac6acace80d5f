"""The batch script of a Slurm job, and what a task of it makes of its process."""

import subprocess
from pathlib import Path

import msgspec
import pytest
import yaml

from baton.deploy.cluster.processes import ClusterPlan, plan_of
from baton.deploy.cluster.reading import read_description
from baton.deploy.cluster.slurm import SlurmPlan, placed, places_of, render
from baton.protocol.errors import ConfigError
from baton.runtime.channels.keys import write_key
from tests.support.sources import REPOSITORY

TASK = {"ROUTERS_ADDRESS": "10.0.0.1", "HOST_ADDRESSES": "n1=10.0.0.1\nn2=10.0.0.2"}


def planned(folder: Path, **changes: object) -> ClusterPlan:
    """Return the plan of the example with GPUs, with other keys of the top level."""
    example = yaml.safe_load((REPOSITORY / "deploy/examples/tensor-parallel.yaml").read_text())
    (folder / "cluster.yaml").write_text(yaml.safe_dump({**example, **changes}, sort_keys=False))
    write_key(folder / "cluster.key")
    description = read_description(folder / "cluster.yaml")
    return plan_of(description, places_of(description))


def test_the_job_asks_for_what_the_pools_need(tmp_path: Path) -> None:
    options = {"partition": "gpus", "account": "lab", "time": "2-00", "arguments": ["--qos=high"]}
    plan = planned(tmp_path, slurm=options, settings={"router": {"api_keys": ["s3cret"]}})
    (tmp_path / "out").mkdir()
    files = render(plan, tmp_path / "out")
    assert [path.name for path in files] == ["job.sh", "plan.json", "key"]
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
    subprocess.run(["bash", "-n", str(files[0])], check=True)
    text = files[0].read_text()
    assert "s3cret" not in text
    own = "--requeue --partition=gpus --account=lab --time=2-00 --qos=high"
    routers, prefill, decode = (
        [line.removeprefix("#SBATCH ") for line in block.splitlines() if line.startswith("#SBATCH")]
        for block in text.split("#SBATCH hetjob\n")
    )
    assert routers[:1] + routers[2:5] == [
        "--job-name=baton-tensor-parallel", "--open-mode=append", "--signal=TERM@40", "--nodes=1",
    ]  # fmt: skip
    assert " ".join(prefill) == (
        f"--nodes=1 --ntasks=4 --ntasks-per-node=4 --mem=524288M --gres=gpu:8 {own}"
    )
    assert " ".join(decode) == (
        f"--nodes=1 --ntasks=8 --ntasks-per-node=8 --mem=524288M --gres=gpu:8 {own}"
    )


def test_tasks_of_one_host_differ_in_ports_and_gpus(tmp_path: Path) -> None:
    pools = {
        "first": {"role": "prefill", "gpus": 2},
        "decode": {
            "role": "decode", "replicas": 4, "gpus": 2, "peer_port": 6000, "http_port": 6100,
        },
    }  # fmt: skip
    (tmp_path / "out").mkdir()
    render(planned(tmp_path, pools=pools), tmp_path / "out")
    plan = msgspec.json.decode((tmp_path / "out/plan.json").read_bytes(), type=SlurmPlan)
    spec = next(one for one in plan.processes if one.name == "decode-3")
    task = {
        **TASK,
        "SLURMD_NODENAME": "n2",
        "SLURM_LOCALID": "1",
        "CUDA_VISIBLE_DEVICES": "4,5,6,7",
    }
    own = placed(spec, tmp_path, task)
    assert own.host == "n2"
    assert f"keys.file={tmp_path}/key" in own.argv
    assert own.env == {
        "BATON_NODE_ID": "decode-3",
        "BATON_NODE_ROUTERS": "tcp://10.0.0.1:5570,tcp://10.0.0.1:5571",
        "BATON_NODE_BIND": "tcp://10.0.0.2:6001",
        "BATON_NODE_HTTP": "10.0.0.2:6101",
        "CUDA_VISIBLE_DEVICES": "6,7",
    }
    bound = placed(spec, tmp_path, {**task, "CUDA_VISIBLE_DEVICES": "0,1"})
    assert bound.env["CUDA_VISIBLE_DEVICES"] == "0,1"
    with pytest.raises(ConfigError, match="decode-3 on n2: it needs 2 GPUs and Slurm gave it 1"):
        placed(spec, tmp_path, {**task, "CUDA_VISIBLE_DEVICES": "0"})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"node_selector": {"gpu": "h100"}}, "node_selector.gpu: features of Slurm have no value"),
        ({"resources": {"nic": "one"}}, "resources.nic: give the number"),
    ],
)
def test_what_slurm_cannot_grant_is_refused(
    changes: dict[str, object], said: str, tmp_path: Path
) -> None:
    pools = {"decode": {"role": "decode", **changes}, "prefill": {"role": "prefill"}}
    with pytest.raises(ConfigError, match=said):
        planned(tmp_path, pools=pools)
