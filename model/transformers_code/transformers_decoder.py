"""The decoder that transformers' own modelling code computes, with baton's paged attention in it.

Through transformers' interface of attention functions, each layer stores its keys and values in the
pool and attends with a backend's kernels, for a packed batch. The model's own cache and masks are
not used, so `transformers_gate` refuses a model that needs more of them than causality and windows.
Linear layers are baton's, by which a row keeps its bits in every batch.
"""

import contextlib
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.utils import logging as transformers_log

from baton.model.batch_invariance.host_linears import MAX_HEAD_ROWS, HostLinears
from baton.model.config.transformers_config import TransformersConfig, version
from baton.model.layers.attention import AdaptedRows, Backend, Batch, Chunk, Scoring
from baton.model.layers.decoder import Taps
from baton.model.layers.linear import Linear
from baton.model.layers.mlp import sigmoid
from baton.model.loading.layer_weights import LinearMaker
from baton.model.tensor_parallel import Ranks
from baton.protocol.errors import ConfigError, InvariantBroken

# Arguments of an attention function that change nothing here: the chunks say what they say.
HARMLESS = frozenset(
    {
        "dropout",
        "is_causal",
        "position_ids",
        "use_cache",
        "return_dict",
        "cu_seq_lens_q",
        "cu_seq_lens_k",
        "max_length_q",
        "max_length_k",
    }
)
# transformers changes its classes while it makes a model, and two threads that do so at once, as
# the ranks of a test, would leave them changed.
LOADING = threading.Lock()
# The errors with which code of transformers says that it cannot run as it is asked to.
MODEL_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)
# One expert after the other: the products of all at once give a row other bits in each batch.
EXPERTS = {"cpu": {"experts_implementation": "eager"}, "cuda": {}}
TRIAL_TOKENS = 150
TRIAL_CUTS = (0, 64, 101, 149, 150)
BESIDE = 5


class LayerHeads(NamedTuple):
    """What one layer attends with and stores for a token."""

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int


class PagedAttention:
    """The attention function of all layers of one model.

    Without a backend, it only notes in `seen` what each layer asks for.
    """

    def __init__(self) -> None:
        self.name = f"baton-{secrets.token_hex(4)}"
        self.backend: Backend | None = None
        self.width, self.dtype = 0, torch.float32  # of keys and values in the pool
        self.seen: dict[int, LayerHeads] = {}
        AttentionInterface.register(self.name, self)

    def __call__(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        """Take `[1, heads, tokens, head_dim]`; return `[1, tokens, heads, head_dim]`.

        Raises `ConfigError` for an option that the kernels do not honour.
        """
        scale = options.pop("scaling", None)
        how = [
            options.pop(name, None) for name in ("sliding_window", "softcap", "s_aux")
        ]
        layer: int = module.layer_idx
        _, heads, tokens, dim = query.shape
        if self.backend is None:
            self._check(module, attention_mask, options)
            if layer in self.seen or key.shape[2] != tokens or len(query) != 1:
                raise ConfigError(
                    "a layer attends twice, or to other tokens than its own"
                )
            self.seen[layer] = LayerHeads(heads, key.shape[1], dim, value.shape[3])
            return value.new_zeros(1, tokens, heads, value.shape[3]), None
        num_heads = heads + 2 * key.shape[1]
        qkv = value.new_zeros(tokens, num_heads, self.width, dtype=self.dtype)
        first = 0
        for part in (query, key, value):
            qkv[:, first : first + part.shape[1], : part.shape[3]] = part[0].transpose(
                0, 1
            )
            first += part.shape[1]
        self.backend.scoring = Scoring(dim**-0.5 if scale is None else scale, *how)
        out = self.backend.attend(layer, qkv.view(tokens, -1), None)
        out = out.view(1, tokens, heads, self.width)[..., : value.shape[3]]
        return out.to(query.dtype), None

    def _check(
        self, module: Any, mask: Tensor | None, options: Mapping[str, Any]
    ) -> None:
        given = {
            name
            for name, value in options.items()
            if value is not None
            and name not in HARMLESS
            and not name.startswith("output_")
        }
        if mask is not None:
            given.add("a mask of its own")
        is_causal = options.get("is_causal")
        if (
            getattr(module, "is_causal", True) if is_causal is None else is_causal
        ) is False:
            given.add("tokens that see later ones")
        if given:
            what = ", ".join(sorted(given))
            raise ConfigError(
                f"its attention needs {what}, which baton's kernels do not have"
            )


class RowLinear(nn.Module):
    """A linear layer made by baton in place of transformers' `nn.Linear`."""

    def __init__(self, made: Linear, weight: Tensor) -> None:
        super().__init__()
        self.made = made
        self.out_features, self.in_features = weight.shape
        self.weight = weight.to("meta")  # some modules ask for its type

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] != self.in_features or x.dtype != self.weight.dtype:
            raise TypeError(
                f"a layer of {self.in_features} inputs got {x.dtype} {x.shape}"
            )
        return self.made(x.reshape(-1, self.in_features)).view(
            *x.shape[:-1], self.out_features
        )


