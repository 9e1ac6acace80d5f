"""Router, schedulers, transfer machines and command line work without loading torch."""

import subprocess
import sys

import pytest

from tests.support.module_process import said_by
from tests.support.sources import REPOSITORY, ROOMS, imports, name_of, sources

# Far more than it takes on a machine that others use.
pytestmark = pytest.mark.timeout(300)
# Tests that put these parts to work; each group runs in a process of its own.
USES = {
    "schedulers": (
        "tests/unit/node/test_block_pool.py",
        "tests/unit/node/test_schedulers.py",
    ),
    "transfer": (
        "tests/unit/transfer/test_handoff.py",
        "tests/unit/transfer/test_pools.py",
    ),
    "router": (
        "tests/contract/test_router_core.py",
        "tests/contract/test_router_nodes.py",
    ),
}
HOST_ONLY_ROOMS = (
    "protocol",
    "runtime",
    "kv_transfer",
    "node",
    "model/config",
    "model/checkpoint",
    "prefill_node",
    "decode_node",
    "router",
    "deploy",
)


@pytest.mark.release
@pytest.mark.parametrize("group", USES)
def test_a_host_only_part_does_its_work_without_torch(group):
    plugin = ("-p", "tests.support.without_torch", "-p", "no:cacheprovider")
    lines = said_by(
        "pytest", "-q", *plugin, "-m", "not slow and not release", *USES[group]
    )
    assert any(" passed" in line for line in lines)


def test_every_file_of_a_host_only_room_is_imported_without_torch():
    files = [name_of(path) for path in sources(*HOST_ONLY_ROOMS)]
    modules = [file.removesuffix(".py").removesuffix("/__init__") for file in files]
    run_without_torch(
        "\n".join(f"import baton.{module.replace('/', '.')}" for module in modules)
    )


def test_the_package_and_the_command_line_do_not_load_torch():
    run_without_torch(
        "import baton, baton.__main__\n"
        "from baton import LLM, AsyncLLM, SamplingParams\n"
        "assert baton.__main__.main(['--version']) == 0\n"
        "assert baton.__main__.main(['decode', '--nonsense']) == 2\n"
    )


def test_only_computing_files_import_torch():
    rooms = {
        name_of(path).partition("/")[0]
        for path in sources(*ROOMS)
        if {"torch", "triton"} & {module.partition(".")[0] for module in imports(path)}
    }
    assert rooms <= {"model", "kernels", "bench"}


def run_without_torch(code: str) -> None:
    check = "\nimport sys\nassert 'torch' not in sys.modules, 'torch was loaded'\n"
    done = subprocess.run(
        [sys.executable, "-c", code + check],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
