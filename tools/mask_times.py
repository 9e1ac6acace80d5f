"""How long masks take: `python -m tools.mask_times FOLDER [VOCAB_SIZE]`.

Sequences write one document under a JSON schema. Each step makes a mask for every sequence and
applies it to logits, on one thread.
"""

import json
import sys
from pathlib import Path
from time import perf_counter

import torch
from tokenizers import Tokenizer

from baton.model.sampling.sampler import apply_masks
from baton.model.sampling.token_masks import NoMask, TokenMasks, Words
from baton.node.scheduling.plan import Slice
from baton.protocol.ids import Key, RequestId
from baton.protocol.sampling import Sampling, StructuredOutputsParams
from baton.router.text.grammars import checked_grammar

ITEM: dict[str, object] = {
    "type": "object",
    "required": ["name", "price"],
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "price": {"type": "number"},
        "tags": {"type": "array", "items": {"enum": ["new", "used", "large", "small"]}},
    },
}
SCHEMA: dict[str, object] = {
    "type": "object",
    "required": ["id", "items"],
    "properties": {
        "id": {"type": "integer"},
        "items": {"type": "array", "items": ITEM},
    },
}
ITEMS = [
    {"name": f"a garden chair {i}", "price": 12.5 + i, "tags": ["new"]}
    for i in range(20)
]
DOCUMENT = json.dumps({"id": 7, "items": ITEMS})


def main(folder: Path, vocab_size: int) -> None:
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(DOCUMENT).ids
    vocab_size = (
        vocab_size
        or Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size()
    )
    sampling = Sampling(
        seed=0,
        max_tokens=9999,
        grammar=checked_grammar(StructuredOutputsParams(json=SCHEMA)),
    )
    masks = TokenMasks(folder, vocab_size, (1,))
    for batch in (1, 8, 64):
        keys = [Key(RequestId(f"{batch}-{i}"), 0, 0) for i in range(batch)]
        logits = torch.zeros(batch, vocab_size)
        mask_s = 0.0
        apply_s = 0.0
        for position in range(-1, len(ids)):
            begun_s = perf_counter()
            found = []
            masks.begin_step()
            for key in keys:
                past = () if position < 0 else None
                part = Slice(key, position, 1, (), (), (0,), sampling, 0, past)
                mask: Words | NoMask | None = NoMask()
                while isinstance(mask, NoMask):  # until the grammar is compiled
                    mask = masks.mask(
                        part, (ids[position],) if position >= 0 else (), ()
                    )
                assert mask is not None, "the grammar limits the ids"
                found.append(mask)
            masked_s = perf_counter()
            words = torch.stack([torch.from_numpy(mask) for mask in found])
            apply_masks(logits, torch.arange(batch), words)
            if position >= 0:
                mask_s = mask_s + masked_s - begun_s
                apply_s = apply_s + perf_counter() - masked_s
        num = len(ids) * batch / 1e6
        print(
            f"{vocab_size} ids, batch {batch}: {mask_s / num:.0f} + {apply_s / num:.0f} us/token"
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)