class BareLinears(TorchFunctionMode):
    """Computes what routers and experts call so that a row has the same bits in every batch.

    That is `F.linear` of parameters, by row rules, and the sigmoid.
    """

    def __init__(self, linears: HostLinears) -> None:
        super().__init__()
        self._linears = linears
        self.made: dict[tuple[torch.Size, torch.dtype], Linear] = {}

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Any = None,
    ) -> Any:
        if function is F.linear and not kwargs and args[1].dim() == 2:
            x, weight, bias = (*args, None)[:3]
            made = self._linears.over(weight, bias)
            self.made.setdefault((weight.shape, weight.dtype), made)
            return made(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], len(weight))
        if (
            function in {Tensor.sigmoid, torch.sigmoid, F.sigmoid}
            and args
            and not kwargs
        ):
            return sigmoid(args[0])
        return function(*args, **(kwargs or {}))


class TransformersDecoder:
    """A model of transformers behind the interface that a runner has to its decoder."""

    # Its code takes no adapters.
    lora_modules: tuple[str, ...] = ()
    num_lora_slots = 0

    def __init__(
        self, model: Any, attention: PagedAttention, ranks: Ranks, made: list[Linear]
    ) -> None:
        self.model = model
        self.attention = attention
        self.ranks = ranks
        self.source = f"transformers {version()}"
        self.keeps_bits = False  # as a trial has shown
        self.bare: BareLinears | None = None
        self._made = made
        # Some models name their base wrongly.
        named = model.base_model
        self._base: Any = named if named is not model else getattr(model, "model", None)
        if self._base is None:
            raise ConfigError("its code has no base model apart from the head")
        # As OPT, past a model around it.
        self._base = getattr(self._base, "decoder", self._base)
        self._outputs: Any = None  # of the base's last step

    def linears(self) -> list[Linear]:
        return (
            self._made if self.bare is None else [*self._made, *self.bare.made.values()]
        )

    @property
    def is_batch_invariant(self) -> bool:
        return self.keeps_bits and all(
            linear.is_batch_invariant for linear in self.linears()
        )

    def forward(self, batch: Batch, rows: Tensor, backend: Backend) -> Tensor:
        """Store the batch's keys and values; return the logits of `rows`."""
        return self.logits(self.hidden(batch, rows, backend), backend)

    def logits(
        self, hidden: Tensor, _: Backend, _adapted: AdaptedRows | None = None, /
    ) -> Tensor:
        """Return `[num_rows, vocab]`.

        Models scale or cap their logits after the head, so their own code computes them, from a
        base that returns `hidden`.
        """
        if not len(hidden):
            return hidden.new_empty(0, 0)
        self.attention.backend = None  # a head that attends would write to the pool
        outputs = copy(self._outputs)
        outputs.last_hidden_state = hidden[None]
        self._base.forward = lambda *_, **__: outputs
        try:
            with torch.no_grad(), self.bare or contextlib.nullcontext():
                ids = torch.zeros(
                    1, len(hidden), dtype=torch.int64, device=hidden.device
                )
                logits: Tensor = self.model(input_ids=ids, use_cache=False).logits
            return logits[0]
        finally:
            del self._base.forward

    def classify(self, hidden: Tensor, /) -> Tensor:
        raise InvariantBroken("a model that transformers computes has no classifier")

    def hidden(
        self,
        batch: Batch,
        rows: Tensor,
        backend: Backend,
        *,
        are_many: bool = False,
        taps: Taps | None = None,
    ) -> Tensor:
        """Store the batch's keys and values; return the last hidden state of `rows`."""
        assert taps is None, "nothing drafts with a model that transformers computes"
        backend.begin(batch)
        self.attention.backend = backend
        with torch.no_grad(), self.bare or contextlib.nullcontext():
            self._outputs = self._base(
                input_ids=batch.token_ids[None],
                position_ids=batch.positions[None],
                use_cache=False,
            )
        state: Tensor = self._outputs.last_hidden_state[0]
        return state[rows]


