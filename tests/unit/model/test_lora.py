"""LoRA adapters compute what merged weights compute, whatever runs beside them, or are refused."""

import json
import os
import shutil
import struct
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from baton.kernels import reference
from baton.model.checkpoint.lora_files import fingerprint_of, read_adapters, tensor_of
from baton.model.config.decoder_config import read_decoder_config
from baton.model.layers.attention import AdaptedRows
from baton.model.layers.lora import Lora
from baton.model.layers.mlp import StackedExperts
from baton.model.loading.adapters import LoraLoader, LoraSite
from baton.model.runner.rank_plan import plan_rank
from baton.model.runner.runner import Runner
from baton.model.tensor_parallel import SharedMemoryRanks
from baton.node.scheduling.plan import StepPlan
from baton.protocol.errors import ConfigError
from tests.support.adapters import ALL, merged, write_adapter
from tests.support.checkpoints import model_folder, scratch_folder
from tests.support.compute import (
    Text,
    compute_config,
    greedy,
    loaded,
    logits,
    needs_rules,
    random_tokens,
)
from tests.support.depth import nightly
from tests.support.foreign_checkpoints import foreign_folder
from tests.support.thread_ranks import on_all, thread_ranks

MODEL = "qwen2"  # has biases in its projections
TOKENS = random_tokens(60, vocab=512)
SOME = (("q_proj", "v_proj"), ("up_proj",), ("down_proj",))
FUSED = ("qkv_proj", "gate_up_proj")


def text_with(lora: str, first_block: int = 0) -> Text:
    return Text(f"with {lora}", TOKENS, range(first_block, first_block + 5), lora)


def computed(runner: Runner, lora: str) -> torch.Tensor:
    return logits(runner, text_with(lora).chunk(0, len(TOKENS)))[0]


