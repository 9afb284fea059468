"""MLA decode: `mla_decode_fwd` over slots, one query per row; `get_mla_metadata_v1` divides its work once per step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.nn.functional import pad

from portable.backends.adapter import Convention, why_not_called
from portable.backends.aiter.calls import ARCHS, NEW, OLD, TOLERANCE, Call, module_of
from portable.backends.rows import each_query
from portable.kernel import KV, Kernel, KernelCaps, LseForm, Op, Segment
from portable.layer import Layer, LayerTensors, UnsupportedError
from portable.sets import multiple_of, one_of

HEADS = (16, 128)  # that the assembly has in both releases; others are padded to the next
BUFFERS = ("work_meta_data", "work_indptr", "work_info_set", "reduce_indptr", "reduce_final_map", "reduce_partial_map")
GRANULARITY = 16  # keys that no division of the work cuts


class MlaCall(Call):
    """Rows of one query, of a number of heads that the assembly has."""

    info_set = "work_info_set"  # what the metadata call names it
    last_page = True  # it takes the lengths of last pages

    def rows(self, segment: Segment) -> Segment:
        return each_query(segment)

    def fixed(self, segment: Segment, layer: Layer) -> dict[str, Any]:
        common = super().fixed(segment, layer)
        rows, heads = len(segment.seq_lens), padded(layer.num_heads)
        sizes = bound("get_mla_metadata_info_v1", INFO)(
            batch_size=rows,
            max_seqlen_qo=1,
            num_head_qo=heads,
            q_dtype=layer.dtype,
            kv_dtype=layer.kv_dtype,
            is_sparse=False,
            fast_mode=True,
        )
        device = segment.seq_lens.device
        made = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in sizes]
        buffers = dict(zip(BUFFERS, made, strict=True))
        given = {
            "seqlens_qo_indptr": common["qo_indptr"],
            "seqlens_kv_indptr": common["kv_indptr"],
            "num_heads_per_head_k": heads,
            "num_heads_k": 1,
            "is_causal": True,
            "work_metadata_ptrs": buffers["work_meta_data"],
            "work_indptr": buffers["work_indptr"],
            self.info_set: buffers["work_info_set"],
            "reduce_indptr": buffers["reduce_indptr"],
            "reduce_final_map": buffers["reduce_final_map"],
            "reduce_partial_map": buffers["reduce_partial_map"],
            "kv_granularity": GRANULARITY,
            "max_seqlen_qo": 1,
            "uni_seqlen_qo": 1,
            "fast_mode": True,
        }
        if self.last_page:
            given |= {"kv_last_page_lens": common["kv_last_page_lens"], "page_size": 1}
        bound("get_mla_metadata_v1", tuple(given))(**given)
        return common | buffers

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
        if layer.num_heads in HEADS:
            super().attend(q, kv, segment, layer, tensors, out, lse)
            return
        tokens, heads, width = out.shape
        wide = padded(heads)
        wide_out = out.new_empty(tokens, wide, width)
        wide_lse = None if lse is None else lse.new_empty(wide, tokens)
        wide_q = pad(q, (0, 0, 0, wide - heads))
        super().attend(wide_q, kv, segment, layer, tensors, wide_out, wide_lse)
        out.copy_(wide_out[:, :heads])
        if lse is not None and wide_lse is not None:
            lse.copy_(wide_lse[:heads])


class OldMlaCall(MlaCall):
    info_set = "work_info"
    last_page = False


INFO = ("batch_size", "max_seqlen_qo", "num_head_qo", "q_dtype", "kv_dtype", "is_sparse", "fast_mode")


def padded(heads: int) -> int:
    """The heads that are computed for so many."""
    return next(each for each in HEADS if each >= heads)


def bound(name: str, keywords: tuple[str, ...]) -> Callable[..., Any]:
    """A function of aiter whose signature has been checked."""
    function: Callable[..., Any] = getattr(module_of("aiter"), name)
    if reason := why_not_called(function, keywords):
        raise UnsupportedError(f"aiter.{name} {reason}")
    return function


OLD_DECODE = Convention(
    module="aiter.mla",
    function="mla_decode_fwd",
    names={
        "q": "q",
        "k": "kv_buffer",
        "out": "o",
        "cu_seqlens_q": "qo_indptr",
        "kv_indptr": "kv_indptr",
        "kv_indices": "kv_indices",
        "kv_last_page_len": "kv_last_page_lens",
        "max_query_len": "max_seqlen_q",
        "scale": "sm_scale",
    },
    fixed=dict.fromkeys(BUFFERS),  # made in each step
    dense_rows=True,
    pages="single",
    returns={},
    writes_out=True,  # what it returns first is scratch
    zeroes_empty=False,  # 0 / 0
)
DECODE = replace(
    OLD_DECODE,
    names={**OLD_DECODE.names, "lse": "return_lse", "page_size": "page_size"},
    fixed={**OLD_DECODE.fixed, "nhead_kv": 1},
    returns={2: 1},
    lse=LseForm(layout="th", empty="nan"),
)
CAPS = KernelCaps(
    op=Op.MLA_DECODE,
    name="aiter.mla_decode",
    provider="aiter",
    vendors={"amd"},
    archs=ARCHS,
    requires=(NEW,),
    dtypes={torch.bfloat16},
    head_dims=one_of(576),
    v_head_dims=one_of(512),
    gqa_ratios=multiple_of(1, up_to=HEADS[-1]),
    query_lens=multiple_of(1, up_to=8),  # keys are read once per query
    page_sizes=multiple_of(1),
    page_form="csr",
    features=frozenset({"noncausal", "lse"}),
    max_tensor_bytes=2**32,  # the bfloat16 kernels of 16 and 128 heads wrap behind it
    tolerance=TOLERANCE,
)

KERNELS: tuple[Kernel, ...] = (
    MlaCall(DECODE).kernel(CAPS),
    # the LSE that it returns is memory that nothing wrote
    OldMlaCall(OLD_DECODE).kernel(
        replace(CAPS, name="aiter.mla_decode_017", requires=(OLD,), features=frozenset({"noncausal"}))
    ),
)
