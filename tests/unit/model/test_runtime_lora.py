"""An adapter that is loaded at run time computes what it does from the start, and disturbs none."""

from pathlib import Path

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM

from baton.kernels import reference
from baton.model.checkpoint.lora_files import read_adapter
from baton.model.config.decoder_config import read_decoder_config
from baton.model.layers.attention import AdaptedRows
from baton.model.layers.lora import Lora
from baton.model.layers.mlp import StackedExperts
from baton.model.loading.adapters import LoraLoader, LoraSite, LoraSpace
from baton.model.runner.compute_digest import compute_path
from baton.model.runner.rank_plan import plan_rank
from baton.model.runner.runner import Runner
from baton.model.tensor_parallel import SharedMemoryRanks
from baton.protocol.config import ClusterConfig
from baton.protocol.errors import ConfigError
from tests.support.adapters import merged, write_adapter
from tests.support.checkpoints import model_folder
from tests.support.compute import (
    Text,
    compute_config,
    loaded,
    logits,
    needs_rules,
    random_tokens,
)
from tests.support.foreign_checkpoints import foreign_folder
from tests.support.thread_ranks import on_all, thread_ranks

TOKENS = random_tokens(60, vocab=512)


def with_room(
    folder: Path, dtype: str = "float32", modules: tuple[str, ...] = ()
) -> ClusterConfig:
    config = compute_config(folder, dtype, lora_modules=modules)
    model = msgspec.structs.replace(
        config.model, allow_runtime_lora_updating=True, max_loras=2, max_lora_rank=8
    )
    return msgspec.structs.replace(config, model=model)


def put(runner: Runner, model: Path, adapter: Path, lora: str, slot: int) -> None:
    assert runner.loras is not None
    read = read_adapter(lora, adapter, read_decoder_config(model))
    runner.put_adapter(runner.loras.prepare(lora, read, slot))


def computed(runner: Runner, lora: str) -> torch.Tensor:
    text = Text(f"with {lora}", TOKENS, range(5), lora)
    return logits(runner, text.chunk(0, len(TOKENS)))[0]