def load_transformers(
    folder: Path,
    config: TransformersConfig,
    ranks: Ranks,
    dtype: torch.dtype,
    linears: LinearMaker | None,
    device: torch.device,
) -> TransformersDecoder:
    """Load with transformers' own loader. Raises `ConfigError` for weights that do not fit."""
    silence()
    try:
        with LOADING:
            model, found = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=dtype,
                local_files_only=True,
                use_safetensors=True,
                trust_remote_code=False,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                **EXPERTS[device.type],
            )
    except MODEL_ERRORS as error:
        raise ConfigError(
            f"{folder}: transformers cannot load it: {one_line(error)}"
        ) from error
    for what in ("missing", "unexpected", "mismatched"):
        # Those that are mismatched have their shapes with them.
        keys = found[f"{what}_keys"]
        if names := sorted(
            key if isinstance(key, str) else str(key[0]) for key in keys
        ):
            raise ConfigError(
                f"{folder}: {what} weights of {config.architecture}: {', '.join(names[:3])}"
                f"{f' and {len(names) - 3} more' if len(names) > 3 else ''}"
            )
    if len(model.get_input_embeddings().weight) < config.vocab_size:
        raise ConfigError(
            f"{folder}: the embedding has fewer rows than vocab_size says"
        )
    model = model.to(device).eval().requires_grad_(requires_grad=False)
    made = [] if linears is None else with_row_linears(model, linears.make)
    attention = PagedAttention()
    model.set_attn_implementation(attention.name)
    decoder = TransformersDecoder(model, attention, ranks, made)
    if isinstance(linears, HostLinears):
        decoder.bare = BareLinears(linears)
    if (seen := heads_of(decoder, config.num_layers)) != (
        config.num_heads,
        config.num_kv_heads,
    ):
        raise ConfigError(
            f"{folder}: all layers attend with {seen}, but a small copy did not"
        )
    attention.width = config.head_dim
    attention.dtype = dtype
    return decoder


def with_row_linears(model: Any, make: Callable[..., Linear]) -> list[Linear]:
    """Replace every `nn.Linear`, one at a time, so that few weights are in memory twice."""
    made = []
    head = model.get_output_embeddings()
    # A list of all modules would keep every weight until the last is packed.
    for parent in [
        module for module in model.modules() if type(module) is not nn.Linear
    ]:
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                bias = None if child.bias is None else child.bias.data
                max_rows = MAX_HEAD_ROWS if child is head else None
                made.append(make(child.weight.data, bias, max_rows))
                setattr(parent, name, RowLinear(made[-1], child.weight.data))
    return made


