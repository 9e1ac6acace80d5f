"""What a configuration means for a rank: where it computes, its pool, and what it refuses."""

import dataclasses
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
import yaml
from triton.runtime.errors import OutOfResources, PTXASError

from baton.kernels.cuda import fixed_product
from baton.kernels.hopper.narrow.product import streamed_experts
from baton.kernels.hopper.products import product
from baton.kernels.proofs import NARROW, NARROW_EXPERTS, PRODUCTS
from baton.kernels.reference import NarrowWeight
from baton.model.config.decoder_config import DecoderConfig
from baton.model.executors.worker_executor import environment_of
from baton.model.layers.linear import Linear
from baton.model.layers.mlp import DenseMlp
from baton.model.runner import cuda_start, device_kernels, rank_plan
from baton.model.runner.compute_digest import compute_path, is_batch_invariant
from baton.model.runner.cuda_start import GpuMemory
from baton.model.runner.device_kernels import DeviceKernels
from baton.model.runner.packing import ALL_DECODE_ROWS, ModelFacts, Packer
from baton.model.runner.rank import draft_cost
from baton.model.runner.rank_plan import plan_rank
from baton.model.runner.step_queue import StepWork
from baton.node.scheduling.plan import DraftCost, StepPlan, StepResult
from baton.protocol.config import CacheConfig, ClusterConfig, ModelConfig
from baton.protocol.errors import ConfigError, NodeError
from baton.router.core.registry import differences
from baton.runtime.fields import with_values
from baton.runtime.host import gpus_of
from baton.runtime.local_cluster import LocalCluster
from tests.support.checkpoints import model_folder
from tests.support.compute import compute_config, loaded
from tests.support.draft_heads import nextn_folder
from tests.support.foreign_checkpoints import foreign_folder
from tests.support.graph_stand_in import (
    BLOCK_SIZE,
    MAX_LEN,
    RecordingQueue,
    stand_in,
)
from tests.support.scripted_nodes import node_info

Execute = Callable[[StepPlan], StepResult]


def config_for(device: str, **model: int) -> ClusterConfig:
    config = compute_config(model_folder("qwen3", num_layers=1, **model))
    engine = msgspec.structs.replace(config.engine, device=device)
    return msgspec.structs.replace(config, engine=engine, cache=CacheConfig())


@pytest.fixture
def with_gpu(monkeypatch):
    """Make this machine look as if it had one GPU that works."""
    monkeypatch.setattr(rank_plan, "num_gpus", lambda: 1)
    monkeypatch.setattr(rank_plan, "why_no_gpu", lambda: "")
    monkeypatch.setattr(rank_plan, "gpus_of", lambda _number: ("0",))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))


@pytest.mark.usefixtures("with_gpu")
def test_a_gpu_takes_longer_steps_and_its_pool_is_sized_later():
    plan = plan_rank(config_for("auto"), 1)
    assert plan.device == torch.device("cuda", 0)
    assert (plan.max_num_batched_tokens, plan.max_num_seqs, plan.num_blocks) == (
        2048,
        256,
        0,
    )
    on_cpu = plan_rank(config_for("cpu"), 1)
    assert (on_cpu.max_num_batched_tokens, on_cpu.max_num_seqs) == (512, 64)


@pytest.mark.usefixtures("with_gpu")
@pytest.mark.parametrize("capability", [(9, 0), (8, 0)])
def test_a_rank_takes_the_products_that_are_proven(capability, monkeypatch):
    def loaded_for(device: torch.device) -> str:
        return f"products on {device}"

    monkeypatch.setattr(product, "load_product", loaded_for)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    fixed_product.has_warpgroup_products.cache_clear()
    plan = plan_rank(config_for("auto"), 1)
    proven = DeviceKernels(frozenset({PRODUCTS}), is_ordered=True)
    ordered = device_kernels.product_of(plan, proven)
    assert ordered == "products on cuda:0"
    unproven = DeviceKernels(is_ordered=True, unproven=(PRODUCTS,))
    assert device_kernels.product_of(plan, unproven) is fixed_product.fixed_product
    assert device_kernels.product_of(plan, DeviceKernels(frozenset({PRODUCTS}))) is None
    # There Triton's product has the bits of the proven ones, and no library comes between them.
    is_hopper = capability == (9, 0)
    library = None if is_hopper else torch.nn.functional.linear
    assert device_kernels.library_of(plan) is library
    fixed_product.has_warpgroup_products.cache_clear()


