"""What a family's row says: how its models differ from Llama.

What reads config.json, expects tensors, loads them and lists models in docs/models.md follows the
row. `defaults` has the values that transformers takes for fields that config.json leaves out;
tests compare them with transformers' own configuration classes, which commands cannot import
because they load torch. No file of this folder imports torch.
"""

from typing import Literal

import msgspec

from baton.kernels.constants import SILU, Gate

ALWAYS = "always"  # instead of the name of a field that says whether
NEVER = "never"
Routing = Literal[
    "softmax", "sigmoid", "input_sigmoid", "grouped_softmax", "grouped_sigmoid"
]
StateKind = Literal["delta", "key_delta", "mamba", "conv"]
WindowedLayers = Literal["all", "upper", "alternate", "pattern"]
# What the last hidden state goes into: a token's logits, nothing, or numbers for labels.
Head = Literal["tokens", "none", "labels"]
GENERATING = "ForCausalLM"  # the end of the names of architectures that make tokens


class Windows(msgspec.Struct, frozen=True, kw_only=True):
    """The layers in which a token sees itself and `sliding_window - 1` tokens before it.

    `upper` are those from `max_window_layers` on; `alternate` every second one below that, from
    the first on; `pattern` all but the last of each `period` layers.
    """

    layers: WindowedLayers = "all"
    reads_layer_types: bool = True  # which then say it for each layer
    period: int = 0
    reads_period: bool = False  # from the field `sliding_window_pattern`
    switch: str = ""  # a field without which no layer has a window
    has_own_rope: bool = False  # the rotary embedding of these layers is another one


class MlpNames(msgspec.Struct, frozen=True):
    """The names of a dense MLP and of its layers; a single one of `gate_up` has both, if any."""

    block: str = "mlp"
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    down: str = "down_proj"
    has_gate: bool = True


class Experts(msgspec.Struct, frozen=True, kw_only=True):
    """A mixture of experts: how a token chooses, and what the tensors are called in a layer.

    `sigmoid` scores have a bias that changes the choice alone. With `input_sigmoid`, they multiply
    what a chosen expert takes. `grouped` is DeepSeek's choice, among the experts of the best
    groups.
    """

    routing: Routing = "softmax"
    block: str = "mlp"
    gate: str = "gate_proj"  # empty: experts have none
    up: str = "up_proj"
    down: str = "down_proj"
    router: str = "gate"
    router_bias: str = "gate.e_score_correction_bias"
    shared: str = ""  # the expert that every token takes
    shared_gate: str = ""  # its own weight, if it has one
    shared_mlp: MlpNames | None = None  # None: it is named as the others
    # All experts of a layer are in one tensor, [inputs, outputs] each, with gates and ups
    # interleaved, and they and the router have biases.
    is_interleaved: bool = False
    # Added to the sum by which the weights of sigmoids are divided.
    least_sum: float = 1e-20
    # Experts are in every layer, as wide as `intermediate_size`, and their weights sum to 1.
    fills_layers: bool = False
    # If config.json does not say which layers have experts.
    skips_first_layer: bool = False
    # All experts of a layer are in two tensors of these names: gates and ups, and downs.
    stacked: tuple[str, str] | None = None
    is_transposed: bool = False  # these have [inputs, outputs] of each expert
    # Every layer has the dense MLP, too, and a model may have no experts.
    adds_mlp: bool = False
    switch: str = ""  # a field without which there are no experts
    # They and the dense MLP take the same sum, each by norms of its own.
    is_beside_mlp: bool = False

    @property
    def gate_up(self) -> tuple[str, ...]:
        return tuple(name for name in (self.gate, self.up) if name)


class Index(msgspec.Struct, frozen=True, kw_only=True):
    """The index of sparse attention, which chooses the keys that a query sees (DeepSeek-V3.2)."""

    is_interleaved: bool = False  # its numbers that are rotated together are neighbours
    is_shared: bool = False  # layers may take what an earlier one has chosen


class Latent(msgspec.Struct, frozen=True, kw_only=True):
    """Latent attention (MLA): one row of a token and layer stands for all keys and values."""

    # Whether numbers that are rotated together are neighbours in the files; None: the field
    # `rope_interleave` says so.
    is_interleaved: bool | None = None
    index: Index | None = None


class StateLayers(msgspec.Struct, frozen=True, kw_only=True):
    """Layers that keep a state for each sequence in place of keys and values.

    They are a Gated DeltaNet (`delta`), Kimi's, in which each number of a key has a decay of its
    own (`key_delta`), a Mamba-2 (`mamba`), or a short convolution of gated inputs alone (`conv`).
    """

    kind: StateKind = "delta"
    block: str = "linear_attn"
    layer_types: tuple[str, ...] = ("linear_attention",)  # their names
    attention_types: tuple[str, ...] = ("full_attention",)  # those of the other layers
    # Of a Mamba: its heads together are `mamba_expand` times the hidden size.
    expands: bool = True
    # In the files, two tensors have what reads the hidden state, by heads of keys.
    joins_inputs: bool = False


class DraftNames(msgspec.Struct, frozen=True, kw_only=True):
    """The layer in a model's own files that predicts the token after the next one (MTP).

    It takes the norms of a token's embedding and of the hidden state before it, joined. The names
    are those of the layout `model.layers.N.` that DeepSeek-V3 has.
    """

    # Before all names; empty: that of the layer behind the model's last.
    block: str = ""
    layer: str = ""  # the same, of the layer alone
    embedding_norm: str = "enorm"
    hidden_norm: str = "hnorm"
    joint: str = "eh_proj"
    norm: str = "shared_head.norm"
    head: str = "shared_head.head"  # empty: the model's
    # The next draft takes the hidden state behind the last norm.
    feeds_normed: bool = False
    # The field that says how many such layers there are; the first one drafts.
    count: str = "num_nextn_predict_layers"


