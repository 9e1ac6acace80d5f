"""The families of baton's own decoder: a row says how one differs from Llama.

What reads config.json, expects tensors, loads them and lists models in docs/models.md follows the
row. `defaults` has the values that transformers takes for fields that config.json leaves out;
tests compare them with transformers' own configuration classes, which commands cannot import
because they load torch. This module never imports torch.
"""

from typing import Literal

import msgspec

from baton.kernels.constants import CLAMPED, GELU_TANH, SILU, Gate

ALWAYS = "always"  # instead of the name of a field that says whether
NEVER = "never"
Routing = Literal["softmax", "sigmoid", "input_sigmoid", "grouped_softmax", "grouped_sigmoid"]
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
    least_sum: float = 1e-20  # added to the sum by which the weights of sigmoids are divided
    # Experts are in every layer, as wide as `intermediate_size`, and their weights sum to 1.
    fills_layers: bool = False
    skips_first_layer: bool = False  # if config.json does not say which layers have experts
    # All experts of a layer are in two tensors of these names: gates and ups, and downs.
    stacked: tuple[str, str] | None = None
    is_transposed: bool = False  # these have [inputs, outputs] of each expert
    adds_mlp: bool = False  # every layer has the dense MLP, too, and a model may have no experts
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
    expands: bool = True  # of a Mamba: its heads together are `mamba_expand` times the hidden size
    # In the files, two tensors have what reads the hidden state, by heads of keys.
    joins_inputs: bool = False


class LayerNames(msgspec.Struct, frozen=True):
    """The names of norms and of the output of attention, and that of the last norm."""

    attention_norm: str = "input_layernorm"
    mlp_norm: str = "post_attention_layernorm"
    q_norm: str = "q_norm"
    k_norm: str = "k_norm"
    output: str = "o_proj"
    last_norm: str = "norm"
    attention: str = "self_attn"


class Family(msgspec.Struct, frozen=True, kw_only=True):
    """One family. Biases and norms are `ALWAYS` there, or where a named field says so."""

    title: str  # as people call its models
    architecture: str
    base_architecture: str = ""  # without the head; empty: as the family's others are named
    model_type: str
    other_model_types: tuple[str, ...] = ()
    wrappers: tuple[str, ...] = ()  # architectures of models that also see; this is their text
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
    has_chunks: bool = False  # most layers attend within chunks, and others do not rotate
    has_lone_blocks: bool = False  # attention, states and MLPs are layers of their own in the files
    has_kinds: bool = False  # layers that see everything have other heads than those with windows
    has_layer_inputs: bool = False  # of these, if config.json gives them a width
    latent: Latent | None = None
    state: StateLayers | None = None  # of the layers that do not attend
    experts: Experts | None = None
    has_nextn_layers: bool = False  # num_nextn_predict_layers are in the files, and not read
    guessing: tuple[str, ...] = ()  # what names of tensors that only guess tokens begin with

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


_DEEPSEEK_EXPERTS = Experts(routing="grouped_sigmoid", shared="shared_experts")
# Of text, all three positions of a token are equal, and so are the angles.
_MROPE = {"mrope": "default"}
_LLAVA = ("LlavaForConditionalGeneration", "LlavaNextForConditionalGeneration")
_INTERNVL = ("InternVLForConditionalGeneration",)
_DELTA_SIZES = {
    "head_dim": 256,
    "linear_num_value_heads": 32,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
_SHARED_EXPERT = Experts(shared="shared_expert", shared_gate="shared_expert_gate")
_QWEN_WINDOWS = Windows(layers="upper", switch="use_sliding_window")
_GEMMA_4_UNIFIED = Family(
    title="Gemma 4 (unified)",
    architecture="Gemma4UnifiedForCausalLM",
    base_architecture="Gemma4UnifiedTextModel",
    model_type="gemma4_unified_text",
    wrappers=("Gemma4UnifiedForConditionalGeneration",),
    defaults={
        "vocab_size": 262144,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 30,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 262144,
        "tie_word_embeddings": True,
        "sliding_window": 1024,
        "query_pre_attn_scalar": 1,  # scores are products as they are
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": 0.25,
                "rope_theta": 1e6,
            }
        },
    },
    refused=("attn_logit_softcapping",),
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    qk_norm=ALWAYS,
    gate=GELU_TANH,
    has_output_norms=True,
    scales_embeddings=True,
    has_scalar=True,
    windows=Windows(layers="pattern", period=6, has_own_rope=True),
    has_kinds=True,
)