def expected(folder: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        return model(torch.tensor([TOKENS])).logits[0]


@pytest.mark.parametrize("family", ["qwen2", "phi3"])
def test_it_computes_what_its_merged_weights_compute(family):
    fused = ("qkv_proj", "gate_up_proj")
    model = (
        foreign_folder(family)
        if family == "phi3"
        else model_folder(family, num_layers=2)
    )
    targets = (
        fused
        if family == "phi3"
        else ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj")
    )
    adapter = write_adapter(model, targets, rank=5)
    theirs = expected(merged(model, adapter, 16 / 5))
    with loaded(with_room(model)) as runner:
        plain = computed(runner, "")
        put(runner, model, adapter, "mine", 1)
        assert (
            computed(runner, "mine") - theirs
        ).abs().max() < 2e-5 * theirs.abs().max()
        assert torch.equal(computed(runner, ""), plain)

    def of_rank(member: SharedMemoryRanks) -> torch.Tensor:
        with loaded(with_room(model), member) as runner:
            put(runner, model, adapter, "mine", 0)
            return computed(runner, "mine")

    with thread_ranks(2) as members:
        split = on_all(members, of_rank)
    assert (split - theirs).abs().max() < 2e-5 * theirs.abs().max()


def test_room_for_other_ranks_is_another_order_of_sums():
    """The matrices of joined layers begin elsewhere."""
    config = with_room(model_folder("qwen2", num_layers=2))
    model = msgspec.structs.replace(config.model, max_lora_rank=16)
    wider = msgspec.structs.replace(config, model=model)
    with loaded(config) as narrow, loaded(config) as again, loaded(wider) as wide:
        assert compute_path(narrow) == compute_path(again) != compute_path(wide)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_others_keep_their_bits_and_a_slot_takes_the_next(dtype):
    model = model_folder("qwen2", num_layers=2)
    first, one, two = (
        write_adapter(model, rank=4 + seed, seed=seed) for seed in range(3)
    )
    with loaded(with_room(model, dtype, (f"first={first}",))) as runner:
        needs_rules(runner)
        before = {lora: computed(runner, lora) for lora in ("", "first")}
        put(runner, model, one, "one", 0)
        alone = computed(runner, "one")
        put(runner, model, two, "two", 2)
        order = ("two", "", "one", "first", "two")
        texts = [
            Text(f"{place}", TOKENS, range(5 * place, 5 * place + 5), lora)
            for place, lora in enumerate(order)
        ]
        together = logits(runner, *(text.chunk(0, len(TOKENS)) for text in texts))
        before |= {"one": alone, "two": computed(runner, "two")}
        for lora, rows in zip(order, together, strict=True):
            assert torch.equal(rows, before[lora])
        assert not torch.equal(before["one"], before["two"])
        put(runner, model, one, "another one", 2)
        assert torch.equal(computed(runner, "another one"), alone)
        with pytest.raises(KeyError):
            computed(runner, "two")


def test_an_adapter_that_does_not_fit_changes_nothing():
    model = model_folder("qwen2", num_layers=2)
    wide = write_adapter(model, rank=9)
    with loaded(with_room(model)) as runner:
        with pytest.raises(ConfigError, match=r"model\.max_lora_rank"):
            put(runner, model, wide, "wide", 0)
        with pytest.raises(ConfigError, match=r"No such file"):
            put(runner, model, Path("/nowhere"), "gone", 0)
    with loaded(compute_config(model)) as runner:
        # Without the setting, it costs nothing.
        assert not list(runner.decoder.of_adapters)


@pytest.mark.parametrize("family", ["deepseek_v3"])
def test_models_without_adapters_have_no_room_for_them(family):
    with pytest.raises(
        ConfigError, match=r"model\.allow_runtime_lora_updating: latent"
    ):
        plan_rank(with_room(foreign_folder(family)), 1)


def test_a_slot_of_the_form_for_gpus_is_written_in_place():
    model = model_folder("qwen2", num_layers=1)
    adapter = read_adapter(
        "mine", write_adapter(model, ("q_proj",), rank=4), read_decoder_config(model)
    )
    loader = LoraLoader((), torch.device("cpu"), torch.float32, LoraSpace(2, 8))
    name = "model.layers.0.self_attn.q_proj"
    adapter = adapter._replace(layers={name: adapter.layers[name]})
    site = LoraSite((name,), (slice(0, 128),), slice(0, 128))
    lora = Lora(
        StackedExperts(torch.stack([*loader.shrinks(site)]), reference.grouped_product),
        StackedExperts(torch.stack([*loader.expands(site)]), reference.grouped_product),
    )
    loader.add(site, lora, None)
    x = torch.randn(3, 128)
    adapted = AdaptedRows(torch.tensor([0, 2]), torch.tensor([1, 2], dtype=torch.int32))
    assert not lora(torch.zeros(3, 128), x, adapted).any()
    weight = lora.shrink.weight
    loader.prepare("mine", adapter, 1).put()
    assert lora.shrink.weight is weight
    y = lora(torch.zeros(3, 128), x, adapted)
    assert not y[:2].any()
    reader = loader.prepare("mine", adapter, 1).sites[0]
    assert torch.allclose(y[2], reader.expand @ (reader.shrink @ x[2]), atol=1e-5)
    assert y[2].any()


def test_experts_are_changed_by_adapters_of_the_settings_alone():
    model = foreign_folder("qwen3_moe")
    of_experts = write_adapter(model, ("up_proj",))
    of_attention = write_adapter(model, ("q_proj",))
    with loaded(with_room(model, modules=(f"experts={of_experts}",))) as runner:
        alone = {lora: computed(runner, lora) for lora in ("", "experts")}
        with pytest.raises(ConfigError, match=r"experts\.0\.up_proj"):
            put(runner, model, of_experts, "more", 0)
        put(runner, model, of_attention, "mine", 0)
        texts = [
            Text(f"{place}", TOKENS, range(5 * place, 5 * place + 5), lora)
            for place, lora in enumerate(("mine", "experts", ""))
        ]
        mine, experts, plain = logits(
            runner, *(text.chunk(0, len(TOKENS)) for text in texts)
        )
        assert torch.equal(mine, computed(runner, "mine"))
        assert torch.equal(experts, alone["experts"])
        assert torch.equal(plain, alone[""])
        assert not torch.equal(mine, plain)


def test_a_head_of_its_own_comes_and_goes_with_an_adapter():
    model = model_folder("qwen2", num_layers=2)
    one = write_adapter(model, rank=4, whole=("lm_head", "embed_tokens"))
    two = write_adapter(model, rank=4)
    with loaded(with_room(model)) as runner:
        put(runner, model, two, "two", 1)
        before = computed(runner, "two")
        put(runner, model, one, "one", 0)
        theirs = expected(merged(model, one, 16 / 4))
        assert (
            computed(runner, "one") - theirs
        ).abs().max() < 2e-5 * theirs.abs().max()
        put(runner, model, two, "two again", 0)
        assert torch.equal(computed(runner, "two again"), before)
