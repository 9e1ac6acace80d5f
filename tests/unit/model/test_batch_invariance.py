"""A token's logits depend on its own sequence alone, bit for bit, on CPUs."""

import pytest
import torch
from torch import Tensor

from baton.model.batch_invariance.row_rule import MIN_ROWS, num_threads
from tests.support.checkpoints import Shape, model_folder
from tests.support.compute import (
    Text,
    chunked_logits,
    compute_config,
    loaded,
    logits,
    needs_rules,
    random_tokens,
)

# Group sizes 4, 2 and 1, odd widths, a bias, a window in all layers or one: each is another path
# through a library.
SHAPES: dict[str, tuple[str, Shape]] = {
    "qwen3": ("qwen3", {"num_heads": 8, "num_kv_heads": 2, "head_dim": 64}),
    "qwen2": (
        "qwen2",
        {
            "intermediate_size": 344,
            "vocab_size": 1023,
            "sliding_window": 140,
            "extra": '{"max_window_layers": 1}',
        },
    ),
    "mistral": ("mistral", {"num_kv_heads": 4, "sliding_window": 140}),
    "wide": ("llama", {"hidden_size": 512, "intermediate_size": 3072, "num_heads": 8}),
}
LENGTH = 300  # three tiles of keys


@pytest.fixture(
    scope="module",
    params=[
        *(
            (name, dtype, "auto")
            for name in SHAPES
            for dtype in ("float32", "bfloat16")
        ),
        *(("mistral", dtype, "fp8") for dtype in ("float32", "bfloat16")),
    ],
    ids="-".join,
)
def runner(request):
    name, dtype, kv_cache_dtype = request.param
    family, shape = SHAPES[name]
    folder = model_folder(family, num_layers=2, **shape)
    config = compute_config(
        folder, dtype=dtype, num_blocks=250, kv_cache_dtype=kv_cache_dtype
    )
    with loaded(config) as loaded_runner:
        needs_rules(loaded_runner)
        yield loaded_runner


def text(name: str, length: int = LENGTH, first_block: int = 0) -> Text:
    """Blocks in falling order: a table that is read as a range is found out."""
    num_blocks = -(-length // 16)
    return Text(
        name,
        random_tokens(length, seed=sum(name.encode()), vocab=1023),
        range(first_block + num_blocks - 1, first_block - 1, -1),
    )


def assert_same_bits(ours: Tensor, expected: Tensor) -> None:
    rows = (ours != expected).any(dim=-1).nonzero().flatten().tolist()
    assert not rows, f"tokens {rows[:8]} of {len(expected)} differ"


def test_chunk_sizes_leave_no_trace(runner):
    one = text("one")
    expected = chunked_logits(runner, one, [LENGTH])
    for sizes in ([7, 1, 2, 3, 5, 100], [64], [1, 127, 129, 43], [299, 1], [144, 6]):
        assert_same_bits(chunked_logits(runner, one, sizes), expected)


def test_decoding_neighbours_leave_no_trace(runner):
    """Contexts of one to three tiles side by side, so padding and grouping are at work."""
    lengths = [LENGTH, 1, 17, 128, 129, 250, 16, 256, 90]
    first = 0
    texts = []
    for number, length in enumerate(lengths):
        texts.append(text(str(number), length, first))
        first += -(-length // 16)
    alone = [chunked_logits(runner, each, [len(each.tokens)])[-1:] for each in texts]
    for batch in range(1, len(texts) + 1):
        steps = [
            each.chunk(len(each.tokens) - 1, len(each.tokens)) for each in texts[:batch]
        ]
        for ours, expected in zip(logits(runner, *steps), alone, strict=False):
            assert_same_bits(ours, expected)


def test_prompts_and_decoding_mix_in_one_batch(runner):
    texts = [text("a", 200), text("b", 40, 20), text("c", 131, 40), text("d", 9, 60)]
    alone = [chunked_logits(runner, each, [len(each.tokens)]) for each in texts]
    a, b, c, d = texts
    mixed = logits(
        runner, a.chunk(150, 200), b.chunk(39, 40), c.chunk(0, 131), d.chunk(7, 9)
    )
    expected = [alone[0][150:], alone[1][39:], alone[2], alone[3][7:]]
    for ours, theirs in zip(mixed, expected, strict=True):
        assert_same_bits(ours, theirs)


def test_rows_that_are_asked_for_alone_have_the_bits_of_all(runner):
    a = text("a", 200)
    b = text("b", 40, 20)
    chunked_logits(runner, a, [150, 50])
    slices = a.chunk(150, 200), b.chunk(0, 40)
    expected = torch.cat(logits(runner, *slices))
    batch = runner.pack(slices)
    for rows in ([49, 89], [0, 48, 50, 89], [7], []):
        with torch.inference_mode():
            found = runner.decoder.forward(
                batch, torch.tensor(rows, dtype=torch.int64), runner.backend
            )
        assert found.shape == (len(rows), expected.shape[1])
        assert_same_bits(found, expected[rows])


@pytest.mark.parametrize(
    ("dtype", "threads"), [("float32", 2), ("bfloat16", 3), ("bfloat16", 4)]
)
def test_the_number_of_threads_leaves_no_trace(dtype, threads):
    config = compute_config(model_folder("qwen2", num_layers=2), dtype, num_blocks=40)
    one = text("one", 4 * MIN_ROWS + 100)
    with loaded(config) as runner:
        needs_rules(runner)
        expected = chunked_logits(runner, one, [len(one.tokens)])
    with num_threads(threads), loaded(config) as runner:
        # The threads share many rows, or the work of each operation.
        sizes = [4 * MIN_ROWS + 3, 1, 9, 87]
        assert_same_bits(chunked_logits(runner, one, sizes), expected)


@pytest.mark.parametrize(
    ("dtype", "block_size"),
    [
        *(("float32", size) for size in (1, 64, 1024)),
        *(("bfloat16", size) for size in (16, 24, 256)),
    ],
)
def test_long_contexts_leave_no_trace_at_any_block_size(dtype, block_size):
    """More keys than one product takes in either dtype, garbage behind them."""
    folder = model_folder("qwen3", num_layers=2)
    num_blocks = -(-1100 // block_size)
    with loaded(
        compute_config(folder, dtype, 2 * num_blocks + 1, block_size)
    ) as runner:
        needs_rules(runner)
        runner.cache.pool.fill_(float("nan"))
        tokens = random_tokens(1100)
        one = Text("one", tokens, range(num_blocks))
        other = Text("other", tokens[:530], range(num_blocks, 2 * num_blocks))
        expected = chunked_logits(runner, one, [1100])
        assert_same_bits(chunked_logits(runner, other, [500, 28, 1]), expected[:530])
        both = logits(
            runner, one.chunk(1099, 1100), other.chunk(529, 530), one.chunk(700, 720)
        )
        assert_same_bits(
            torch.cat(both),
            torch.cat((expected[-1:], expected[529:530], expected[700:720])),
        )