def expected(folder: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        return model(torch.tensor([TOKENS])).logits[0]


@pytest.mark.parametrize(
    ("targets", "use_rslora"),
    [
        (ALL, False),
        (ALL, True),
        (FUSED, False),
        *(nightly(some, False) for some in SOME),
        *(nightly(some, True) for some in (*SOME, FUSED)),
    ],
)
def test_an_adapter_computes_what_its_merged_weights_compute(targets, use_rslora):
    model = (
        foreign_folder("phi3")
        if targets == FUSED
        else model_folder(MODEL, num_layers=2)
    )
    adapter = write_adapter(model, targets, rank=9, use_rslora=use_rslora)
    theirs = expected(merged(model, adapter, 16 / (3 if use_rslora else 9)))
    modules = (f"mine={adapter}",)
    with loaded(compute_config(model, lora_modules=modules)) as runner:
        ours = computed(runner, "mine")
        plain = computed(runner, "")
    largest = theirs.abs().max()
    assert (ours - theirs).abs().max() < 2e-5 * largest
    assert (ours - plain).abs().max() > 1e-2 * largest

    def of_rank(member: SharedMemoryRanks) -> torch.Tensor:
        with loaded(compute_config(model, lora_modules=modules), member) as runner:
            return computed(runner, "mine")

    with thread_ranks(2) as members:
        split = on_all(members, of_rank)
    assert (split - theirs).abs().max() < 2e-5 * largest


def test_layers_may_have_ranks_and_factors_of_their_own():
    model = model_folder(MODEL, num_layers=2)
    adapter = write_adapter(
        model,
        ranks={"0.self_attn.q_proj": 20, "up_proj": 3},
        rank_pattern={"model.layers.0.self_attn.q_proj": 20, "up_proj": 3},
        alpha_pattern={r"\d+\.mlp\.(up|down)_proj": 6, "up_proj": 1000},
    )
    scalings = {"0.self_attn.q_proj": 16 / 20, "up_proj": 6 / 3, "down_proj": 6 / 8}
    theirs = expected(merged(model, adapter, 16 / 8, scalings))
    with loaded(compute_config(model, lora_modules=(f"mine={adapter}",))) as runner:
        ours = computed(runner, "mine")
    assert (ours - theirs).abs().max() < 2e-5 * theirs.abs().max()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_of_several_adapters_have_the_bits_they_have_alone(dtype):
    model = model_folder(MODEL, num_layers=2)
    one = write_adapter(model, rank=4)
    two = write_adapter(model, ("q_proj", "down_proj"), rank=16, seed=1)
    with loaded(compute_config(model, dtype)) as runner:
        plain = computed(runner, "")
    with loaded(
        compute_config(model, dtype, lora_modules=(f"1={one}", f"2={two}"))
    ) as runner:
        needs_rules(runner)
        alone = {lora: computed(runner, lora) for lora in ("", "1", "2")}
        assert torch.equal(alone[""], plain)
        assert not torch.equal(alone["1"], alone["2"])
        order = ("2", "", "1", "2", "", "1")
        texts = [text_with(lora, 5 * number) for number, lora in enumerate(order)]
        whole = logits(runner, *(text.chunk(0, len(TOKENS) - 1) for text in texts))
        last = logits(
            runner, *(text.chunk(len(TOKENS) - 1, len(TOKENS)) for text in texts)
        )
        for lora, first, end in zip(order, whole, last, strict=True):
            assert torch.equal(torch.cat([first, end]), alone[lora])
        # A step with samples computes its last layer for their rows alone.
        sampled = [
            text.chunk(len(TOKENS) - 1, len(TOKENS), sample=True) for text in texts
        ]
        wanted = [alone[lora][-1].argmax().item() for lora in order]
        batch = runner.pack(tuple(sampled))
        with torch.inference_mode():
            rows = torch.arange(len(order))
            hidden = runner.decoder.hidden(batch, rows, runner.backend)
            found = runner.decoder.logits(hidden, runner.backend)
        assert found.argmax(dim=1).tolist() == wanted
        assert torch.equal(found, torch.stack([alone[lora][-1] for lora in order]))
        assert greedy(runner, texts[0], 4) != greedy(runner, texts[1], 4)


def test_nodes_with_other_adapters_have_another_fingerprint():
    model = model_folder(MODEL, num_layers=2)
    config = read_decoder_config(model)
    one = write_adapter(model)
    two = write_adapter(model, seed=1)
    modules = [
        (),
        (f"a={one}",),
        (f"b={one}",),
        (f"a={two}",),
        (f"a={one}", f"b={two}"),
    ]
    found = {fingerprint_of(read_adapters(each, config)) for each in modules}
    assert len(found) == len(modules)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"peft_type": "loha"}, "peft_type loha"),
        ({"use_dora": True}, "use_dora"),
        (
            {"modules_to_save": ["lm_head"]},
            "lm_head",
        ),
        ({"modules_to_save": ["score"]}, "modules_to_save names score"),
        ({"bias": "lora_only"}, "bias 'lora_only'"),
        (
            {"rank_pattern": {"q_proj": 4}},
            "q_proj.lora_A.weight",
        ),
        ({"alpha_pattern": {"q_(": 4}}, "valid pattern"),
        ({"alora_invocation_tokens": [5]}, "alora_invocation_tokens"),
        ({"a_field_of_tomorrow": 1}, "a_field_of_tomorrow"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa'"),
        ({"r": 4}, "lora_A.weight"),
        ({"r": 0}, "adapter_config.json"),
        ({"target_modules": ["q_proj", "lm_head"]}, "target_modules names lm_head"),
    ],
)
def test_a_configuration_that_means_something_else_is_refused(fields, reason):
    model = model_folder(MODEL, num_layers=2)
    adapter = write_adapter(model, **fields)
    with pytest.raises(ConfigError, match=reason):
        plan_rank(compute_config(model, lora_modules=(f"mine={adapter}",)), 1)


def changed(name: str, *, to: str | None = None, cut: int = 0) -> Path:
    adapter = write_adapter(model_folder(MODEL, num_layers=2))
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    tensor = tensors.pop(f"base_model.model.model.layers.{name}.weight")
    if to is not None:
        tensors[f"base_model.model.{to}.weight"] = tensor[cut:].contiguous()
    save_file(tensors, file)
    return adapter