FAMILIES = (
    Family(
        title="Llama",
        architecture="LlamaForCausalLM",
        model_type="llama",
        defaults={"max_position_embeddings": 2048},
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        mlp_bias="mlp_bias",
        wrappers=_LLAVA,
    ),
    Family(
        title="Mistral",
        architecture="MistralForCausalLM",
        model_type="mistral",
        wrappers=("Mistral3ForConditionalGeneration", *_LLAVA),
        defaults={
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "sliding_window": 4096,
        },
        windows=Windows(),
    ),
    Family(
        title="Ministral",
        architecture="MinistralForCausalLM",
        model_type="ministral",
        defaults={
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "sliding_window": 4096,
        },
        windows=Windows(),
    ),
    Family(
        title="Qwen2, Qwen2.5",
        architecture="Qwen2ForCausalLM",
        model_type="qwen2",
        wrappers=_INTERNVL,
        defaults={
            "max_position_embeddings": 32768,
            "num_key_value_heads": 32,
            "sliding_window": 4096,
        },
        qkv_bias=ALWAYS,
        windows=_QWEN_WINDOWS,
    ),
    Family(
        title="Qwen3 (dense)",
        architecture="Qwen3ForCausalLM",
        model_type="qwen3",
        wrappers=_INTERNVL,
        defaults={
            "max_position_embeddings": 32768,
            "num_key_value_heads": 32,
            "head_dim": 128,
            "sliding_window": 4096,
        },
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        qk_norm=ALWAYS,
        windows=_QWEN_WINDOWS,
    ),
    Family(
        title="Qwen2-MoE, Qwen1.5-MoE",
        architecture="Qwen2MoeForCausalLM",
        model_type="qwen2_moe",
        defaults={
            "max_position_embeddings": 32768,
            "num_key_value_heads": 16,
            "sliding_window": 4096,
            "qkv_bias": True,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
        },
        qkv_bias="qkv_bias",
        windows=Windows(layers="alternate", switch="use_sliding_window"),
        experts=_SHARED_EXPERT,
    ),
    Family(
        title="Qwen3-MoE",
        architecture="Qwen3MoeForCausalLM",
        model_type="qwen3_moe",
        defaults={
            "max_position_embeddings": 32768,
            "num_key_value_heads": 4,
            "sliding_window": 4096,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
        },
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        qk_norm=ALWAYS,
        windows=Windows(reads_layer_types=False, switch="use_sliding_window"),
        experts=Experts(),
    ),
    Family(
        title="Qwen3-Next",
        architecture="Qwen3NextForCausalLM",
        model_type="qwen3_next",
        defaults={
            **_DELTA_SIZES,
            "num_key_value_heads": 2,
            "norm_topk_prob": True,
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
        },
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        qk_norm=ALWAYS,
        norm_offset=1.0,
        has_output_gates=True,
        partial_rotary_factor=0.25,
        state=StateLayers(joins_inputs=True),
        experts=_SHARED_EXPERT,
        guessing=("mtp.",),
    ),
    Family(
        title="Qwen3.5, 3.6 (dense)",
        architecture="Qwen3_5ForCausalLM",
        model_type="qwen3_5_text",
        other_model_types=("qwen3_5",),
        wrappers=("Qwen3_5ForConditionalGeneration",),
        defaults={**_DELTA_SIZES, "num_key_value_heads": 4},
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        qk_norm=ALWAYS,
        norm_offset=1.0,
        has_output_gates=True,
        partial_rotary_factor=0.25,
        rope_types=_MROPE,
        state=StateLayers(),
        guessing=("mtp.",),
    ),
    Family(
        title="Qwen3.5, 3.6 (MoE)",
        architecture="Qwen3_5MoeForCausalLM",
        model_type="qwen3_5_moe_text",
        other_model_types=("qwen3_5_moe",),
        wrappers=("Qwen3_5MoeForConditionalGeneration",),
        defaults={
            **_DELTA_SIZES,
            "num_key_value_heads": 2,
            "intermediate_size": 512,  # of no layer
            "norm_topk_prob": True,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
        },
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        qk_norm=ALWAYS,
        norm_offset=1.0,
        has_output_gates=True,
        partial_rotary_factor=0.25,
        rope_types=_MROPE,
        state=StateLayers(),
        experts=_SHARED_EXPERT,
        guessing=("mtp.",),
    ),
    Family(
        title="Granite 4 (hybrid)",
        architecture="GraniteMoeHybridForCausalLM",
        model_type="granitemoehybrid",
        defaults={
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 1024,
            "mamba_n_heads": 128,
            "mamba_n_groups": 1,
            "mamba_d_state": 256,
            "mamba_d_conv": 4,
            "mamba_conv_bias": True,
        },
        renamed={"layers_block_type": "layer_types"},
        refused=("mamba_proj_bias",),
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        has_multipliers=True,
        mlp=MlpNames("shared_mlp", ("input_linear",), "output_linear"),
        mlp_width="shared_intermediate_size",
        rotates="position_embedding_type",
        state=StateLayers(
            kind="mamba",
            block="mamba",
            layer_types=("linear_attention", "mamba"),
            attention_types=("full_attention", "attention"),
        ),
        experts=Experts(
            block="block_sparse_moe",
            router="router.layer",
            fills_layers=True,
            stacked=("input_linear.weight", "output_linear.weight"),
            adds_mlp=True,
        ),
    ),
    Family(
        title="Nemotron-H, Nemotron 3",
        architecture="NemotronHForCausalLM",
        model_type="nemotron_h",
        defaults={
            "vocab_size": 131072,
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "intermediate_size": 21504,
            "max_position_embeddings": 4096,
            "layer_norm_epsilon": 1e-5,
            "mamba_n_heads": 128,
            "mamba_d_head": 64,
            "mamba_n_groups": 8,
            "mamba_d_state": 128,
            "mamba_d_conv": 4,
            "mamba_conv_bias": True,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 7688,
            "moe_shared_expert_intermediate_size": 7688,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 1.0,
            "norm_topk_prob": True,
        },
        renamed={
            "layers_block_type": "layer_types",
            "mamba_num_heads": "mamba_n_heads",
            "mamba_head_dim": "mamba_d_head",
            "n_groups": "mamba_n_groups",
            "ssm_state_size": "mamba_d_state",
            "conv_kernel": "mamba_d_conv",
            "use_conv_bias": "mamba_conv_bias",
        },
        refused=(
            "attention_bias",
            "mlp_bias",
            "use_bias",
            "mamba_proj_bias",
            "residual_in_fp32",
            "sliding_window",
        ),
        gate=None,
        names=LayerNames("norm", "norm", last_norm="norm_f", attention="mixer"),
        norm_eps="layer_norm_epsilon",
        mlp=MlpNames("mixer", ("up_proj",), has_gate=False),
        rotates=NEVER,
        state=StateLayers(
            kind="mamba",
            block="mixer",
            layer_types=("linear_attention", "mamba"),
            attention_types=("full_attention", "attention"),
            expands=False,
        ),
        has_lone_blocks=True,
        experts=Experts(
            routing="grouped_sigmoid",
            block="mixer",
            gate="",
            shared="shared_experts",
            switch="has_experts",
        ),
        guessing=("mtp.",),
    ),
    Family(
        title="LFM2",
        architecture="Lfm2ForCausalLM",
        model_type="lfm2",
        defaults={
            "num_key_value_heads": 8,
            "norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "rope_theta": 1e6,
            "conv_L_cache": 3,
            "block_auto_adjust_ff_dim": True,
        },
        renamed={"block_ff_dim": "intermediate_size", "tie_embedding": "tie_word_embeddings"},
        refused=("conv_bias",),
        qk_norm=ALWAYS,
        names=LayerNames(
            "operator_norm", "ffn_norm", "q_layernorm", "k_layernorm", "out_proj", "embedding_norm"
        ),
        norm_eps="norm_eps",
        mlp=MlpNames("feed_forward", ("w1", "w3"), "w2"),
        state=StateLayers(kind="conv", block="conv", layer_types=("conv",)),
    ),
    Family(
        title="LFM2-MoE",
        architecture="Lfm2MoeForCausalLM",
        model_type="lfm2_moe",
        defaults={
            "num_key_value_heads": 8,
            "max_position_embeddings": 128000,
            "norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "rope_theta": 1e6,
            "conv_L_cache": 3,
            "num_dense_layers": 2,
            "num_experts": 32,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1792,
            "norm_topk_prob": True,
        },
        renamed={"tie_embedding": "tie_word_embeddings"},
        refused=("conv_bias",),
        qk_norm=ALWAYS,
        names=LayerNames(
            "operator_norm", "ffn_norm", "q_layernorm", "k_layernorm", "out_proj", "embedding_norm"
        ),
        norm_eps="norm_eps",
        mlp=MlpNames("feed_forward", ("w1", "w3"), "w2"),
        state=StateLayers(kind="conv", block="conv", layer_types=("conv",)),
        experts=Experts(
            routing="sigmoid",
            block="feed_forward",
            gate="w1",
            up="w3",
            down="w2",
            router_bias="expert_bias",
            least_sum=1e-6,
        ),
    ),
    Family(
        title="Qwen2-VL, Qwen2.5-VL",
        architecture="Qwen2_5_VLForConditionalGeneration",
        model_type="qwen2_5_vl_text",
        other_model_types=("qwen2_5_vl", "qwen2_vl_text", "qwen2_vl"),
        wrappers=("Qwen2_5_VLForConditionalGeneration", "Qwen2VLForConditionalGeneration"),
        defaults={
            "max_position_embeddings": 32768,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "sliding_window": 4096,
            "max_window_layers": 80,
        },
        qkv_bias=ALWAYS,
        windows=_QWEN_WINDOWS,
        rope_types=_MROPE,
    ),
    Family(
        title="Qwen3-VL",
        architecture="Qwen3VLForConditionalGeneration",
        model_type="qwen3_vl_text",
        wrappers=("Qwen3VLForConditionalGeneration",),
        defaults={
            "max_position_embeddings": 128000,
            "num_key_value_heads": 32,
            "head_dim": 128,
            "rope_theta": 5e5,
        },
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        qk_norm=ALWAYS,
        rope_types=_MROPE,
    ),
    Family(
        title="Qwen3-VL-MoE",
        architecture="Qwen3VLMoeForConditionalGeneration",
        model_type="qwen3_vl_moe_text",
        wrappers=("Qwen3VLMoeForConditionalGeneration",),
        defaults={
            "max_position_embeddings": 128000,
            "num_key_value_heads": 16,
            "rope_theta": 5e5,
            "tie_word_embeddings": True,
            "norm_topk_prob": True,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
        },
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        qk_norm=ALWAYS,
        rope_types=_MROPE,
        experts=Experts(),
    ),
    Family(
        title="GLM-4.5V, 4.6V",
        architecture="Glm4vMoeForConditionalGeneration",
        model_type="glm4v_moe_text",
        wrappers=("Glm4vMoeForConditionalGeneration",),
        defaults={
            "max_position_embeddings": 65536,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "attention_bias": True,
        },
        qkv_bias="attention_bias",
        partial_rotary_factor=0.5,
        rope_types=_MROPE,
        experts=_DEEPSEEK_EXPERTS,
        has_nextn_layers=True,
    ),
    Family(
        title="Seed-OSS",
        architecture="SeedOssForCausalLM",
        model_type="seed_oss",
        defaults={
            "max_position_embeddings": 524288,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "attention_bias": True,
        },
        qkv_bias="attention_bias",
        output_bias="attention_out_bias",
        mlp_bias="mlp_bias",
    ),
    Family(
        title="Mixtral",
        architecture="MixtralForCausalLM",
        model_type="mixtral",
        defaults={
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        windows=Windows(reads_layer_types=False),
        experts=Experts(block="block_sparse_moe", gate="w1", up="w3", down="w2", fills_layers=True),
    ),
    Family(
        title="Gemma 2",
        architecture="Gemma2ForCausalLM",
        model_type="gemma2",
        defaults={
            "max_position_embeddings": 8192,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "tie_word_embeddings": True,
            "sliding_window": 4096,
            "query_pre_attn_scalar": 256,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        gate=GELU_TANH,
        norm_offset=1.0,
        has_output_norms=True,
        scales_embeddings=True,
        has_scalar=True,
        windows=Windows(layers="pattern", period=2),
    ),
    Family(
        title="Gemma 3",
        architecture="Gemma3ForCausalLM",
        base_architecture="Gemma3TextModel",
        model_type="gemma3_text",
        wrappers=("Gemma3ForConditionalGeneration",),
        defaults={
            "vocab_size": 262208,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "max_position_embeddings": 131072,
            "tie_word_embeddings": True,
            "sliding_window": 4096,
            "query_pre_attn_scalar": 256,
            "rope_theta": 1e6,
        },
        refused=("attn_logit_softcapping",),
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        qk_norm=ALWAYS,
        gate=GELU_TANH,
        norm_offset=1.0,
        has_output_norms=True,
        scales_embeddings=True,
        has_scalar=True,
        windows=Windows(layers="pattern", period=6, reads_period=True, has_own_rope=True),
    ),
    msgspec.structs.replace(
        _GEMMA_4_UNIFIED,
        title="Gemma 4",
        architecture="Gemma4ForCausalLM",
        base_architecture="Gemma4TextModel",
        model_type="gemma4_text",
        wrappers=("Gemma4ForConditionalGeneration",),
        defaults={
            **_GEMMA_4_UNIFIED.defaults,
            "max_position_embeddings": 131072,
            "sliding_window": 512,
            "norm_topk_prob": True,
        },
        renamed={"top_k_experts": "num_experts_per_tok"},
        has_layer_inputs=True,
        experts=Experts(
            block="",
            router="router.proj",
            stacked=("experts.gate_up_proj", "experts.down_proj"),
            switch="enable_moe_block",
            is_beside_mlp=True,
        ),
    ),
    _GEMMA_4_UNIFIED,
    Family(
        title="Llama 4",
        architecture="Llama4ForCausalLM",
        base_architecture="Llama4TextModel",
        model_type="llama4_text",
        wrappers=("Llama4ForConditionalGeneration",),
        defaults={
            "max_position_embeddings": 131072,
            "intermediate_size": 8192,
            "intermediate_size_mlp": 16384,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "rope_theta": 5e5,
            "num_local_experts": 16,
            "num_experts_per_tok": 1,
        },
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        mlp=MlpNames("feed_forward"),
        mlp_width="intermediate_size_mlp",
        rotates_neighbours=True,
        has_chunks=True,
        experts=Experts(
            routing="input_sigmoid",
            block="feed_forward",
            router="router",
            shared="shared_expert",
            stacked=("experts.gate_up_proj", "experts.down_proj"),
            is_transposed=True,
        ),
    ),
    Family(
        title="gpt-oss",
        architecture="GptOssForCausalLM",
        model_type="gpt_oss",
        defaults={
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "rms_norm_eps": 1e-5,
            "attention_bias": True,
            "sliding_window": 128,
            "torch_dtype": "bfloat16",  # its published folders name none
            "rope_theta": 1.5e5,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 32.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
        },
        refused=("attn_logit_softcapping",),
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        gate=CLAMPED,
        has_scalar=True,
        has_sinks=True,
        windows=Windows(layers="pattern", period=2),
        experts=Experts(router="router", is_interleaved=True, fills_layers=True),
    ),
    Family(
        title="GLM-4.5, 4.6",
        architecture="Glm4MoeForCausalLM",
        model_type="glm4_moe",
        defaults={
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
        },
        qkv_bias="attention_bias",
        qk_norm="use_qk_norm",
        partial_rotary_factor=0.5,
        experts=_DEEPSEEK_EXPERTS,
        has_nextn_layers=True,
    ),
    Family(
        title="MiniMax-M2",
        architecture="MiniMaxM2ForCausalLM",
        model_type="minimax_m2",
        defaults={
            "max_position_embeddings": 196608,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rope_theta": 5e6,
            "num_local_experts": 256,
            "num_experts_per_tok": 8,
        },
        qk_norm=ALWAYS,
        joins_qk_norm=True,
        partial_rotary_factor=1.0,
        experts=Experts(
            routing="sigmoid",
            block="block_sparse_moe",
            gate="w1",
            up="w3",
            down="w2",
            router_bias="e_score_correction_bias",
            fills_layers=True,
        ),
    ),
    Family(
        title="Phi-3, Phi-3.5-mini, Phi-4, Phi-4-mini",
        architecture="Phi3ForCausalLM",
        model_type="phi3",
        defaults={
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "original_max_position_embeddings": 4096,
        },
        is_fused=True,
        windows=Windows(reads_layer_types=False),
        partial_rotary_factor=1.0,
        rope_types={"su": "longrope", "yarn": "longrope"},  # in its first folders
    ),
    Family(
        title="DeepSeek-V2 (Lite, Coder)",
        architecture="DeepseekV2ForCausalLM",
        model_type="deepseek_v2",
        defaults={"max_position_embeddings": 2048},
        latent=Latent(is_interleaved=True),
        experts=Experts(routing="grouped_softmax", shared="shared_experts"),
        has_nextn_layers=True,
    ),
    Family(
        title="DeepSeek-V3, R1, Kimi-K2",
        architecture="DeepseekV3ForCausalLM",
        model_type="deepseek_v3",
        other_model_types=("kimi_k2",),
        wrappers=("KimiK25ForConditionalGeneration", "Kimi_K25ForConditionalGeneration"),
        defaults={"max_position_embeddings": 4096},
        latent=Latent(),
        experts=_DEEPSEEK_EXPERTS,
        has_nextn_layers=True,
    ),
    Family(
        title="DeepSeek-V3.2",
        architecture="DeepseekV32ForCausalLM",
        model_type="deepseek_v32",
        defaults={
            "max_position_embeddings": 163840,
            "index_n_heads": 64,
            "index_head_dim": 128,
            "index_topk": 2048,
        },
        latent=Latent(is_interleaved=True, index=Index()),
        experts=_DEEPSEEK_EXPERTS,
        has_nextn_layers=True,
    ),
    Family(
        title="GLM-5",
        architecture="GlmMoeDsaForCausalLM",
        model_type="glm_moe_dsa",
        defaults={
            "max_position_embeddings": 202752,
            "rms_norm_eps": 1e-5,
            "index_n_heads": 32,
            "index_head_dim": 128,
            "index_topk": 2048,
        },
        latent=Latent(is_interleaved=True, index=Index(is_interleaved=True, is_shared=True)),
        experts=_DEEPSEEK_EXPERTS,
        has_nextn_layers=True,
    ),
    Family(
        title="GLM-4.7-Flash",
        architecture="Glm4MoeLiteForCausalLM",
        model_type="glm4_moe_lite",
        defaults={"max_position_embeddings": 202752, "rms_norm_eps": 1e-5},
        latent=Latent(),
        experts=Experts(routing="grouped_sigmoid", shared="shared_experts", skips_first_layer=True),
        has_nextn_layers=True,
    ),
    Family(
        title="Kimi-Linear",
        architecture="KimiLinearForCausalLM",
        model_type="kimi_linear",
        defaults={
            "max_position_embeddings": 1048576,
            "rms_norm_eps": 1e-5,
            "q_lora_rank": None,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 2.446,
            "norm_topk_prob": True,
            "linear_head_dim": 128,
            "linear_num_heads": 32,
            "linear_conv_kernel_dim": 4,
        },
        renamed={
            "model_max_length": "max_position_embeddings",
            "moe_renormalize": "norm_topk_prob",
            "num_expert_group": "n_group",
            "num_experts": "n_routed_experts",
            "num_local_experts": "n_routed_experts",
            "num_experts_per_token": "num_experts_per_tok",
            "num_shared_experts": "n_shared_experts",
            "moe_router_activation_func": "scoring_func",
        },
        rotates=NEVER,
        latent=Latent(is_interleaved=False),
        state=StateLayers(kind="key_delta", block="self_attn"),
        experts=Experts(
            routing="grouped_sigmoid",
            block="block_sparse_moe",
            gate="w1",
            up="w3",
            down="w2",
            shared="shared_experts",
            shared_mlp=MlpNames(),
            skips_first_layer=True,
        ),
        has_nextn_layers=True,
    ),
    Family(
        title="Youtu-LLM",
        architecture="YoutuForCausalLM",
        model_type="youtu",
        defaults={"max_position_embeddings": 131072, "tie_word_embeddings": True},
        latent=Latent(),
        has_nextn_layers=True,
    ),
)
BY_ARCHITECTURE = {family.architecture: family for family in FAMILIES}
# Those that make no tokens, each with its head.
OTHER_HEADS = {
    name: (family, head) for family in FAMILIES for name, head in family.other_architectures.items()
}
BY_MODEL_TYPE = {family.model_type: family for family in FAMILIES}
WRAPPERS = {name for family in FAMILIES for name in family.wrappers}


def text_family(wrapper: str, model_type: str) -> Family | None:
    """Return the family of the text of a model that also sees; None if baton has none."""
    families = [family for family in FAMILIES if wrapper in family.wrappers]
    if not model_type:
        return families[0]
    named = (
        family
        for family in families
        if model_type in (family.model_type, *family.other_model_types)
    )
    return next(named, None)
