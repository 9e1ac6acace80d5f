"""Choose the kernels of a rank on a GPU: the proven ones, and whether sums have one order.

With one order of sums, the bits of a token depend on its own sequence alone. By default that is so
where proven kernels give it at the price that docs/gpu.md states.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.kernels.hopper.products.cubin import compiler_name
from baton.kernels.proofs import (
    NARROW,
    NARROW_EXPERTS,
    ONE_ORDER,
    PRODUCTS,
    Candidate,
    LatentDims,
    ModelShapes,
    NarrowExperts,
    Proof,
    ProofRequest,
    possible,
)
from baton.kernels.reference import NarrowWeight
from baton.model.config.decoder_config import DecoderConfig
from baton.model.config.latent_config import LatentConfig
from baton.model.config.quantization import WeightFormat
from baton.model.config.transformers_config import TransformersConfig
from baton.model.layers.linear import Product
from baton.model.layers.mlp import GroupedProduct
from baton.model.loading.decoder_loading import local_heads
from baton.model.loading.layer_weights import NarrowLinear, PackExperts, PackNarrow
from baton.model.runner.compute_digest import gpu_bits, own_sources
from baton.model.runner.kernel_proofs import proofs_of
from baton.model.runner.rank_plan import RankPlan
from baton.model.tensor_parallel import Ranks, least
from baton.node.executor import Progress
from baton.protocol.config import ClusterConfig, Deterministic

# What the default needs. Latent attention sums in one order in any case.
ONE_ORDER_NEEDS = frozenset({PRODUCTS, ONE_ORDER})
LATENT_NEEDS = frozenset({PRODUCTS})


@dataclass(slots=True, frozen=True)
class DeviceKernels:
    """Which kernels a rank on a GPU uses. The default is what runs on every GPU."""

    proven: frozenset[str] = frozenset()
    is_ordered: bool = False  # a row's bits do not depend on the batch
    unproven: tuple[str, ...] = ()  # names of those that failed

    @property
    def features(self) -> tuple[str, ...]:
        """Return what a node shows of them."""
        failed = (f"unproven-{name}" for name in self.unproven)
        return (*sorted(self.proven), *failed)


UNPROVEN = DeviceKernels()


def choose_kernels(
    setting: Deterministic,
    shapes: ModelShapes,
    device: torch.device,
    ranks: Ranks,
    progress: Progress,
) -> DeviceKernels:
    """Prove what could compute the model. All ranks choose the same."""
    candidates = possible(shapes, torch.cuda.get_device_capability(device))
    proofs: tuple[Proof, ...] = ()
    if candidates:
        request = ProofRequest(shapes, str(device), candidates)
        environment = gpu_bits(device, has_own_products=False).decode()
        rests_on = own_sources(), environment, compiler_name()
        proofs = proofs_of(request, "\n".join(rests_on), progress)
    proven = agreed(proofs, candidates, device, ranks)
    return chosen(setting, proven, ranks.size, is_latent=shapes.is_latent)


def agreed(
    proofs: tuple[Proof, ...],
    candidates: tuple[Candidate, ...],
    device: torch.device,
    ranks: Ranks,
) -> dict[str, bool]:
    """Return of each candidate whether every rank has proven it."""
    problems = {proof.name: proof.problem for proof in proofs}
    return {
        candidate.name: bool(least(ranks, int(not problems[candidate.name]), device))
        for candidate in candidates
    }


def chosen(
    setting: Deterministic,
    proven: dict[str, bool],
    num_ranks: int,
    *,
    is_latent: bool = False,
) -> DeviceKernels:
    """Return the kernels where `proven` has what came of each candidate.

    Of several ranks, nobody has measured yet what one order costs.
    """
    names = frozenset(name for name, is_proven in proven.items() if is_proven)
    is_ordered = setting == "true"
    if setting == "auto":
        needs = LATENT_NEEDS if is_latent else ONE_ORDER_NEEDS
        is_ordered = num_ranks == 1 and names >= needs
    failed = tuple(name for name, is_proven in proven.items() if not is_proven)
    return DeviceKernels(names, is_ordered, failed)


def shapes_of(
    decoder: DecoderConfig,
    num_ranks: int,
    block_size: int,
    dtypes: tuple[torch.dtype, torch.dtype],
    max_model_len: int,
) -> ModelShapes:
    """Return what decides which kernels can compute a model. `dtypes`: of weights and pool."""
    num_heads, kv_heads = local_heads(decoder, num_ranks)
    hidden = decoder.hidden_size
    width = decoder.intermediate_size // num_ranks
    rows = (num_heads + 2 * kv_heads) * decoder.head_dim
    linears: tuple[tuple[int, int], ...] = (
        (rows, hidden),
        (hidden, num_heads * decoder.head_dim),
        (2 * width, hidden),
        (hidden, width),
        (decoder.vocab_size // num_ranks, hidden),
    )
    if (kinds := decoder.kinds) is not None:  # of the layers with wide heads
        rows = num_heads + 2 * kinds.kv_heads // num_ranks
        linears += (
            (rows * kinds.head_dim, hidden),
            (hidden, num_heads * kinds.head_dim),
        )
    windows = {decoder.window_of(layer) for layer in range(decoder.num_layers)}
    narrow, narrow_group = narrow_codes(decoder)
    dtype, pool_dtype = (str(one).removeprefix("torch.") for one in dtypes)
    return ModelShapes(
        linears=linears,
        num_heads=num_heads,
        kv_heads=kv_heads,
        head_dim=decoder.head_dim,
        block_size=block_size,
        dtype=dtype,
        pool_dtype=pool_dtype,
        scale=decoder.attention_scale,
        softcap=decoder.layers.score_cap or 0.0,
        windows=tuple(sorted(window for window in windows if window is not None)),
        has_sinks=decoder.layers.has_sinks,
        is_latent=decoder.latent is not None,
        latent=latent_dims(decoder.latent),
        narrow=narrow,
        narrow_group=narrow_group,
        narrow_experts=narrow_experts(decoder, num_ranks),
        max_model_len=max_model_len,
        state=None
        if decoder.state is None
        else decoder.state.shape(decoder.num_kv_heads, num_ranks),
        state_kind="" if decoder.state is None else decoder.state.names.kind,
    )


def latent_dims(latent: LatentConfig | None) -> LatentDims | None:
    """Return the sizes of latent attention to all keys; None with an index, which chooses some."""
    if latent is None or latent.index is not None:
        return None
    return LatentDims(
        latent.kv_lora_rank,
        latent.qk_nope_head_dim,
        latent.qk_rope_head_dim,
        latent.v_head_dim,
    )


def narrow_codes(decoder: DecoderConfig) -> tuple[str, int]:
    """Return what codes the layers may keep, and the inputs that share a scale; "" is none."""
    if decoder.quantization is None:
        return "", 0
    kinds = map(_codes_of, decoder.quantization.formats)
    return next((kind for kind in kinds if kind[0]), ("", 0))


def narrow_experts(decoder: DecoderConfig, num_ranks: int) -> NarrowExperts | None:
    """Return the experts of a rank whose codes may be kept; None if there are none."""
    experts = decoder.experts
    if experts is None or decoder.quantization is None:
        return None
    codes, group = narrow_codes(decoder)
    packings = [how.packing for how in decoder.quantization.formats]
    if any(packing is not None and packing.form == "mxfp4" for packing in packings):
        codes, group = "fp4", 32
    if not codes:
        return None
    hidden = experts.latent_size or decoder.hidden_size
    width = experts.moe_intermediate_size // num_ranks
    num_inner = width if decoder.layers.gate is None else 2 * width
    linears = (num_inner, hidden), (hidden, width)
    return NarrowExperts(experts.num_experts, linears, codes, group)


def _codes_of(how: WeightFormat) -> tuple[str, int]:
    packing = how.packing
    if packing is None:
        kind = {"F8_E4M3": "fp8", "I8": "int8"}.get(how.stored, "")
        return kind, how.block[1] if kind and how.block is not None else 0
    if packing.has_integers:
        kind = {4: "int4", 8: "int8"}.get(packing.bits, "")
        return kind, packing.group_size if kind else 0
    is_mxfp4 = packing.form == "fp4" and not packing.fp4.whole
    return ("fp4", packing.group_size) if is_mxfp4 else ("", 0)


def kernels_of(
    plan: RankPlan, config: ClusterConfig, ranks: Ranks, progress: Progress
) -> DeviceKernels:
    setting = config.engine.deterministic
    if not isinstance(plan.decoder, DecoderConfig):
        return chosen(setting, {}, ranks.size)
    shapes = shapes_of(
        plan.decoder,
        ranks.size,
        plan.layout.block_size,
        (plan.dtype, plan.pool_dtype),
        plan.max_model_len,
    )
    return choose_kernels(setting, shapes, plan.device, ranks, progress)


def product_of(plan: RankPlan, kernels: DeviceKernels) -> Product | None:
    if plan.device.type != "cuda" or not kernels.is_ordered:
        return None
    # Triton is imported here for the same reason as in `_on_gpu`.
    if PRODUCTS in kernels.proven:
        from baton.kernels.hopper.products.product import load_product

        return load_product(plan.device)
    from baton.kernels.cuda.fixed_product import fixed_product

    return fixed_product


def library_of(plan: RankPlan) -> Product | None:
    """Return the library's product where it may take the place of the ordered one.

    Not where the ordered one has the bits of faster kernels, which other nodes may use.
    """
    if plan.device.type != "cuda":
        return None
    from baton.kernels.cuda.fixed_product import has_warpgroup_products

    return None if has_warpgroup_products(plan.device) else F.linear


def experts_product_of(plan: RankPlan) -> GroupedProduct | None:
    if plan.device.type != "cuda" or isinstance(plan.decoder, TransformersConfig):
        return None
    from baton.kernels.cuda.grouped_product import grouped_product

    return grouped_product


def packing_of(plan: RankPlan, kernels: DeviceKernels) -> PackNarrow | None:
    if plan.device.type != "cuda" or plan.dtype != torch.bfloat16:
        return None
    from baton.kernels.cuda.fixed_product import packed

    if NARROW not in kernels.proven:
        return packed
    from baton.kernels.hopper.narrow.product import streamed

    def streamed_or_widened(
        weight: NarrowWeight, device: torch.device
    ) -> tuple[Tensor, NarrowLinear] | None:
        return streamed(weight, device) or packed(weight, device)

    return streamed_or_widened


def experts_packing_of(plan: RankPlan, kernels: DeviceKernels) -> PackExperts | None:
    if plan.device.type != "cuda" or NARROW_EXPERTS not in kernels.proven:
        return None
    from baton.kernels.hopper.narrow.product import streamed_experts

    return streamed_experts
