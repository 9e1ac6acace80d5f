"""Which network devices a node opens to its peers."""

from pathlib import Path

import pytest

from baton.protocol.config import NodeConfig
from baton.runtime import network_devices
from baton.runtime.network_devices import devices_for

HERE = ("tcp://127.0.0.1:5570", "tcp://localhost:5570", "tcp://[::1]:5570")


@pytest.fixture
def rdma(tmp_path: Path) -> Path:
    for name, state in (("mlx5_0", "4: ACTIVE\n"), ("mlx5_1", "1: DOWN\n")):
        port = tmp_path / name / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(state)
    return tmp_path


@pytest.mark.parametrize("router", HERE)
@pytest.mark.parametrize("bind", ["tcp://127.0.0.1", "tcp://0.0.0.0"])
def test_a_cluster_on_one_host_opens_nothing(router: str, bind: str, rdma: Path) -> None:
    assert devices_for(NodeConfig(routers=(router,), bind=bind), rdma) == ""


def test_an_address_of_this_host_brings_its_interface_and_the_rdma_ports_that_are_up(
    rdma: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Loopback is the one interface that every machine has; here it plays one that others reach.
    monkeypatch.setattr(network_devices.Endpoint, "is_loopback", False)
    (rdma / "router").write_text("tcp://127.0.0.1:5570\n")
    node = NodeConfig(routers=("ipc:///tmp/control", f"file://{rdma}/router"))
    assert devices_for(node, rdma) == "mlx5_0:1,lo"
    assert devices_for(NodeConfig(bind="tcp://127.0.0.1"), rdma / "none") == "lo"