@pytest.mark.usefixtures("with_gpu")
def test_weights_are_streamed_where_that_is_proven_and_widened_where_they_do_not_fit():
    plan = dataclasses.replace(plan_rank(config_for("auto"), 1), dtype=torch.bfloat16)
    codes = torch.zeros(128, 256, dtype=torch.uint8)
    weights = [
        NarrowWeight(codes, scale * torch.ones(128, 2), torch.ones(128, 2).int(), 128)
        for scale in (1.0, 1 + 2**-20)
    ]
    for proven, trials in (
        (frozenset({NARROW}), [b"streamed", b"narrow"]),
        (frozenset(), [b"narrow", b"narrow"]),
    ):
        pack = device_kernels.packing_of(plan, DeviceKernels(proven))
        assert pack is not None
        products = [pack(weight, torch.device("cpu"))[1] for weight in weights]
        assert [product.trial for product in products] == trials
    proven = DeviceKernels(frozenset({NARROW_EXPERTS}))
    assert device_kernels.experts_packing_of(plan, proven) is streamed_experts
    assert (
        device_kernels.experts_packing_of(plan, DeviceKernels(frozenset({NARROW})))
        is None
    )


@pytest.mark.usefixtures("with_gpu")
@pytest.mark.parametrize(
    ("num_ranks", "model", "reason"),
    [
        (2, {}, "2 ranks .* this node sees 1"),
        (1, {"head_dim": 48, "num_heads": 2}, "heads of 48"),
        (
            1,
            {"num_heads": 33, "num_kv_heads": 1, "head_dim": 32},
            "33 query heads share a KV head",
        ),
    ],
)
def test_what_gpus_lack_runs_on_the_cpu_and_says_why(num_ranks, model, reason, caplog):
    assert plan_rank(config_for("auto", **model), num_ranks).device.type == "cpu"
    (said,) = caplog.records
    assert re.search(reason, said.fields["reason"])
    with pytest.raises(ConfigError, match=rf"engine\.device: .*{reason}"):
        plan_rank(config_for("cuda", **model), num_ranks)


@pytest.mark.usefixtures("with_gpu")
def test_gpus_compute_latent_attention_for_rows_that_fit_their_kernels():
    config = compute_config(
        foreign_folder("deepseek_v3", num_attention_heads=36, num_key_value_heads=36)
    )
    config = with_values(config, {"engine.device": "cuda"})
    assert plan_rank(config, 1).device.type == "cuda"
    for latent, rotated in ((640, 8), (32, 128)):
        fields = {"kv_lora_rank": latent, "qk_rope_head_dim": rotated}
        large = with_values(
            config, {"model.path": str(foreign_folder("deepseek_v3", **fields))}
        )
        with pytest.raises(
            ConfigError, match=f"latent rows of {latent} and {rotated} numbers have"
        ):
            plan_rank(large, 1)


@pytest.mark.usefixtures("with_gpu")
def test_gpus_choose_keys_by_indexes_that_fit_their_kernels():
    config = compute_config(
        foreign_folder("deepseek_v32", index_n_heads=64, index_head_dim=128)
    )
    config = with_values(config, {"engine.device": "cuda"})
    assert plan_rank(config, 1).device.type == "cuda"
    for fields in ({"index_n_heads": 65}, {"index_head_dim": 136}):
        large = with_values(
            config, {"model.path": str(foreign_folder("deepseek_v32", **fields))}
        )
        with pytest.raises(ConfigError, match=r"engine\.device"):
            plan_rank(large, 1)


@pytest.mark.usefixtures("with_gpu")
@pytest.mark.parametrize(
    ("kind", "fields"),
    [("deepseek_v3", {}), ("deepseek_v32", {}), ("glm4_moe", {"head_dim": 32})],
)
def test_gpus_draft_with_layers_that_fit_their_kernels(kind, fields):
    values = {"engine.device": "cuda", "engine.num_speculative_tokens": 2}
    values["engine.speculative_method"] = "mtp"
    config = with_values(compute_config(nextn_folder(kind, **fields)), values)
    plan = plan_rank(config, 1)
    assert plan.device.type == "cuda"
    assert isinstance(plan.decoder, DecoderConfig)
    assert plan.decoder.has_draft_head


@pytest.mark.usefixtures("with_gpu")
def test_a_gpu_without_bf16_products_is_refused_by_its_capability(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (7, 5))
    with pytest.raises(ConfigError, match=r"capability 7\.5; CUDA kernels need 8\.0"):
        plan_rank(config_for("cuda"), 1)