@pytest.mark.parametrize(
    ("adapter", "reason"),
    [
        (lambda: changed("1.self_attn.q_proj.lora_A"), "q_proj"),
        (
            lambda: changed("0.mlp.up_proj.lora_A", to="lm_head.lora_A"),
            "linear layer",
        ),
        (
            lambda: changed(
                "0.mlp.up_proj.lora_A", to="model.layers.7.mlp.up_proj.lora_A"
            ),
            "linear layer",
        ),
        (
            lambda: changed(
                "0.mlp.up_proj.lora_B", to="model.layers.0.mlp.up_proj.lora_B", cut=1
            ),
            "imply",
        ),
        (lambda: Path("/nowhere"), "adapter_config.json"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(adapter, reason):
    folder = adapter()
    config = read_decoder_config(model_folder(MODEL, num_layers=2))
    with pytest.raises(ConfigError, match=r"model\.lora_modules"):
        read_adapters((f"mine={folder}",), None)
    with pytest.raises(ConfigError, match=reason) as error:
        read_adapters((f"mine={folder}",), config)
    assert "\n" not in str(error.value)


def test_a_pipe_in_place_of_the_configuration_is_refused(tmp_path):
    os.mkfifo(tmp_path / "adapter_config.json")
    with pytest.raises(ConfigError, match=r"adapter_config\.json"):
        read_adapters(
            (f"mine={tmp_path}",),
            read_decoder_config(model_folder(MODEL, num_layers=2)),
        )


@pytest.mark.parametrize(
    "modules", [("mine",), ("=x",), ("a=x", "a=y"), ("two words=x",)]
)
def test_a_setting_that_is_no_list_of_names_and_folders_is_refused(modules):
    with pytest.raises(ConfigError, match=r"model\.lora_modules: "):
        read_adapters(modules, read_decoder_config(model_folder(MODEL, num_layers=2)))


def test_a_pattern_of_targets_takes_what_the_file_has():
    model = model_folder(MODEL, num_layers=2)
    adapter = write_adapter(model, ("q_proj",), target_modules=".*q_proj")
    assert json.loads((adapter / "adapter_config.json").read_text())["target_modules"]
    (found,) = read_adapters((f"mine={adapter}",), read_decoder_config(model))
    assert len(found.layers) == 2


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
def test_an_adapter_of_a_model_that_also_sees_changes_its_text(prefix):
    model = model_folder(MODEL, num_layers=2)
    plain, seeing = (write_adapter(model, ("q_proj",)) for _ in range(2))
    file = seeing / "adapter_model.safetensors"
    names = {
        name: name.replace(".model.model.", f".model.{prefix}")
        for name in load_file(file)
    }
    save_file({names[name]: tensor for name, tensor in load_file(file).items()}, file)
    results = []
    for adapter in (plain, seeing):
        with loaded(compute_config(model, lora_modules=(f"mine={adapter}",))) as runner:
            results.append(computed(runner, "mine"))
    assert torch.equal(*results)
    save_file({**load_file(plain / file.name), **load_file(file)}, file)
    with pytest.raises(ConfigError, match=r"self_attn\.q_proj"):
        read_adapters((f"mine={seeing}",), read_decoder_config(model))


def test_the_form_for_gpus_computes_the_same():
    """There, one kernel takes the stacked matrices; this is its twin in plain torch."""
    model = model_folder(MODEL, num_layers=2)
    folders = write_adapter(model, rank=4), write_adapter(model, rank=8, seed=1)
    config = read_decoder_config(model)
    adapters = read_adapters([f"{one.name}={one}" for one in folders], config)
    loader = LoraLoader(adapters, torch.device("cpu"), torch.float32)
    names = ("model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.v_proj")
    rows = slice(0, 128), slice(16, 32)
    site = LoraSite(names, rows, slice(0, 128))
    shrink = StackedExperts(
        torch.stack([*loader.shrinks(site)]), reference.grouped_product
    )
    expand = StackedExperts(
        torch.stack([*loader.expands(site)]), reference.grouped_product
    )
    x = torch.randn(5, 128)
    y = torch.zeros(5, 144)
    adapted = AdaptedRows(
        torch.tensor([1, 4, 0]), torch.tensor([1, 3], dtype=torch.int32)
    )
    ours = Lora(shrink, expand)(y, x, adapted)
    for row, folder in ((1, folders[0]), (4, folders[1]), (0, folders[1])):
        tensors = load_file(folder / "adapter_model.safetensors")
        scaling = 16 / len(tensors[tensor_of(names[0], "A")])
        found = []
        for name, own in zip(names, rows, strict=True):
            a = tensors[tensor_of(name, "A")]
            b = tensors[tensor_of(name, "B")]
            found.append(scaling * (b @ (a @ x[row]))[own])
        assert torch.allclose(ours[row], torch.cat(found), atol=1e-4)
    assert not ours[[2, 3]].any()


@pytest.mark.parametrize(
    "family", ["qwen3_moe", nightly("qwen2_moe"), nightly("mixtral")]
)
def test_adapters_of_experts_compute_what_their_merged_weights_compute(family):
    model = foreign_folder(family)
    names = (
        ("w1", "w2", "w3")
        if family == "mixtral"
        else ("gate_proj", "up_proj", "down_proj")
    )
    one = write_adapter(model, ("q_proj", *names), rank=4)
    two = write_adapter(model, names[1:], rank=3, seed=1)
    wanted = expected(merged(model, one, 16 / 4)), expected(merged(model, two, 16 / 3))
    config = compute_config(model, lora_modules=(f"1={one}", f"2={two}"))
    with loaded(config) as runner:
        alone = {lora: computed(runner, lora) for lora in ("1", "2", "")}
        for lora, theirs in zip(("1", "2"), wanted, strict=True):
            assert (alone[lora] - theirs).abs().max() < 2e-5 * theirs.abs().max()
        assert (alone["1"] - alone["2"]).abs().max() > 1e-3
        order = ("2", "", "1", "2")
        texts = [text_with(lora, 5 * number) for number, lora in enumerate(order)]
        if runner.decoder.is_batch_invariant:
            together = logits(runner, *(text.chunk(0, len(TOKENS)) for text in texts))
            for lora, rows in zip(order, together, strict=True):
                assert torch.equal(rows, alone[lora])

    def of_rank(member: SharedMemoryRanks) -> torch.Tensor:
        with loaded(config, member) as runner:
            return computed(runner, "1")

    with thread_ranks(2) as members:
        split = on_all(members, of_rank)
    assert (split - wanted[0]).abs().max() < 2e-5 * wanted[0].abs().max()


@pytest.mark.parametrize(
    "whole",
    [nightly(("lm_head",)), nightly(("embed_tokens",)), ("lm_head", "embed_tokens")],
)
def test_an_adapter_may_have_a_head_and_an_embedding_of_its_own(whole):
    model = model_folder(MODEL, num_layers=2)
    one = write_adapter(model, rank=4, whole=whole)
    two = write_adapter(model, rank=4, seed=1)
    theirs = expected(merged(model, one, 16 / 4))
    config = compute_config(model, lora_modules=(f"2={two}", f"1={one}"))
    with loaded(config) as runner:
        alone = {lora: computed(runner, lora) for lora in ("1", "2", "")}
        assert (alone["1"] - theirs).abs().max() < 2e-5 * theirs.abs().max()
        order = ("1", "", "2", "1")
        texts = [text_with(lora, 5 * number) for number, lora in enumerate(order)]
        together = logits(runner, *(text.chunk(0, len(TOKENS)) for text in texts))
        if runner.decoder.is_batch_invariant:
            for lora, rows in zip(order, together, strict=True):
                assert torch.equal(rows, alone[lora])
        # A step that samples, and scores its prompt, takes the same head.
        part = texts[0].chunk(0, len(TOKENS), sample=True)
        others = [
            text.chunk(len(TOKENS) - 1, len(TOKENS), sample=True) for text in texts[1:]
        ]
        part = msgspec.structs.replace(part, targets=tuple(TOKENS[1:]), num_top=1)
        result = runner.execute(StepPlan(0, (*others, part)))
        best = [int(alone[lora][-1].argmax()) for lora in (*order[1:], "1")]
        assert [token for (token,) in result.tokens] == best
        ((_, scores),) = result.prompt_logprobs
        tops = [top for _, _, top, _ in struct.iter_unpack("<ifif", scores)]
        assert tops == alone["1"][:-1].argmax(dim=1).tolist()

    def of_rank(member: SharedMemoryRanks) -> torch.Tensor:
        with loaded(config, member) as runner:
            return computed(runner, "1")

    with thread_ranks(2) as members:
        split = on_all(members, of_rank)
    assert (split - theirs).abs().max() < 2e-5 * theirs.abs().max()


def test_a_head_of_another_shape_or_without_numbers_is_refused():
    model = model_folder(MODEL, num_layers=2)
    other = model_folder(MODEL, num_layers=2, vocab_size=512)
    adapter = write_adapter(model, whole=("lm_head",))
    with pytest.raises(ConfigError, match=r"lm_head\.weight"):
        read_adapters((f"mine={adapter}",), read_decoder_config(other))
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    tensors["base_model.model.lm_head.weight"][5, 3] = torch.nan
    save_file(tensors, file)
    broken = loaded(compute_config(model, lora_modules=(f"mine={adapter}",)))
    with pytest.raises(ConfigError, match="the adapter's lm_head holds NaN"), broken:
        pass


def write_expert_adapter(
    model: Path, version: str = "0.21.2", rank: int = 4
) -> tuple[Path, Path]:
    """An adapter of `target_parameters`, and a copy of the model whose weights hold it."""
    weights = load_file(model / "model.safetensors")
    generator = torch.Generator().manual_seed(3)
    adapter = scratch_folder("adapter")
    tensors = {}
    kinds = (("gate_proj", "up_proj"), ".base_layer"), (("down_proj",), "")
    for name in [name for name in weights if "experts.0.gate_proj" in name]:
        block = name.partition("experts.0.")[0] + "experts."
        num = sum(other.startswith(block) for other in weights) // 3
        for linears, nested in kinds:
            whole = [
                torch.cat(
                    [weights[f"{block}{number}.{linear}.weight"] for linear in linears]
                )
                for number in range(num)
            ]
            outputs, inputs = whole[0].shape
            a = torch.randn(num * rank, inputs, generator=generator) * inputs**-0.5
            b = torch.randn(outputs, rank * num, generator=generator) * 0.1
            begin = f"base_model.model.{block.removesuffix('.')}{nested}.lora_"
            tensors |= {f"{begin}A.weight": a, f"{begin}B.weight": b}
            for number in range(num):
                added = (
                    b.view(outputs, rank, num)[:, :, number]
                    @ a.view(num, rank, inputs)[number]
                )
                rows = (whole[number] + 16 / rank * added).chunk(len(linears))
                for linear, part in zip(linears, rows, strict=True):
                    weights[f"{block}{number}.{linear}.weight"] = part.contiguous()
    save_file(tensors, adapter / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 16,
        "target_modules": [],
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        "peft_version": version,
    }
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    whole_model = scratch_folder("merged")
    shutil.copytree(model, whole_model, dirs_exist_ok=True)
    save_file(weights, whole_model / "model.safetensors", {"format": "pt"})
    return adapter, whole_model


def test_adapters_of_all_experts_in_one_parameter_compute_the_same():
    model = foreign_folder("qwen3_moe")
    adapter, whole = write_expert_adapter(model)
    theirs = expected(whole)
    config = compute_config(model, lora_modules=(f"mine={adapter}",))
    with loaded(config) as runner:
        assert (
            computed(runner, "mine") - theirs
        ).abs().max() < 2e-5 * theirs.abs().max()
        assert (computed(runner, "") - theirs).abs().max() > 1e-3

    def of_rank(member: SharedMemoryRanks) -> torch.Tensor:
        with loaded(config, member) as runner:
            return computed(runner, "mine")

    with thread_ranks(2) as members:
        split = on_all(members, of_rank)
    assert (split - theirs).abs().max() < 2e-5 * theirs.abs().max()


def test_matrices_of_all_experts_that_do_not_fit_are_refused():
    model = foreign_folder("qwen3_moe")
    config = read_decoder_config(model)
    adapter, _ = write_expert_adapter(model, "0.18.0")
    with pytest.raises(
        ConfigError, match=r"PEFT 0\.18\.0 may have swapped inputs and outputs"
    ):
        read_adapters((f"mine={adapter}",), config)
    adapter, _ = write_expert_adapter(model)
    file = adapter / "adapter_model.safetensors"
    described = adapter / "adapter_config.json"
    fields = json.loads(described.read_text())
    tensors = load_file(file)
    for wrong, reason in (
        (
            {"r": 2},
            r"have the shapes \[32, 64\] and \[64, 32\], but r and the model imply others",
        ),
        (
            {"target_parameters": ["mlp.gate.weight"]},
            "names mlp.gate.weight, but no tensor",
        ),
        (
            {"alpha_pattern": {"experts": 2}},
            "target_parameters are not supported beside patterns",
        ),
    ):
        described.write_text(json.dumps(fields | wrong))
        with pytest.raises(ConfigError, match=reason):
            read_adapters((f"mine={adapter}",), config)
    described.write_text(json.dumps(fields))
    down = {
        name: tensor for name, tensor in tensors.items() if "base_layer" not in name
    }
    save_file(down, file)
    with pytest.raises(ConfigError, match=r"names mlp\.experts\.gate_up_proj, but no"):
        read_adapters((f"mine={adapter}",), config)
    with pytest.raises(ConfigError, match=r"mlp\.experts"):
        read_adapters(
            (f"mine={adapter}",), read_decoder_config(model_folder(MODEL, num_layers=2))
        )
