"""CPU stand-ins for the callables of aiter, of 0.1.7 and of what follows; they depart where the real ones depart.

Signatures are the real ones. `install` puts them into `sys.modules`. Rows of conventions.md that they reproduce are
named as "8.1" (the section) or by their table. What is not confirmed there is a field of `Readings`.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import ModuleType

import pytest
import torch

from fakes.attention import Empty, packed, ready, row
from portable.ragged import cdiv

HALVES = (torch.bfloat16, torch.float16)
BLANK = Empty(0.0, float("-inf"))


@dataclass(frozen=True)
class Readings:
    """What is open about CK, assembly and HIP (1.1: rows marked [U])."""

    arch: str = "gfx942"
    empty: Empty = BLANK  # a row without keys: output, LSE
    lse_base: str = "e"
    writes: bool = True  # `out` holds the output, which 8.1 and 8.2 do not promise


class Aiter:
    """The callables of one release on one device, with what they keep between calls."""

    def __init__(self, new: bool, readings: Readings) -> None:
        self.new, self.readings = new, readings
        self.planned: dict[int, tuple[torch.Tensor, torch.Tensor, int]] = {}  # work_meta_data -> what it is for
        self.calls: list[str] = []

    # 8.1, 1.1 "aiter CK/asm varlen"

    def varlen(
        self, q, k, v, cu_q, cu_k, max_q, max_k, scale, softcap, causal, window, alibi, return_lse, block_table, out
    ):
        records = torch.is_grad_enabled() and any(each.requires_grad for each in (q, k, v))
        assert not records or return_lse, "8.1: under autograd it asserts return_lse"
        assert block_table is None, "the stand-in has no pages here"
        ready(q, k, v, cu_q, cu_k, dtypes=HALVES)
        assert max(q.shape[-1], v.shape[-1]) <= 256
        left, right = (-1 if side >= max_k else side for side in window[:2])
        within = left > 0 or right > 0  # 8.1: (0, 0) and (0, -1) count as no window
        pairs = {(128, 128)} | ({(192, 128)} if self.new or self.readings.arch == "gfx950" else set())
        assembly = q.dtype == torch.bfloat16 and (q.shape[-1], v.shape[-1]) in pairs and alibi is None and not within
        if self.new and softcap:
            assembly = False
        self.calls.append("assembly" if assembly else "ck")
        if assembly:
            left, right, softcap = -1, -1, 0.0
        if causal:
            right = 0
        made, lse = packed(q, k, v, cu_q, cu_k, max_q, max_k, scale, (left, right), softcap, alibi, self.readings.empty)
        if max_k == 0:
            made, lse = torch.zeros_like(made), torch.full_like(lse, torch.inf)
        if out is not None:
            assert out.dtype == q.dtype and out.shape == made.shape and out.stride(-1) == 1
            made = out.copy_(made)[..., :] if self.readings.writes else made
        if self.readings.lse_base == "2":
            lse = lse * 1.4426950408889634
        return [made, lse] if return_lse else made

    # 8.2, 1.1 "aiter mha_batch_prefill", 1.2

    def batch_prefill(
        self, q, k, v, cu_q, indptr, indices, max_q, max_k, scale, softcap, causal, window, alibi, return_lse, out
    ):
        ready(q, k, v, cu_q, indptr, indices, dtypes=HALVES)
        assert k.dim() == v.dim() == 3, "8.2: pages of one token are [slots, Hkv, D]"
        if (q.shape[-1], v.shape[-1]) != (128, 128):
            raise RuntimeError("invalid argument for fmha_fwd_splitkv")  # CK compiles instances for 128 alone
        cut = indices[: int(indptr[-1])].long()
        if cut.numel() and not 0 <= int(cut.min()) <= int(cut.max()) < len(k):
            raise IndexError("kv_page_indices names a slot beyond the cache")
        self.calls.append("batch_prefill")
        left, right = window
        right = 0 if causal else right
        made, lse = packed(
            q, k[cut], v[cut], cu_q, indptr, max_q, max_k, scale, (left, right), softcap, alibi, self.readings.empty
        )
        if max_k == 0:
            made, lse = torch.zeros_like(made), torch.full_like(lse, torch.inf)
        if out is not None:
            assert out.dtype == q.dtype and out.shape == made.shape and out.stride(-1) == 1
            made = out.copy_(made)[..., :] if self.readings.writes else made
        if self.readings.lse_base == "2":
            lse = lse * 1.4426950408889634
        return (made, lse) if return_lse else made

    # 8.5: one query per row of the table; strides of K serve V, and those inside of rows are not read

    def decode(self, out, q, k, v, scale, table, lens, max_len, alibi, softcap, parts):
        n, heads, dim = q.shape
        assert out.is_contiguous() and out.dtype == q.dtype in HALVES and len(table) == len(lens) == n
        assert table.dtype == lens.dtype == torch.int32
        alibi = alibi if alibi is None else alibi.as_strided(alibi.shape, (1,))
        q = q.as_strided(q.shape, (q.stride(0), dim, 1))
        table = table.as_strided(table.shape, (table.shape[1], 1))
        lens = lens.as_strided(lens.shape, (1,))
        size, kv_heads = k.shape[1:3]
        assert dim in (64, 128) and size in (16, 32) and 1 <= heads // kv_heads <= 16, "1.2"
        assert parts >= cdiv(max_len, 256), "8.5: scratch for every partition of 256 keys"
        self.calls.append("decode")
        for r in range(n):
            keys = int(lens[r])
            if keys > max_len:
                raise IndexError(f"row {r} has {keys} keys; max_context_len is {max_len}")
            if keys:
                pages = table[r, : cdiv(keys, size)].long()
                if not 0 <= int(pages.min()) <= int(pages.max()) < len(k):
                    raise IndexError("block_tables names a page beyond the cache")
                part_k, part_v = (t[pages].flatten(0, 1)[:keys] for t in (k, v))
                made, _ = row(q[r : r + 1], part_k, part_v, scale, (-1, -1), softcap, alibi, Empty(0.0, 0.0))
                out[r] = made[0]
        return out

    def nhd(self, out, workspace, q, k, v, scale, table, lens, max_len, alibi, softcap, kv_dtype, k_scale, v_scale):
        assert k_scale.dtype == v_scale.dtype == torch.float32  # one number of each is read, without a look
        n, heads, dim = q.shape
        row_bytes = n * heads * (dim * q.element_size() + 8)
        assert workspace.dtype == torch.uint8 and workspace.is_contiguous()
        v = v.as_strided(v.shape, (*k.stride()[:3], 1))
        k = k.as_strided(k.shape, (*k.stride()[:3], 1))
        if kv_dtype in ("fp8", "fp8_e4m3"):  # 15: bytes in the flavour of the device's conversions
            flavour = torch.float8_e4m3fnuz if self.readings.arch == "gfx942" else torch.float8_e4m3fn
            k = k.view(flavour).float() * k_scale.flatten()[0]
            v = v.view(flavour).float() * v_scale.flatten()[0]
        else:
            assert kv_dtype == "auto" and k.dtype == v.dtype == q.dtype
        return self.decode(out, q, k, v, scale, table, lens, max_len, alibi, softcap, workspace.numel() // row_bytes)

    def packed(self, out, sums, maxima, partial, q, k, v, heads, scale, table, lens, size, max_len, alibi):
        assert heads == k.shape[1] and size == k.shape[3] and k.dim() == 5
        assert k.shape[-1] == 16 // k.element_size()
        parts = min(t.shape[2] for t in (sums, maxima, partial))
        for scratch in (sums, maxima, partial):
            assert scratch.is_contiguous() and scratch.shape[:2] == q.shape[:2]
        assert sums.dtype == maxima.dtype == torch.float32 and partial.dtype == q.dtype
        inside = tuple(torch.empty(v.shape[2:]).stride())
        v = v.as_strided(v.shape, (*k.stride()[:2], *inside))
        k = k.as_strided(k.shape, (*k.stride()[:2], *torch.empty(k.shape[2:]).stride()))
        k = k.permute(0, 3, 1, 2, 4).flatten(3)  # [pages, size, Hkv, D]
        v = v.permute(0, 2, 4, 1, 3).flatten(1, 2) if v.dim() == 5 else v.permute(0, 3, 1, 2)
        return self.decode(out, q, k, v, scale, table, lens, max_len, alibi, 0.0, parts)

    # 8.4, 1.1 "aiter mla_decode_fwd return_lse"

    def info(self, batch_size, max_seqlen_qo, num_head_qo, q_dtype, kv_dtype, is_sparse, fast_mode):
        assert num_head_qo % 16 == 0 and not is_sparse and fast_mode
        tiles, units = batch_size * cdiv(max_seqlen_qo * num_head_qo, 128), 304
        split = min(batch_size + units - 1, (units - 1) * 2) * cdiv(max_seqlen_qo * num_head_qo, 128)
        return (
            (2, torch.uint64),
            (units + 1, torch.int32),
            ((tiles + units - 1, 8), torch.int32),
            (tiles + 1, torch.int32),
            ((tiles, 2), torch.int32),
            (split, torch.int32),
        )

    def plan(self, qo, kv, last, heads, kv_heads, causal, meta, indptr, info, page_size, granularity, max_q, uni):
        ready(qo, kv, dtypes=(torch.int32,))
        assert kv_heads == 1 and granularity >= 16 and (last is None or page_size == 1)
        assert last is None or len(last) == len(kv) - 1
        assert (qo.diff() == max_q).all() and uni in (-1, max_q), "queries a row, where all have as many"
        assert indptr.shape == (305,) and info.shape[1] == 8, "work_indptr and work_info_set changed places"
        meta.view(torch.int64).fill_(0)
        self.planned[meta.data_ptr()] = (qo.clone(), kv.clone(), heads)

    def mla(self, q, cache, o, qo, kv, indices, last, max_q, page_size, scale, meta, return_lse):
        assert q.is_contiguous() and o.is_contiguous(), "it takes no strides of rows"
        assert q.dtype == cache.dtype == o.dtype == torch.bfloat16
        assert cache.dim() == 4 and cache.shape[2:] == (1, 576) == (1, q.shape[-1]) and cache.shape[1] == page_size
        assert page_size == 1, "0.1.7 counts pages as keys (C30); later ones are not asked for more"
        assert q.shape[1] in (16, 128), f"nhead={q.shape[1]} not supported"
        ready(qo, kv, indices, last, dtypes=(torch.int32,))
        assert len(last) == len(qo) - 1 and (qo.diff() == max_q).all(), "rows of q are max_seqlen_q apart"
        if max_q > 4:
            raise RuntimeError("C32: longer queries are not served by one rule")
        if meta is not None:
            planned = self.planned.get(meta.data_ptr())
            if planned is None or not (torch.equal(planned[0], qo) and torch.equal(planned[1], kv)):
                raise IndexError("the division of the work is of another step: it would be read beyond its end")
            assert planned[2] == q.shape[1], "the division of the work is for other heads"
        cut = indices[: int(kv[-1])].long()
        if cut.numel() and not 0 <= int(cut.min()) <= int(cut.max()) < len(cache):
            raise IndexError("kv_indices names a slot beyond the cache")
        self.calls.append("mla")
        scale = 576**-0.5 if scale is None else scale  # 8.4: wrong for MLA
        rows, nothing = cache[cut, 0], Empty(float("nan"), float("-inf"))
        made, lse = packed(q, rows, rows[..., :512], qo, kv, max_q, len(rows), scale, (-1, 0), 0.0, None, nothing)
        o.copy_(made)
        scratch = torch.full((len(q), 1, *o.shape[1:]), torch.nan)
        if not self.new:
            return scratch, torch.full((len(q), q.shape[1]), torch.nan)  # memory that nothing wrote
        return scratch, lse.T.contiguous() if return_lse else None


def triton_varlen(q, k, v, cu_q, cu_k, max_q, max_k, scale, causal, window, bias, alibi, return_lse, *, windows: bool):
    """8.3, 1.1 "aiter Triton default impl varlen": [T, H], 0 and 0.0 in rows without keys."""
    ready(q, k, v, cu_q, cu_k, dtypes=HALVES)
    if bias is not None:
        raise ValueError("Bias is not supported yet in the Triton Backend")
    left, right = int(window[0]), int(window[1])
    if right != -1 or (left != -1 and not windows):
        raise ValueError("Sliding Window is not supported yet in the Triton Backend")
    assert alibi is None or alibi.shape == (len(cu_q) - 1, q.shape[1]), "the kernel reads two strides of the slopes"
    rest, dim = q.shape[-1] - v.shape[-1], v.shape[-1]
    pow2 = dim & (dim - 1) == 0 and dim >= 16 and rest & (rest - 1) == 0 and rest >= 16
    assert rest == 0 or pow2, "Positional encoding support requires NOPE and PE head sizes to be unpadded powers of 2."
    bounds = (max(left, 0) or -1, 0 if causal else -1)
    made, lse = packed(q, k, v, cu_q, cu_k, max_q, max_k, scale, bounds, 0.0, alibi, Empty(0.0, 0.0))
    return (made, lse.T.contiguous()) if return_lse else made


def install(patch: pytest.MonkeyPatch, *, new: bool, readings: Readings | None = None) -> Aiter:
    """Make `import aiter` give the stand-ins, until the patch is undone."""
    aiter = Aiter(new, readings or Readings())
    modules = {
        name: ModuleType(name) for name in ("aiter", "aiter.ops", "aiter.ops.mha", "aiter.mla", "aiter.ops.triton")
    }
    from fakes import aiter_releases

    triton = "aiter.ops.triton.attention.mha" if new else "aiter.ops.triton.mha"
    modules[triton] = ModuleType(triton)
    if new:
        modules["aiter.ops.triton.attention"] = ModuleType("aiter.ops.triton.attention")
        modules["aiter.ops.mha"].ENABLE_CK = True
        modules[triton]._MHA_IMPL = "default"
    public = aiter_releases.public(aiter)
    modules[triton].flash_attn_varlen_func = public.pop("triton_varlen")
    modules["aiter.mla"].mla_decode_fwd = public.pop("mla_decode_fwd")
    for name, function in public.items():
        setattr(modules["aiter"], name, function)
    for name, module in modules.items():
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(modules[parent], child, module)
        module.__path__ = []
        patch.setitem(sys.modules, name, module)
    return aiter