@pytest.mark.usefixtures("with_gpu")
def test_each_rank_has_a_gpu_of_its_own_which_is_the_first_that_its_process_sees(
    monkeypatch,
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    monkeypatch.setattr(rank_plan, "gpus_of", gpus_of)
    config = config_for("cuda")
    plan = plan_rank(config, 2)
    assert (plan.device, plan.num_blocks) == (torch.device("cuda", 0), 0)
    seen = [
        dict(environment_of(one, config.engine, is_on_gpus=True)) for one in range(2)
    ]
    assert [one["CUDA_VISIBLE_DEVICES"] for one in seen] == ["4,6", "6,4"]
    assert len(environment_of(1, config.engine, is_on_gpus=False)) == 1


@pytest.mark.parametrize(
    ("cuda", "in_dev", "error", "line"),
    [
        (None, 1, "", "this torch is built without CUDA: install a build with it"),
        (
            "13.0",
            0,
            "Found no NVIDIA driver on your system.",
            "install the driver, or use",
        ),
        (
            "13.0",
            1,
            "CUDA driver initialization failed",
            "check it and its driver with nvidia-smi",
        ),
        ("13.0", 1, "", "CUDA_VISIBLE_DEVICES leaves no GPU"),
    ],
)
def test_a_host_without_a_gpu_that_works_is_one_line(
    cuda, in_dev, error, line, monkeypatch, caplog
):
    def init() -> None:
        if error:
            raise RuntimeError(f"{error}\nMore")

    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "init", init)
    for module in (rank_plan, cuda_start):
        monkeypatch.setattr(module, "num_gpus", lambda: in_dev)
    with pytest.raises(ConfigError, match=rf"engine\.device: .*{line}") as raised:
        plan_rank(config_for("cuda"), 1)
    assert "\n" not in raised.value.message
    monkeypatch.setattr(rank_plan, "gpus_of", lambda _number: ("0",) if error else ())
    if in_dev and error:  # it does not work, and nobody has hidden it
        with pytest.raises(
            ConfigError, match=rf"engine\.device: .*{line}.*; --device cpu"
        ):
            plan_rank(config_for("auto"), 1)
        return
    assert plan_rank(config_for("auto"), 1).device.type == "cpu"
    assert [line in record.fields["reason"] for record in caplog.records] == [
        True
    ] * in_dev


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_a_pool_takes_nine_tenths_of_what_the_largest_steps_leave(
    num_drafts, monkeypatch
):
    """They need their memory twice: captured steps keep some of their own."""
    gib = 1 << 30
    ran = []
    for name, answer in {
        "empty_cache": None,
        "memory_allocated": 16 * gib,
        "reset_peak_memory_stats": None,
        "max_memory_allocated": 18 * gib,
        "mem_get_info": (60 * gib, 80 * gib),
        "memory_reserved": 16 * gib,
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    probe = stand_in(1, RecordingQueue(), num_drafts=num_drafts)

    def execute(plan: StepPlan, execute: Execute = probe.execute) -> None:
        result = execute(plan)
        num_tokens = sum(part.length for part in plan.slices)
        num_drafted = sum(len(drafts) for _, drafts in result.drafts)
        ran.append((num_tokens, len(result.tokens), num_drafted))

    monkeypatch.setattr(probe, "execute", execute)
    config = with_values(ClusterConfig(), {"engine.num_speculative_tokens": num_drafts})
    steps = (probe, 24, 6, MAX_LEN, config)
    assert cuda_start.free_for_pool(*steps) == int(0.9 * (60 - 2 * 2) * gib)
    largest = [(24, 1, 0), (6, 6, 0)]  # a chunk, and as many sequences as a step takes
    if num_drafts:
        largest.append((24, 6, 18))
    assert ran == largest
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (3 * gib, 80 * gib))
    assert cuda_start.free_for_pool(*steps) == 0


def test_a_pool_leaves_room_for_guesses_beside_as_many_sequences_as_decode(monkeypatch):
    """The workspace of decode attention grows with them, more than with guesses."""
    for name in ("empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved"):
        monkeypatch.setattr(torch.cuda, name, lambda _: 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1, 1))
    probe = stand_in(1, RecordingQueue())
    decoding: list[tuple[int, int]] = []

    def execute(plan: StepPlan) -> None:
        facts = ModelFacts(BLOCK_SIZE, ())
        packer = Packer(facts, None, lambda size: torch.empty(size, dtype=torch.int64))
        step = packer.pack(plan)
        decoding.append((step.num_decoding, step.num_more_rows))

    monkeypatch.setattr(probe, "execute", execute)
    config = with_values(ClusterConfig(), {"engine.num_speculative_tokens": 4})
    cuda_start.free_for_pool(probe, 2048, 256, MAX_LEN, config)
    assert (256, 0) in decoding
    assert (256, ALL_DECODE_ROWS - 256) in decoding
    decoding.clear()
    cuda_start.free_for_pool(probe, 2048, 1000, MAX_LEN, config)
    assert (ALL_DECODE_ROWS - 4, 4) in decoding


