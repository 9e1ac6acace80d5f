"""Which GPU a node of this host takes."""

from pathlib import Path

import pytest

from baton.runtime.gpus import gpus_of, nodes_on_gpu, num_gpus


def devices(folder: Path, count: int) -> Path:
    for name in ("null", "nvidiactl", "nvidia-uvm", *(f"nvidia{index}" for index in range(count))):
        (folder / name).touch()
    return folder


@pytest.mark.parametrize("count", [0, 1, 3])
def test_gpus_are_counted_by_their_device_files(tmp_path: Path, count: int) -> None:
    assert num_gpus(devices(tmp_path, count)) == count


def test_nodes_take_the_gpus_in_turn_and_see_the_others_too(tmp_path: Path) -> None:
    three = devices(tmp_path, 3)
    seen = [gpus_of(number, three, {}) for number in range(4)]
    assert seen == [("0", "1", "2"), ("1", "2", "0"), ("2", "0", "1"), ("0", "1", "2")]
    assert [nodes_on_gpu(number, 4, 3) for number in range(4)] == [2, 1, 1, 2]
    assert [nodes_on_gpu(number, 3, 4, gpus_each=2) for number in range(3)] == [2, 1, 2]
    assert [nodes_on_gpu(number, 2, 8, gpus_each=4) for number in range(2)] == [1, 1]


def test_what_the_environment_leaves_is_shared_out(tmp_path: Path) -> None:
    eight = devices(tmp_path, 8)
    visible = {"CUDA_VISIBLE_DEVICES": "5, GPU-1f"}
    assert [gpus_of(number, eight, visible) for number in range(2)] == [
        ("5", "GPU-1f"),
        ("GPU-1f", "5"),
    ]
    assert gpus_of(0, eight, {"CUDA_VISIBLE_DEVICES": ""}) == ()
