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
from tools import house

# Room -> rooms that it may import besides itself.
BELOW = {
    "protocol": (),
    "runtime": ("protocol",),
    "kernels": ("runtime",),
    "kv_transfer": ("protocol", "runtime"),
    "node": ("protocol", "runtime", "kv_transfer"),
    "model": ("protocol", "runtime", "kernels", "kv_transfer", "node"),
    "prefill_node": ("protocol", "runtime", "node", "kv_transfer"),
    "decode_node": ("protocol", "runtime", "node", "kv_transfer"),
    "router": ("protocol", "runtime"),
    "bench": ("protocol", "runtime"),
    "deploy": (
        "protocol",
        "runtime",
        "kv_transfer",
        "model",
        "prefill_node",
        "decode_node",
        "router",
    ),
}
PACKAGES = {
    "protocol": "msgspec",
    "runtime": "msgspec prometheus_client psutil yaml zmq",
    "kernels": "msgspec torch triton numba llvmlite numpy cuda",
    "kv_transfer": "msgspec numpy",
    "node": "aiohttp msgspec zmq",
    "model": "llguidance msgspec numpy torch safetensors transformers",
    "prefill_node": "msgspec",
    "decode_node": "msgspec",
    "router": "aiohttp jinja2 llguidance msgspec opentelemetry tokenizers zmq",
    "bench": "httptools jinja2 msgspec numpy psutil rich",
    "deploy": "huggingface_hub jinja2 msgspec psutil ray rich yaml zmq",
    FRONT_DOOR: "msgspec rich shtab",
}
# Walls within a room: a folder -> what else of its room it may import. Folders that are not here,
# and files beside the folders of a room, may import all of their room.
WITHIN = {
    "node/scheduling": (),
    "kernels/cpu": (
        "kernels/constants.py",
        "kernels/reference.py",
        "kernels/state_layout.py",
        "kernels/state_reference.py",
    ),
    "kernels/cuda": (
        "kernels/constants.py",
        "kernels/launch.py",
        "kernels/proofs.py",
        "kernels/reference.py",
        "kernels/state_layout.py",
        "kernels/state_reference.py",
    ),
    "kernels/hopper": (
        "kernels/constants.py",
        "kernels/launch.py",
        "kernels/reference.py",
        "kernels/proofs.py",
        "kernels/cuda",
    ),
    "model/families": (),
    "model/config": ("model/families",),
    "model/checkpoint": ("model/families", "model/config"),
    "model/layers": (
        "model/config",
        "model/tensor_parallel.py",
        "model/batch_invariance/row_rule.py",
    ),
    "model/batch_invariance": ("model/layers",),
    "model/loading": (
        "model/config",
        "model/checkpoint",
        "model/layers",
        "model/batch_invariance",
        "model/tensor_parallel.py",
    ),
    "model/transformers_code": (
        "model/config",
        "model/checkpoint",
        "model/layers",
        "model/batch_invariance",
        "model/loading",
        "model/tensor_parallel.py",
    ),
    "model/sampling": (),
    "model/runner": (
        "model/config",
        "model/checkpoint",
        "model/layers",
        "model/batch_invariance",
        "model/loading",
        "model/transformers_code",
        "model/sampling",
        "model/tensor_parallel.py",
    ),
    "router/text": ("router/outputs.py", "router/worker.py"),
    "router/core": ("router/outputs.py", "router/text/detokenizer.py"),
    "router/http/api": (
        "router/outputs.py",
        "router/text_router.py",
        "router/text",
        "router/core",
        "router/worker.py",
        "router/http/errors.py",
        "router/http/connections.py",
        "router/http/metrics.py",
    ),
}
# Only the process of a router joins its HTTP side to the rest.
HTTP_USERS = {"router/main.py"}
# Ways from data to code.
UNSAFE_MODULES = {"pickle", "dill", "cloudpickle", "shelve", "marshal"}
# The rooms above see the transfer through its interfaces. These files put the parts together.
WIRING = {
    "node/loop.py": {"connector"},
    "node/node.py": {"connector", "stores", "transports"},
    "model/runner/rank.py": {"agent", "pools", "tiers"},
    "model/runner/kv_cache.py": {"pools"},
    "model/runner/peer_memory.py": {"pools"},
}
NIXL_BINDING = "kv_transfer/transports/nixl_binding.py"
TRANSFORMERS_BINDING = {
    "model/transformers_code/transformers_decoder.py",
    "model/transformers_code/transformers_gate.py",
}
RAY_BINDING = "deploy/cluster/platforms/ray.py"


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
        room,
        of=lambda _, name: (
            name.startswith("baton.") and name.split(".")[1] not in allowed
        ),
    )


@pytest.mark.parametrize("folder", WITHIN)
def test_a_folder_of_a_room_imports_only_what_its_wall_lets_through(folder):
    room = folder.partition("/")[0]

    def crosses(_: Path, module: str) -> bool:
        name = f"{module.removeprefix('baton.').replace('.', '/')}.py"
        return name.startswith(f"{room}/") and not name.startswith(
            (folder, *WITHIN[folder])
        )

    assert not importers(folder, of=crosses)


def test_nothing_of_a_router_but_its_process_sees_http():
    users = importers("router", of=lambda _, name: name.startswith("baton.router.http"))
    assert {name for name in users if not name.startswith("router/http/")} == HTTP_USERS


def test_no_source_folder_has_more_than_fifteen_files():
    assert not house.crowded_folders(REPOSITORY)


def test_the_lists_of_the_house_name_what_is_there():
    assert not [
        item
        for count in house.read_counts().values()
        for item in house.missing_items(count)
    ]


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

    assert not importers("node", "model", "prefill_node", "decode_node", of=goes_inside)


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
    users = importers(
        of=lambda _, name: name.startswith("baton.model.transformers_code.")
    )
    assert users.keys() - TRANSFORMERS_BINDING == {
        "model/runner/rank.py",
        "model/runner/rank_plan.py",
    }


def test_every_room_is_linked_into_the_package():
    for room in ROOMS:
        if (REPOSITORY / room).is_dir():
            link = REPOSITORY / FRONT_DOOR / room
            assert link.is_symlink(), f"{room} has no link"
            assert link.readlink() == Path("../../") / room
    # With one it would shadow the Hugging Face package of that name.
    assert not (REPOSITORY / "kernels" / "__init__.py").exists()