@pytest.mark.parametrize("num_drafts", [0, 1, 3])
def test_a_draft_costs_what_a_step_with_drafts_takes_longer(num_drafts):
    now_s = 0.0

    class Timed(RecordingQueue):
        """A step takes two seconds, and a quarter for each sample and draft."""

        def launch(self, work: StepWork) -> None:
            nonlocal now_s
            super().launch(work)
            now_s += 2 + len(self._ids[-1]) / 4

    runner = stand_in(1, Timed(), num_drafts=num_drafts)
    runner._clock = lambda: now_s
    cost = draft_cost(runner, num_drafts, 64)
    for num_sequences in (1, 8):
        expected = 0.0
        if num_drafts:
            expected = num_sequences / 2 / (2 + num_sequences / 4)
        assert cost.of(num_sequences) == pytest.approx(expected)
    assert draft_cost(runner, num_drafts, 1) == DraftCost(cost.of(1))


MEMORY = GpuMemory(free=1 << 30, total=80 << 30, ours=9 << 30)


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
            "the GPU has no memory left while it loads the model: 1.0 of 80.0 GiB are free, this "
            "node has 9.0 and others have 70.0; end what else uses the GPU (nvidia-smi lists it), "
            "or lower cache.memory_mib",
        ),
        (
            RuntimeError(
                "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(h)"
            ),
            "the GPU has no memory left while it loads the model",
        ),
        (
            torch.AcceleratorError(
                "CUDA error: all CUDA-capable devices are busy or unavailable"
            ),
            "another program has exclusive use of the GPU",
        ),
        (
            subprocess.CalledProcessError(
                1, ["gcc"], "cuda_utils.c: fatal error: Python.h"
            ),
            "Triton compiles its launcher here: install a C compiler and Python's headers",
        ),
        (
            RuntimeError("Failed to find C compiler. Please specify via CC"),
            "Triton compiles its",
        ),
        (
            AssertionError("libcuda.so cannot found!\nPossible files"),
            "the driver's libcuda.so was",
        ),
        (
            FileNotFoundError(2, "No such file", "/sbin/ldconfig"),
            "the driver's libcuda.so was not",
        ),
        (
            OutOfResources(139_264, 101_376, "shared memory"),
            "a kernel needs more shared memory",
        ),
        (
            PTXASError("PTXAS error: sm_999 is unknown"),
            "Triton's assembler does not know this GPU",
        ),
        (
            torch.AcceleratorError(
                "CUDA error: no kernel image is available\nMore lines"
            ),
            "this torch has no code for this GPU",
        ),
        (
            torch.AcceleratorError(
                "CUDA error: an illegal memory access\nCUDA kernel errors"
            ),
            "the GPU failed while it loads the model: CUDA error: an illegal memory access; see",
        ),
    ],
)
def test_what_a_gpu_says_at_the_start_is_one_line_that_says_what_to_do(
    monkeypatch, error, line
):
    monkeypatch.setattr(cuda_start, "memory_of", lambda _device: MEMORY)
    with (
        pytest.raises(NodeError) as raised,
        cuda_start.one_line_errors(torch.device("cuda", 0), "while it loads the model"),
    ):
        raise error
    assert raised.value.message.startswith(line)
    assert "\n" not in raised.value.message


