"""Arrows point down: which room may import which, and which package each may use."""

from collections.abc import Callable
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.support.sources import (
    FRONT_DOOR,
    REPOSITORY,
    ROOMS,
    imports,
    is_stdlib,
    module_of,
    name_of,
    sources,
)

# Room -> rooms that it may import besides itself.
BELOW = {
    "protocol": (),
    "runtime": ("protocol",),
    "kernels": (),
    "kv_transfer": ("protocol", "runtime"),
    "engine": ("protocol", "runtime", "kernels", "kv_transfer"),
    "prefill_node": ("protocol", "runtime", "engine", "kv_transfer"),
    "decode_node": ("protocol", "runtime", "engine", "kv_transfer"),
    "router": ("protocol", "runtime"),
    "bench": ("protocol", "runtime"),
    "deploy": (
        "protocol", "runtime", "kv_transfer", "engine", "prefill_node", "decode_node", "router",
    ),
}  # fmt: skip
PACKAGES = {
    "protocol": "msgspec",
    "runtime": "msgspec prometheus_client psutil yaml zmq",
    "kernels": "torch triton numba llvmlite numpy",
    "kv_transfer": "msgspec numpy",
    "engine": "aiohttp llguidance msgspec zmq numpy torch safetensors transformers",
    "prefill_node": "msgspec",
    "decode_node": "msgspec",
    "router": "aiohttp jinja2 llguidance msgspec opentelemetry tokenizers zmq",
    "bench": "httptools jinja2 msgspec numpy psutil rich",
    "deploy": "huggingface_hub jinja2 msgspec psutil ray rich yaml zmq",
    FRONT_DOOR: "msgspec rich shtab",
}
# Ways from data to code.
UNSAFE_MODULES = {"pickle", "dill", "cloudpickle", "shelve", "marshal"}
# The rooms above see the transfer through its interfaces. These files put the parts together.
WIRING = {
    "engine/process/loop.py": {"connector"},
    "engine/process/node.py": {"connector", "transports.addresses"},
    "engine/compute/rank.py": {"agent", "pools"},
    "engine/compute/kv_cache.py": {"pools"},
    "engine/compute/peer_memory.py": {"pools"},
}
NIXL_BINDING = "kv_transfer/transports/nixl_binding.py"
TRANSFORMERS_BINDING = {
    "engine/compute/transformers_decoder.py",
    "engine/compute/transformers_gate.py",
}
RAY_BINDING = "deploy/cluster/ray.py"


def importers(*rooms: str, of: Callable[[Path, str], bool]) -> dict[str, str]:
    """The files of these rooms, or of all, that import such a module, with its name."""
    every = [(path, name) for path in sources(*rooms) for name in imports(path)]
    return {name_of(path): name for path, name in every if of(path, name)}


def package(module: str) -> str:
    return module.partition(".")[0]


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_rooms_below_it(room):
    allowed = {room, *BELOW[room]}
    assert not importers(
        room, of=lambda _, name: name.startswith("baton.") and name.split(".")[1] not in allowed
    )


def test_no_files_import_one_another_in_a_circle():
    """Imports inside functions and for type checkers count, since a reader follows them too."""
    graph: dict[str, set[str]] = {}
    for path in (*sources(), *sources("tools")):
        graph[module_of(path)] = imports(path)
    order = TopologicalSorter(graph)
    order.prepare()  # raises CycleError, which names the circle


@pytest.mark.parametrize("room", PACKAGES)
def test_a_room_uses_only_its_packages(room):
    """In particular none of the workshop, `tools/`, which is not in the wheel."""
    allowed = {"baton", *PACKAGES[room].split()}
    assert not importers(
        room, of=lambda _, name: not is_stdlib(name) and package(name) not in allowed
    )


def test_the_transfer_is_seen_through_its_interfaces():
    def goes_inside(path: Path, module: str) -> bool:
        inside = module.removeprefix("baton.kv_transfer").removeprefix(".")
        return inside not in {module, "interfaces", *WIRING.get(name_of(path), ())}

    assert not importers("engine", "prefill_node", "decode_node", of=goes_inside)


def test_no_file_unpickles_what_it_reads():
    for rooms in ((), ("tools", "tests")):
        assert not importers(*rooms, of=lambda _, name: package(name) in UNSAFE_MODULES)


def test_the_optional_nixl_is_named_in_one_file():
    users = [name_of(path) for path in sources() if "nixl_cu" in path.read_text()]
    assert users == [NIXL_BINDING]


def test_the_optional_ray_is_imported_in_one_file():
    assert importers(of=lambda _, name: package(name) == "ray").keys() == {RAY_BINDING}


def test_transformers_is_imported_only_where_its_models_are_computed():
    users = importers(of=lambda _, name: package(name) == "transformers")
    assert users.keys() == TRANSFORMERS_BINDING
    users = importers(of=lambda _, name: name.startswith("baton.engine.compute.transformers_"))
    assert users.keys() - TRANSFORMERS_BINDING == {
        "engine/compute/kv_cache.py", "engine/compute/rank.py", "deploy/model_folder.py",
    }  # fmt: skip


def test_every_room_is_linked_into_the_package():
    for room in ROOMS:
        if (REPOSITORY / room).is_dir():
            link = REPOSITORY / FRONT_DOOR / room
            assert link.is_symlink(), f"{room} has no link"
            assert link.readlink() == Path("../../") / room
    # With one it would shadow the Hugging Face package of that name.
    assert not (REPOSITORY / "kernels" / "__init__.py").exists()