def heads_of(decoder: TransformersDecoder, num_layers: int) -> tuple[int, int]:
    """Return the numbers of heads and KV heads of every layer, as a pass over 3 tokens shows them.

    Raises `ConfigError` unless each layer attends once and all in the same way.
    """
    attention = decoder.attention
    device = decoder.model.device
    attention.backend = None
    attention.seen.clear()
    ids = torch.arange(3, 6, device=device)[None]
    try:
        with torch.no_grad():
            decoder.model(input_ids=ids, position_ids=ids - 3, use_cache=False)
    except (AttributeError, LookupError, TypeError) as error:
        why = f"its code does not run without a mask of its own ({one_line(error)})"
        raise ConfigError(why) from error
    seen = attention.seen
    if sorted(seen) != list(range(num_layers)):
        raise ConfigError(
            f"{len(seen)} of {num_layers} layers attend through transformers' interface: "
            "the others attend by code of their own, or keep another state"
        )
    kinds = {(layer.heads, layer.kv_heads) for layer in seen.values()}
    if len(kinds) != 1:
        raise ConfigError(f"layers have different numbers of heads: {sorted(kinds)}")
    heads, kv_heads = kinds.pop()
    if heads % kv_heads:
        raise ConfigError(f"{kv_heads} KV heads do not divide {heads} heads")
    return heads, kv_heads


def in_chunks(
    decoder: TransformersDecoder,
    backend: Backend,
    block_size: int,
    ids: Tensor,
    cuts: Sequence[int],
    beside: int = BESIDE,
) -> Tensor:
    """Return the logits of all tokens, `[len(ids), vocab]`, computed in the chunks between `cuts`.

    Each chunk comes after `beside` tokens of another sequence. The first blocks of the pool are
    used.
    """
    per_sequence = -(-len(ids) // block_size)
    table = tuple(range(1, per_sequence + 1))
    other = (0,)
    logits = []
    for start, end in pairwise(cuts):
        own = torch.arange(start, end)
        others = torch.arange(beside)
        chunks = (Chunk(0, 0, beside, other), Chunk(beside, start, end - start, table))
        batch = Batch(
            torch.cat((ids[:beside].flip(0), ids[start:end])),
            torch.cat((others, own)),
            torch.cat((others, own + block_size)),
            chunks if beside else chunks[1:],
        )
        rows = torch.arange(beside, len(batch.slots))
        logits.append(decoder.forward(batch, rows, backend))
    return torch.cat(logits)


def trial_ids(vocab_size: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(
        min(3, vocab_size - 1), vocab_size, (TRIAL_TOKENS,), generator=generator
    )


def try_rows(
    decoder: TransformersDecoder, backend: Backend, pool: Tensor, vocab_size: int
) -> None:
    """Note whether a row keeps its bits in chunks and beside others, on a pool in host memory.

    Raises `ConfigError` if a logit is not a finite number.
    """
    num_blocks = len(pool)
    block_size = pool.shape[4]
    ids = trial_ids(vocab_size)
    if num_blocks <= -(-TRIAL_TOKENS // block_size) or block_size < BESIDE:
        return
    whole = in_chunks(decoder, backend, block_size, ids, (0, TRIAL_TOKENS), beside=0)
    if not whole.isfinite().all():
        raise ConfigError(
            "the model's logits are not finite numbers: its weights are damaged"
        )
    decoder.keeps_bits = torch.equal(
        whole, in_chunks(decoder, backend, block_size, ids, TRIAL_CUTS)
    )
    if decoder.bare is not None and not decoder.bare.made:
        decoder.bare = None  # a mode costs a call in Python for each operation


def silence() -> None:
    """Keep transformers' own lines out of the node's log."""
    transformers_log.set_verbosity_error()
    transformers_log.disable_progress_bar()


def one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return (text if len(text) < 300 else f"{text[:300]}…") or type(error).__name__
