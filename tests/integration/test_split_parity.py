"""Split serving says what transformers says, for every family, length and cache state.

Greedy, fp32. Counters prove that decode computed no prompt token and that exactly the blocks it
lacked were moved.
"""

import asyncio
from functools import cache
from pathlib import Path

import msgspec
import pytest

from baton.async_llm import AsyncLLM
from baton.prompts import LoRARequest
from baton.protocol.config import ClusterConfig
from baton.protocol.messages import Role
from baton.protocol.sampling import SamplingParams
from baton.router.outputs import RequestOutput
from tests.support.adapters import merged, write_adapter
from tests.support.checkpoints import FAMILIES, model_folder, tiny_cluster
from tests.support.compute import Text, chunked_logits, compute_config, loaded, logits
from tests.support.depth import nightly
from tests.support.foreign_checkpoints import foreign_folder
from tests.support.node_threads import NodeThreads, always_local, never_local
from tests.support.oracle import Expected, Oracle, count_ties, prompt

BLOCK = 16
CHUNK = 64
NUM_TOKENS = 40
LENGTHS = (1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * CHUNK + 5)
LONG = 4_100


@cache
def oracle(folder: Path) -> Oracle:
    return Oracle(folder)


@cache
def expected_of(folder: Path, length: int) -> Expected:
    return oracle(folder).greedy(prompt(length), NUM_TOKENS)


def expected(family: str, length: int) -> Expected:
    return expected_of(model_folder(family), length)


def settings(
    checkpoint: str | Path, *, verify: bool = False, **cache: object
) -> ClusterConfig:
    return tiny_cluster(
        checkpoint,
        cache={"block_size": BLOCK, "num_blocks": 700, **cache},
        engine={"max_num_batched_tokens": CHUNK, "max_num_seqs": 16},
        transfer={"verify_kv": verify},
    )


async def greedy(
    llm: AsyncLLM,
    token_ids: list[int],
    num_tokens: int = NUM_TOKENS,
    adapter: LoRARequest | None = None,
) -> RequestOutput:
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    async for output in llm.generate(token_ids, params, lora_request=adapter):
        last = output
    assert last.finished
    return last