class LayerNames(msgspec.Struct, frozen=True):
    """The names of norms and of the output of attention, and that of the last norm."""

    attention_norm: str = "input_layernorm"
    mlp_norm: str = "post_attention_layernorm"
    q_norm: str = "q_norm"
    k_norm: str = "k_norm"
    output: str = "o_proj"
    last_norm: str = "norm"
    attention: str = "self_attn"
    layer: str = "model.layers.{}."  # with its number


class Family(msgspec.Struct, frozen=True, kw_only=True):
    """One family. Biases and norms are `ALWAYS` there, or where a named field says so."""

    title: str  # as people call its models
    architecture: str
    # Without the head; empty: as the family's others are named.
    base_architecture: str = ""
    model_type: str
    other_model_types: tuple[str, ...] = ()
    # Architectures of models that also see; this is their text.
    wrappers: tuple[str, ...] = ()
    defaults: dict[str, object] = {}
    renamed: dict[str, str] = {}  # fields that count instead of those of the new names
    refused: tuple[str, ...] = ()  # fields that change the result and are not supported
    qkv_bias: str = ""
    output_bias: str = ""
    mlp_bias: str = ""
    qk_norm: str = ""
    joins_qk_norm: bool = False  # over all heads together
    is_fused: bool = False  # queries, keys and values are one tensor, and gates and ups
    gate: Gate | None = SILU  # None: MLPs have no gate, but the square of a ReLU
    norm_offset: float = 0.0  # added to the weights of all norms
    has_output_norms: bool = False  # of attention and of the MLP, before they are added
    scales_embeddings: bool = False  # by the root of the hidden size
    has_scalar: bool = False  # query_pre_attn_scalar and the caps of logits count
    has_multipliers: bool = False  # of embeddings, scores, what layers add, and logits
    has_sinks: bool = False  # a score of each head that no key has
    has_output_gates: bool = False  # queries bring gates of what their heads give
    names: LayerNames = LayerNames()
    norm_eps: str = "rms_norm_eps"  # the field that has it
    mlp: MlpNames = MlpNames()
    mlp_width: str = "intermediate_size"
    windows: Windows | None = None
    # The field that says "rope" where positions rotate. "": they always do; NEVER: they do not.
    rotates: str = ""
    partial_rotary_factor: float | None = None  # None: whole heads are rotated
    rope_types: dict[str, str] = {}  # other names of kinds of scaling
    rotates_neighbours: bool = False  # numbers that are rotated together are neighbours
    # Most layers attend within chunks, and others do not rotate.
    has_chunks: bool = False
    # Attention, states and MLPs are layers of their own in the files.
    has_lone_blocks: bool = False
    # Layers that see everything have other heads than those with windows.
    has_kinds: bool = False
    has_layer_inputs: bool = False  # of these, if config.json gives them a width
    latent: Latent | None = None
    state: StateLayers | None = None  # of the layers that do not attend
    experts: Experts | None = None
    # num_nextn_predict_layers are in the files, and not read.
    has_nextn_layers: bool = False
    # What names of tensors that only guess tokens begin with.
    guessing: tuple[str, ...] = ()
    draft: DraftNames | None = None  # how one of them can be computed

    def with_defaults(self, fields: dict[str, object]) -> dict[str, object]:
        """Return the fields of config.json, completed as transformers completes them."""
        complete = dict(fields)
        for name, new_name in self.renamed.items():
            if name in fields:
                complete[new_name] = fields[name]
        for name, value in self.defaults.items():
            names = _ALIASES.get(name, (name,))
            if not any(_says_something(complete, alias) for alias in names):
                complete[name] = value
        return complete

    @property
    def other_architectures(self) -> dict[str, Head]:
        """Return the architectures of the family that make no tokens, with their heads."""
        stem, is_named, _ = self.architecture.partition(GENERATING)
        if not is_named:
            return {}
        base = self.base_architecture or f"{stem}Model"
        return {base: "none", f"{stem}ForSequenceClassification": "labels"}


# Fields of which one is enough.
_ALIASES = {
    "num_experts": ("num_experts", "num_local_experts"),
    "num_local_experts": ("num_experts", "num_local_experts"),
    "torch_dtype": ("torch_dtype", "dtype"),
    "rope_scaling": ("rope_scaling", "rope_parameters"),
}
# Fields in which null is a value: as many KV heads as heads, no window, no cap.
_NULLABLE = {
    "num_key_value_heads",
    "sliding_window",
    "attn_logit_softcapping",
    "final_logit_softcapping",
}


def _says_something(fields: dict[str, object], name: str) -> bool:
    return fields.get(name) is not None or (name in fields and name in _NULLABLE)


NEXTN = DraftNames()
MTP = DraftNames(
    block="mtp.",
    layer="mtp.layers.0.",
    embedding_norm="pre_fc_norm_embedding",
    hidden_norm="pre_fc_norm_hidden",
    joint="fc",
    norm="norm",
    head="",
    feeds_normed=True,
    count="mtp_num_hidden_layers",
)
DEEPSEEK_EXPERTS = Experts(routing="grouped_sigmoid", shared="shared_experts")
# Of text, all three positions of a token are equal, and so are the angles.
MROPE = {"mrope": "default"}
SHARED_EXPERT = Experts(shared="shared_expert", shared_gate="shared_expert_gate")
