"""Attention over pages: decode over whole pages by HIP, and any step over slots by CK."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from portable.backends.adapter import Convention
from portable.backends.aiter.calls import ARCHS, EITHER, HALVES, TOLERANCE, Call
from portable.backends.rows import each_query
from portable.kernel import KV, Kernel, KernelCaps, LseForm, Op, Segment
from portable.layer import Layer, LayerTensors
from portable.ragged import cdiv
from portable.sets import multiple_of, one_of

PARTITION = 256  # keys that one workgroup of a decode reads


class DecodeCall(Call):
    """One query per row; rows of q, of the table and of the cache are read by their first strides alone."""

    def rows(self, segment: Segment) -> Segment:
        return each_query(segment)

    def attend(
        self,
        q: torch.Tensor,
        kv: KV,
        segment: Segment,
        layer: Layer,
        tensors: LayerTensors,
        out: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        assert kv.v is not None
        self.check(kv.k, kv.v)
        super().attend(q, kv, segment, layer, tensors, out, lse)

    def check(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """Raise a ValueError for pages that the kernel would misread: it takes the strides of K for those of V."""
        dense = k.is_contiguous() and v.is_contiguous()
        if k.stride()[:2] != v.stride()[:2] or not (dense or (k[0, 0].is_contiguous() and v[0, 0].is_contiguous())):
            raise ValueError(
                f"caches k and v have strides {list(k.stride())} and {list(v.stride())}; "
                "pages and heads must be as far apart in both, and what is in a head dense"
            )


class NhdCall(DecodeCall):
    """Pages of any strides, the same for K and V; scales of single heads go into the queries and the output."""

    def attend(
        self,
        q: torch.Tensor,
        kv: KV,
        segment: Segment,
        layer: Layer,
        tensors: LayerTensors,
        out: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        v_scale = None
        if layer.kv_dtype.itemsize == 1:
            if tensors.k_scale is not None and tensors.k_scale.numel() > 1:
                q = (q * of_heads(tensors.k_scale, layer)).to(q.dtype)
                tensors = tensors._replace(k_scale=None)
            if tensors.v_scale is not None and tensors.v_scale.numel() > 1:
                v_scale, tensors = tensors.v_scale, tensors._replace(v_scale=None)
        super().attend(q, kv, segment, layer, tensors, out, lse)
        if v_scale is not None:
            out.mul_(of_heads(v_scale, layer))

    def check(self, k: torch.Tensor, v: torch.Tensor) -> None:
        if k.stride() != v.stride():
            raise ValueError(
                f"caches k and v have strides {list(k.stride())} and {list(v.stride())}; they must be equal"
            )


def of_heads(scale: torch.Tensor, layer: Layer) -> torch.Tensor:
    """A scale for each KV head as [H, 1] for the query heads."""
    return scale.float().flatten().repeat_interleave(layer.num_heads // layer.num_kv_heads)[:, None]


def partitions(segment: Segment) -> int:
    return cdiv(segment.max_seq_len, PARTITION)


def sums(segment: Segment, layer: Layer) -> torch.Tensor:
    shape = len(segment.seq_lens), layer.num_heads, partitions(segment)
    return torch.empty(shape, dtype=torch.float32, device=segment.seq_lens.device)


def partial(segment: Segment, layer: Layer) -> torch.Tensor:
    shape = len(segment.seq_lens), layer.num_heads, partitions(segment), layer.v_head_dim
    return torch.empty(shape, dtype=layer.dtype, device=segment.seq_lens.device)


def workspace(segment: Segment, layer: Layer) -> torch.Tensor:
    """Bytes of the partial outputs, of their sums and of their maxima."""
    parts = len(segment.seq_lens) * layer.num_heads * partitions(segment)
    size = parts * (layer.v_head_dim * layer.dtype.itemsize + 2 * torch.float32.itemsize)
    return torch.empty(size, dtype=torch.uint8, device=segment.seq_lens.device)


def unscaled(segment: Segment, layer: Layer) -> torch.Tensor:
    return torch.ones(1, dtype=torch.float32, device=segment.seq_lens.device)


def cache_dtype(segment: Segment, layer: Layer) -> str:
    return "auto" if layer.kv_dtype == layer.dtype else "fp8"  # of the flavour that the device converts


DECODE_NAMES = {
    "q": "query",
    "k": "key_cache",
    "v": "value_cache",
    "out": "out",
    "alibi": "alibi_slopes",
    "block_table": "block_tables",
    "seq_lens": "context_lens",
    "max_seq_len": "max_context_len",
    "scale": "scale",
}
DECODE_FIXED: dict[str, Any] = {
    "alibi_slopes": None,
    "kv_cache_dtype": "auto",
    "fp8_out_scale": None,
    "partition_size": PARTITION,
    "mtp": 1,
}
DECODE = Convention(
    module="aiter",
    function="paged_attention_v1",
    names={**DECODE_NAMES, "softcap": "logits_soft_cap", "k_descale": "k_scale", "v_descale": "v_scale"},
    dense_rows=True,
    fixed={**DECODE_FIXED, "kv_cache_layout": "NHD", "cu_query_lens": None},
    step={
        "workspace_buffer": workspace,
        "k_scale": unscaled,
        "v_scale": unscaled,
        "kv_cache_dtype": cache_dtype,
    },
    descale="one",
    writes_out=True,
    zeroes_empty=False,  # a row without keys has no partition, so nothing is written
)
PACKED = Convention(
    module="aiter",
    function="paged_attention_rocm",
    names={**DECODE_NAMES, "page_size": "block_size"},
    dense_rows=True,
    fixed={**DECODE_FIXED, "k_scale": None, "v_scale": None},
    step={
        "exp_sums": sums,
        "max_logits": sums,
        "tmp_out": partial,
        "num_kv_heads": lambda segment, layer: layer.num_kv_heads,
    },
    writes_out=True,
    zeroes_empty=False,
)
SLOTS = Convention(
    module="aiter",
    function="mha_batch_prefill_func",
    names={
        "q": "q",
        "k": "k",
        "v": "v",
        "out": "out",
        "alibi": "alibi_slopes",
        "lse": "return_lse",
        "cu_seqlens_q": "cu_seqlens_q",
        "kv_indptr": "kv_indptr",
        "kv_indices": "kv_page_indices",
        "max_query_len": "max_seqlen_q",
        "max_seq_len": "max_seqlen_k",
        "scale": "softmax_scale",
        "softcap": "logits_soft_cap",
        "causal": "causal",
        "window": "window_size",
    },
    pages="token",
    address_window=2**32,  # it adds offsets to the lower half of an address
    returns={2: 1},
    lse=LseForm(empty="nan"),  # not confirmed
    zeroes_empty=False,
)
DECODE_CAPS = KernelCaps(
    op=Op.PAGED,
    name="aiter.decode",
    provider="aiter",
    vendors={"amd"},
    archs=ARCHS,
    requires=(EITHER,),
    dtypes=HALVES,
    head_dims=one_of(64, 128),
    equal_value_dim=True,
    gqa_ratios=multiple_of(1, up_to=16),
    query_lens=one_of(1),
    page_sizes=one_of(16, 32),
    features=frozenset({"softcap", "alibi", "noncausal"}),  # the one query of a request sees all its keys
    max_seq_len=128 * 1024,
    tolerance=TOLERANCE,
)

KERNELS: tuple[Kernel, ...] = (
    NhdCall(DECODE).kernel(DECODE_CAPS),
    # bytes of fp8 stand for twice as much on one of the two as on the other
    *(
        NhdCall(DECODE).kernel(
            replace(DECODE_CAPS, name=f"aiter.decode_{name}", archs=frozenset({arch}), kv_dtypes=frozenset({dtype}))
        )
        for arch, name, dtype in (
            ("gfx942", "fp8_fnuz", torch.float8_e4m3fnuz),
            ("gfx950", "fp8", torch.float8_e4m3fn),
        )
    ),
    DecodeCall(PACKED).kernel(
        replace(
            DECODE_CAPS,
            name="aiter.decode_packed",
            cache_layouts=("k_packed", "shuffled"),
            features=frozenset({"alibi", "noncausal"}),
        )
    ),
    Call(SLOTS).kernel(
        replace(
            DECODE_CAPS,
            name="aiter.paged",
            head_dims=one_of(128),  # of the instances that CK compiles for it
            query_lens=multiple_of(1),
            gqa_ratios=multiple_of(1),
            page_sizes=multiple_of(1),
            page_form="csr",
            features=frozenset({"window", "softcap", "sinks", "alibi", "noncausal", "lse"}),
            max_seq_len=None,
            max_tensor_bytes=2**31,  # what is behind reads as 0
        )
    ),
)