def test_a_node_whose_gpu_cannot_be_used_shares_the_memory_of_its_host(
    monkeypatch, caplog
):
    """Two nodes with a GPU each that both compute on the CPU must not take its memory twice."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    caplog.set_level("INFO")
    config = ClusterConfig(prefill=1, decode=2)
    caches = []
    nodes = LocalCluster(config, "ipc://unused")
    for command in nodes.commands:
        cache = yaml.safe_load(Path(command.args[-1]).read_text())["cache"]
        caches.append((cache["shared_by"], cache.get("gpu_shared_by", 1)))
    nodes.stop()
    assert caches == [(3, 2), (3, 1), (3, 2)]
    said = [
        record.fields
        for record in caplog.records
        if "shares its GPU" in record.getMessage()
    ]
    assert said == [
        {"node": name, "gpu": "4", "nodes": 2} for name in ("prefill-0", "decode-1")
    ]


def test_a_pool_without_a_setting_takes_a_share_of_free_memory_and_no_more_than_is_of_use(
    monkeypatch,
):
    def blocks(available: int, shared_by: int = 1) -> int:
        monkeypatch.setattr(
            "baton.model.runner.kv_cache.available_bytes", lambda: available
        )
        config = config_for("cpu")
        cache = CacheConfig(shared_by=shared_by)
        return plan_rank(msgspec.structs.replace(config, cache=cache), 1).num_blocks

    block_bytes = plan_rank(config_for("cpu"), 1).layout.block_bytes
    assert blocks(400 * block_bytes) == 100
    assert blocks(400 * block_bytes, shared_by=2) == 50
    assert blocks(1 << 50) == 64 * 8192 // 16
    with pytest.raises(ConfigError, match=r"cache\.memory_mib"):
        blocks(2 * block_bytes)


def test_nodes_that_share_a_gpu_take_equal_parts_whichever_looks_first():
    total = 80 << 30
    weights = 8 << 30
    two = CacheConfig(gpu_shared_by=2)
    alone = CacheConfig()
    first = cuda_start.left_to_take(total - weights, total, weights, two)
    second = cuda_start.left_to_take(total - 2 * weights - first, total, weights, two)
    assert (first, second) == (total // 2 - weights - cuda_start.CONTEXT_BYTES,) * 2
    # Others use more.
    assert cuda_start.left_to_take(first // 4, total, weights, two) == first // 4
    assert (
        cuda_start.left_to_take(total - weights, total, weights, alone)
        == total - weights
    )


@pytest.fixture
def config():
    return compute_config(model_folder("qwen3", num_layers=2), num_blocks=32)


def test_a_node_says_how_it_computes(config):
    """Equal for equal loads, and another for other products; true only if all parts keep bits."""
    with loaded(config) as one, loaded(config) as again:
        linears_keep = all(
            linear.is_batch_invariant for linear in one.decoder.linears()
        )
        assert is_batch_invariant(one) == (
            linears_keep and one.backend.is_batch_invariant
        )
        assert compute_path(one) == compute_path(again)
        assert compute_path(one).startswith(f"{one.backend.name}-")
        layer = one.decoder.layers[1]
        gate_up, down = layer.mlp.linears()
        mlp = DenseMlp(gate_up, Linear(down.weight))
        unruled = dataclasses.replace(layer, mlp=mlp)
        one.decoder = dataclasses.replace(
            one.decoder, layers=(one.decoder.layers[0], unruled)
        )
        assert not is_batch_invariant(one)
    other = compute_config(
        model_folder("qwen3", num_layers=2), "bfloat16", num_blocks=32
    )
    with loaded(config) as one, loaded(other) as lower:
        assert compute_path(one) != compute_path(lower)


def test_blocks_come_from_memory_when_they_are_not_counted(config):
    config = msgspec.structs.replace(config, cache=CacheConfig(memory_mib=1))
    plan = plan_rank(config, 1)
    assert plan.num_blocks == (1 << 20) // plan.layout.block_bytes
    assert plan_rank(config, 2).num_blocks == plan.num_blocks


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": ModelConfig()}, "model.path"),
        ({"model": ModelConfig(path="/nowhere")}, "is not a folder"),
        ({"cache": CacheConfig(memory_mib=1, block_size=4096)}, "cache.memory_mib"),
    ],
)
def test_settings_that_cannot_work_are_refused(config, settings, message):
    with pytest.raises(ConfigError, match=message):
        plan_rank(msgspec.structs.replace(config, **settings), 1)


def test_nodes_with_fp8_blocks_and_without_refuse_each_other(config):
    engine = msgspec.structs.replace(config.engine, kv_cache_dtype="fp8")
    narrow = msgspec.structs.replace(config, engine=engine)
    with loaded(config) as plain, loaded(narrow) as other:
        assert compute_path(plain) != compute_path(other)
    layouts = [plan_rank(one, 1).layout for one in (narrow, config)]
    assert layouts[0].block_bytes * 4 * 32 == layouts[1].block_bytes * 33
    infos = [
        msgspec.structs.replace(node_info("p", "prefill"), layout=one)
        for one in layouts
    ]
    assert differences(*infos) == {
        "layout_mismatch": "its KV blocks have another layout "
        "(2 full-fp8 layers of 32, not 2 full layers of 32)"
    }


@pytest.mark.parametrize("kind", ["deepseek_v2", "olmo2"])
def test_latent_rows_and_transformers_code_have_no_fp8_blocks(kind):
    config = compute_config(foreign_folder(kind), kv_cache_dtype="fp8")
    with pytest.raises(ConfigError, match=r"engine\.kv_cache_dtype"):
        plan_rank(config, 1)