@pytest.mark.parametrize(
    ("family", "lengths"),
    [
        ("llama", (*LENGTHS, LONG)),
        *((family, LENGTHS) for family in FAMILIES if family != "llama"),
        nightly("mistral", (*LENGTHS, LONG)),  # which has a window
    ],
)
def test_split_serving_says_what_transformers_says(family, lengths, tmp_path):
    async def all_at_once(llm: AsyncLLM) -> list[RequestOutput]:
        return await asyncio.gather(*(greedy(llm, prompt(n)) for n in lengths))

    cluster = NodeThreads(
        tmp_path, never_local(settings(family, enable_prefix_caching=False))
    )
    outputs = cluster.run(all_at_once)
    ties = 0
    for length, output in zip(lengths, outputs, strict=True):
        ties += count_ties(expected(family, length), output.outputs[0].token_ids)
        assert output.metrics.path == "disaggregated"
    assert ties <= 1
    assert cluster.prompt_tokens_computed("decode-0") == 0
    assert cluster.prompt_tokens_computed("prefill-0") == sum(lengths)
    num_blocks = sum(-(-n // BLOCK) for n in lengths)
    assert cluster.num_bytes_read("decode-0") == num_blocks * cluster.block_bytes


@pytest.mark.parametrize(
    ("family", "is_split", "prefill_hits", "decode_hits"),
    [
        ("llama", True, True, True),
        ("mistral", True, False, True),
        ("qwen2", True, True, False),
        ("qwen3", False, False, True),
    ],
)
def test_prefix_hits_on_either_side_change_nothing(
    family, is_split, prefill_hits, decode_hits, tmp_path
):
    length = 5 * BLOCK + 3
    config = (never_local if is_split else always_local)(settings(family))
    cluster = NodeThreads(
        tmp_path, config, prefix={"prefill": prefill_hits, "decode": decode_hits}
    )

    async def twice(llm: AsyncLLM) -> list[RequestOutput]:
        return [await greedy(llm, prompt(length)) for _ in range(2)]

    for output in cluster.run(twice):
        assert count_ties(expected(family, length), output.outputs[0].token_ids) == 0
    again = 3 if (prefill_hits if is_split else decode_hits) else length
    computes = "prefill-0" if is_split else "decode-0"
    assert cluster.prompt_tokens_computed(computes) == length + again
    moved = 6 + (1 if decode_hits else 6) if is_split else 0
    assert cluster.num_bytes_read("decode-0") == moved * cluster.block_bytes


@pytest.mark.parametrize(
    ("family", "prefill", "decode", "kv_heads", "verify"),
    [
        ("llama", 1, 2, 2, True),
        ("qwen3", 2, 1, 2, True),
        # Two ranks of decode read the same head, or two ranks of prefill hold it.
        nightly("qwen3", 2, 4, 2, True),
        nightly("llama", 4, 2, 2, False),
    ],
)
def test_any_degrees_on_both_sides_say_what_one_rank_says(
    family, prefill, decode, kv_heads, verify, tmp_path
):
    folder = model_folder(family, num_kv_heads=kv_heads)
    adapter = write_adapter(folder)
    config = settings(folder, verify=verify, enable_prefix_caching=False)
    model = msgspec.structs.replace(config.model, lora_modules=(f"mine={adapter}",))
    config = msgspec.structs.replace(config, model=model)
    ranks: dict[Role, int] = {"prefill": prefill, "decode": decode}
    cluster = NodeThreads(tmp_path, never_local(config), ranks=ranks)
    # The same prompts again with the adapter, beside those without.
    lengths = LENGTHS[2:] * 2
    models = [folder] * 3 + [merged(folder, adapter, 2.0)] * 3

    async def some(llm: AsyncLLM) -> list[RequestOutput]:
        chosen = [None if model == folder else LoRARequest("mine") for model in models]
        pairs = zip(lengths, chosen, strict=True)
        return await asyncio.gather(
            *(greedy(llm, prompt(n), adapter=one) for n, one in pairs)
        )

    outputs = cluster.run(some)
    for length, of_model, output in zip(lengths, models, outputs, strict=True):
        count_ties(expected_of(of_model, length), output.outputs[0].token_ids)
    assert outputs[0].outputs[0].token_ids != outputs[3].outputs[0].token_ids
    assert cluster.prompt_tokens_computed("decode-0") == 0
    # Every rank of decode gets its heads once, also those that another rank gets too.
    num_bytes = sum(-(-n // BLOCK) for n in lengths) * cluster.block_bytes
    num_bytes *= max(1, decode // kv_heads)
    assert cluster.num_bytes_read("decode-0") == num_bytes
    assert sum(output.metrics.transfer_bytes for output in outputs) == num_bytes


def said_with_fp8_blocks(folder: Path, length: int) -> Expected:
    """What one rank says that computes the prompt itself, and the gaps between its logits."""
    text = Text("one", prompt(length), range(40))
    token_ids = []
    gaps = []
    with loaded(compute_config(folder, kv_cache_dtype="fp8")) as runner:
        row = chunked_logits(runner, text, [CHUNK])[-1]
        for _ in range(NUM_TOKENS):
            best = row.topk(2).values
            token_ids.append(int(row.argmax()))
            gaps.append(float(best[0] - best[1]))
            text.tokens.append(token_ids[-1])
            row = logits(runner, text.chunk(len(text.tokens) - 1, len(text.tokens)))[0][
                0
            ]
    return Expected(token_ids, gaps)


@pytest.mark.parametrize(("prefill", "decode"), [(1, 1), nightly(1, 2), nightly(2, 1)])
def test_fp8_blocks_take_a_quarter_of_the_bytes_to_any_degree(
    prefill, decode, tmp_path
):
    """Each slice of heads brings its exponents. The bytes are those of fp32, and one for a row."""
    folder = model_folder("llama", num_kv_heads=2, head_dim=32)
    config = settings(folder, verify=True)
    engine = msgspec.structs.replace(config.engine, kv_cache_dtype="fp8")
    config = msgspec.structs.replace(config, engine=engine)
    ranks: dict[Role, int] = {"prefill": prefill, "decode": decode}
    cluster = NodeThreads(tmp_path, never_local(config), ranks=ranks)

    async def some(llm: AsyncLLM) -> list[RequestOutput]:
        return await asyncio.gather(*(greedy(llm, prompt(n)) for n in LENGTHS))

    for length, output in zip(LENGTHS, cluster.run(some), strict=True):
        expected = said_with_fp8_blocks(folder, length)
        token_ids = output.outputs[0].token_ids
        if prefill == decode:
            assert token_ids == expected.token_ids
        else:  # the sums over ranks have other bits, which may round to other codes
            count_ties(expected, token_ids)
    assert cluster.prompt_tokens_computed("decode-0") == 0
    num_blocks = sum(-(-n // BLOCK) for n in LENGTHS)
    assert (
        cluster.num_bytes_read("decode-0")
        == num_blocks * cluster.block_bytes * 33 // 128
    )


@pytest.mark.parametrize(
    ("kind", "prefill", "decode"),
    [
        ("qwen2_moe", 1, 1),
        ("olmo2", 1, 1),  # transformers' code computes it
        nightly("mixtral", 1, 2),
        ("deepseek_v3", 1, 2),  # each rank of decode reads the same rows
        nightly("deepseek_v2", 2, 1),
        nightly("deepseek_v32", 1, 2),
        nightly("glm_moe_dsa", 2, 1),
        nightly("gpt_oss", 1, 2),
        nightly("llama4_text", 1, 2),
        nightly("llama4_text", 2, 1),
        nightly("gemma4_text", 1, 2),
        ("gemma4_text", 2, 1),
        nightly("glm4_moe", 1, 2),
        nightly("minimax_m2", 1, 2),
        nightly("minimax_m2", 2, 4),
        nightly("phi3", 2, 4),
        nightly("gpt_oss", 2, 4),
        nightly("gemma2", 4, 2),
        nightly("gemma3_text", 1, 2),
    ],
)
def test_a_crowd_of_sequences_shares_experts_or_transformers_code(
    kind, prefill, decode, tmp_path
):
    """The second time with cached prefixes, on ranks that hold a part of each expert."""
    folder = foreign_folder(kind)
    ranks: dict[Role, int] = {"prefill": prefill, "decode": decode}
    cluster = NodeThreads(tmp_path, never_local(settings(folder)), ranks=ranks)

    async def twice(llm: AsyncLLM) -> list[RequestOutput]:
        again = [
            await asyncio.gather(*(greedy(llm, prompt(n)) for n in LENGTHS))
            for _ in range(2)
        ]
        return again[0] + again[1]

    for length, output in zip(LENGTHS * 2, cluster.run(twice), strict=True):
        assert count_ties(expected_of(folder, length), output.outputs[0].token_ids) == 0
    assert cluster.prompt_tokens_computed("decode-0") == 0
