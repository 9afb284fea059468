"""FlashMLA: MLA decode on Hopper over pages of 64 tokens.

* The division of the work is for the lengths of one step and for one mask. Builds of 2025 make it as two tensors; later
  ones give an empty object that the first call fills, and that is wrong from the next step on. So each step asks for a
  new one, and none is captured in a graph.
* Queries are [B, Sq, H, rank + rope], aligned to the bottom right; a request whose queries are masked in another way
  becomes one request for each of its queries.
* The LSE is [B, H, Sq] in natural log, +inf for a row without keys. fp8 caches need the sparse kernels.
* Dense decoding is built for sm90 alone; what the package has for Blackwell is sparse, or for prompts.
* vLLM's copy writes into an `out` that it is given, which saves a launch. With more than one query for each request it
  wants a shape of its own there: 0.33 refuses [B, Sq, H, rank], which its docstring asks for.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from portable.backends.adapter import Adapter, Convention
from portable.backends.rows import each_query
from portable.kernel import Kernel, KernelCaps, LseForm, Op, Requires, Segment
from portable.layer import Layer
from portable.sets import multiple_of, one_of

MODULE, VLLM = "flash_mla", "vllm.third_party.flashmla.flash_mla_interface"
PAGE_SIZE = 64
RANK, ROPE = 512, 64
METADATA = ("tile_scheduler_metadata", "num_splits")


class MlaCall(Adapter):
    """A step with its own division of the work."""

    def rows(self, segment: Segment) -> Segment:
        return each_query(segment) if isinstance(segment.causal, torch.Tensor) else segment

    def fixed(self, segment: Segment, layer: Layer) -> dict[str, Any]:
        build: Callable[..., Any] = importlib.import_module(self.convention.module).get_mla_metadata
        # by position, for their names differ between builds, and the later ones look at none
        made = build(segment.seq_lens, segment.max_query_len * layer.num_heads, 1)
        return super().fixed(segment, layer) | dict(zip(METADATA, made, strict=True))


DECODE = Convention(
    module=MODULE,
    function="flash_mla_with_kvcache",
    names={
        "q": "q",
        "k": "k_cache",
        "block_table": "block_table",
        "seq_lens": "cache_seqlens",
        "scale": "softmax_scale",
        "causal": "causal",
    },
    fixed={"head_dim_v": RANK, **dict.fromkeys(METADATA)},  # which each step makes
    rows="batch",
    dense_rows=True,  # TMA wants them 16 bytes apart
    lse=LseForm(layout="bhs", empty="+inf"),
    zeroes_empty=False,
)
CAPS = KernelCaps(
    op=Op.MLA_DECODE,
    name="flash_mla.decode",
    provider="flash_mla",
    vendors={"nvidia"},
    archs={"sm90"},
    requires=(Requires("flash_mla"),),
    dtypes={torch.bfloat16, torch.float16},
    head_dims=one_of(RANK + ROPE),
    v_head_dims=one_of(RANK),
    gqa_ratios=multiple_of(1),
    query_lens=multiple_of(1, up_to=16),  # shorter queries are padded to the longest
    page_sizes=one_of(PAGE_SIZE),
    features=frozenset({"noncausal", "lse"}),
    tolerance={torch.bfloat16: 1e-2, torch.float16: 2e-3},
)
VLLM_DECODE = replace(DECODE, module=VLLM, names={**DECODE.names, "out": "out"}, writes_out=True, out_of_single=True)
KERNELS: tuple[Kernel, ...] = (
    MlaCall(DECODE).kernel(CAPS),
    MlaCall(VLLM_DECODE).kernel(
        replace(CAPS, name="vllm_flash_mla.decode", requires=(Requires("vllm[flash_mla]", ">=0.33"),))
    ),
)
