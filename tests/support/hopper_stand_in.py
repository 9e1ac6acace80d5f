"""What stands for Hopper's prefill kernel on a CPU: torch that works by plan and descriptors.

It says nothing of the kernel's own code, but all of what the kernel is given. `faults` are mistakes
that a kernel could make.
"""

from collections.abc import Collection
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.kernels.constants import LOG2_E
from baton.kernels.hopper.attention.prefill_kernel import prefill_kernel
from baton.kernels.reference import from_fp8
from baton.model.layers.attention import Scoring
from tests.support.one_order import Arithmetic, attend, tile_keys


class StandIn:
    """Launches as `launch_prefill` does."""

    def __init__(self, machine: Arithmetic, faults: Collection[str] = ()) -> None:
        self._machine = machine
        self._faults = faults
        self.forms: set[tuple[tuple[str, object], ...]] = set()

    def __call__(
        self, grid: tuple[int, int, int], *args: object, **constants: Any
    ) -> None:
        assert grid[1:] == (1, 1)
        assert constants.pop("num_warps") == 4
        assert constants.pop("maxnreg") in (168, 255)
        values = dict(zip(prefill_kernel.arg_names, args, strict=False)) | constants
        assert set(values) == set(prefill_kernel.arg_names)
        assert len(args) + len(constants) == len(values), "an argument is given twice"
        self.forms.add(tuple(sorted(constants.items())))
        self._run(grid[0], values)

    def _run(self, num_programs: int, a: dict[str, Any]) -> None:
        q_desc = a["q_desc"]
        kv_desc = a["kv_desc"]
        assert q_desc.block_shape == [64 // a["PACK"], 1, a["PACK"], 64]
        q = q_desc.base.as_strided(q_desc.shape, q_desc.strides)
        kv = kv_desc.base.as_strided(kv_desc.shape, kv_desc.strides)
        if kv_desc.base.dtype == torch.uint8:
            assert kv_desc.block_shape == [1, a["PAGE"], min(a["DIM"], 128)]
        else:
            assert kv_desc.block_shape == [a["PAGE"], 64]
        bounds = a["plan"].view(-1).tolist()
        items = a["plan"].tolist()
        for program in range(num_programs):
            for number in range(*bounds[2 * program : 2 * program + 2]):
                self._item(items[number], q, kv, a)

    def _item(self, item: list[int], q: Tensor, kv: Tensor, a: dict[str, Any]) -> None:
        if a["LATENT"]:
            self._latent_item(item, q, kv, a)
            return
        token, first_position, count, begin, end, head, row, context = item
        pack = a["PACK"]
        page = a["PAGE"]
        group = a["GROUP"]
        kv_head = head // group
        table = a["table_ptr"].reshape(-1)[row * a["stride_table"] :]
        if "reads past the end" in self._faults:
            context = -(-context // page) * page
        keys = torch.arange(begin * a["KEYS"], min(end * a["KEYS"], context))
        rows = table[keys // page].long() * a["block_rows"] + a["base_rows"]
        rows += kv_head * a["head_rows"]
        if kv.dtype == torch.uint8:
            k, v = (self._widened(kv, rows + n, keys % page, a) for n in range(2))
            k, v = k.to(q.dtype), v.to(q.dtype)
        else:
            k = kv[rows + keys % page]
            v = kv[rows + keys % page + page]
        i = torch.arange(count * pack)
        heads = head % group + i % pack
        i = i[heads < group]
        heads = heads[heads < group]
        positions = first_position + i // pack
        queries = q[token + i // pack, kv_head, heads]
        if a["CUTS"]:
            assert a["KEYS"] == tile_keys(a["HEAD_DIM"])
            k, v = (F.pad(part, (0, 0, begin * a["KEYS"], 0)) for part in (k, v))
            scoring = self._scoring(a, kv_head * group + heads)
            out = attend(queries, k, v, positions, scoring, self._machine)
        else:
            s = queries.double() @ k.double().T * a["scale"]
            if a["CAPPED"]:
                s = a["cap"] - 2 * a["cap"] / (1 + torch.exp2(s))
            s = s.masked_fill(self._hidden(keys, positions[:, None], a), -torch.inf)
            if a["SINKS"]:
                sinks = a["sink_ptr"][kv_head * group + heads] * LOG2_E
                s = torch.cat((s, sinks[:, None].double()), 1)
                v = torch.cat((v, v.new_zeros(1, v.shape[1])))
            # In fp64 and without a product: a row has the same bits in any tile.
            weights = (s / LOG2_E).softmax(1)
            out = (weights[..., None] * v.double()).sum(1).float()
        if "rounds apart" in self._faults and a["WARPGROUPS"] == 1:
            out = out * (1 + 2**-8)
        a["out_ptr"][token + i // pack, kv_head * group + heads] = out.to(q.dtype)

    def _widened(
        self, codes: Tensor, tiles: Tensor, slots: Tensor, a: dict[str, Any]
    ) -> Tensor:
        """Return what rows of tiles of codes stand for, each with the exponent behind the tile."""
        page = a["PAGE"]
        pool = a["pool_ptr"].reshape(-1)
        exponents = pool[
            tiles * page * (a["HEAD_DIM"] + 1) + page * a["HEAD_DIM"] + slots
        ]
        if "forgets exponents" in self._faults:
            exponents = torch.full_like(exponents, 127)
        numbers = from_fp8(codes[tiles, slots], exponents)
        # As if a product of another length rounded otherwise.
        is_wrong = "widens apart" in self._faults
        return numbers * (1 + 2**-7) if is_wrong else numbers

    def _latent_item(
        self, item: list[int], q: Tensor, kv: Tensor, a: dict[str, Any]
    ) -> None:
        token, first_position, count, begin, end, head, base, _ = item
        dim = a["DIM"]
        keys = torch.arange(begin * a["KEYS"], end * a["KEYS"])
        of_head = kv[:, 2 * head * dim :][:, : 2 * dim]
        k, v = of_head[base + keys].double().split(dim, 1)
        own = slice(token, token + count)
        turned = a["q_turned_desc"]
        q_turned = turned.base.as_strided(turned.shape, turned.strides)
        k_turned = a["k_turned_desc"].base[base + keys].double()
        s = (
            q[own, head, 0].double() @ k.T
            + q_turned[own, head, 0].double() @ k_turned.T
        )
        positions = first_position + torch.arange(count)
        s = (s * a["scale"]).masked_fill(keys > positions[:, None], -torch.inf)
        m = s.max(1).values
        w = torch.exp2(s - torch.where(m.isinf(), 0.0, m)[:, None])
        sums = m.float(), w.sum(1).float(), (w[..., None] * v).sum(1).float()
        heads = a["heads"]
        if begin and "forgets the keys before" not in self._faults:
            before = a["carried_sum_ptr"][own, head]
            sums = self._machine.merge(
                (before[:, 0], before[:, 1], a["carried_ptr"][own, head]), sums
            )
        assert a["out_ptr"].shape[1] == heads
        m, norm, acc = sums
        if end * a["KEYS"] < first_position + count:
            a["carried_sum_ptr"][own, head] = torch.stack((m, norm), 1)
            a["carried_ptr"][own, head] = acc
        else:
            a["out_ptr"][own, head] = (acc / norm[:, None]).to(q.dtype)

    def _scoring(self, a: dict[str, Any], heads: Tensor) -> Scoring:
        scale = a["scale"] / LOG2_E
        softcap = None
        if a["CAPPED"]:
            softcap = a["cap"] / LOG2_E
            scale *= softcap / 2
        sees_all = not a["WINDOWED"] or "forgets the window" in self._faults
        sinks = a["sink_ptr"][heads] if a["SINKS"] else None
        return Scoring(scale, None if sees_all else a["window"], softcap, sinks)

    def _hidden(self, keys: Tensor, positions: Tensor, a: dict[str, Any]) -> Tensor:
        hidden = keys > positions
        if a["WINDOWED"] and "forgets the window" not in self._faults:
            hidden |= keys <= positions - a["window"]
        return hidden
