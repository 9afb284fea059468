"""Which of NVIDIA's kernels are asked first where they were timed beside each other; data of ci/results/mla-sm90.json.

Times were taken at 16, 32, 64 and 128 heads, 1 and 4 new tokens, 1 to 256 requests and 1,024 to 65,536 keys, a factor
of 4 apart, on pages of 16 and 64; a row reaches to where the next time is nearer. Kernels within 3 % of the fastest
count as equal, so that a row serves both page sizes.
"""

from __future__ import annotations

from portable.platform.target import ANY, Fastest, Range

FA, MLA, HOPPER, TRITON = "flash_attn", "flash_mla", "triton.mla_decode_hopper", "triton.mla_decode"
SINGLE, DRAFTS = (1, 1), (2, 8)


def _mla(heads: Range, queries: Range, reqs: Range, keys: Range, *first: str) -> Fastest:
    sizes = {"num_heads": heads, "query_len": queries, "reqs": reqs, "seq_len": keys}
    return Fastest("mla_decode", ("sm90",), first, **sizes)


MEASURED = (
    _mla((1, 16), (1, 8), ANY, ANY, HOPPER),
    # up to 32 heads
    _mla((17, 32), SINGLE, ANY, (1, 2048), TRITON),
    _mla((17, 32), SINGLE, (129, None), (2049, 8192), FA, MLA, HOPPER),
    _mla((17, 32), SINGLE, ANY, ANY, HOPPER),
    _mla((17, 32), DRAFTS, (1, 2), (1, 2048), TRITON),
    _mla((17, 32), DRAFTS, (1, 2), (2049, 32768), HOPPER),
    _mla((17, 32), DRAFTS, (1, 2), ANY, FA, HOPPER),
    _mla((17, 32), DRAFTS, (3, 8), (1, 8192), HOPPER),
    _mla((17, 32), DRAFTS, (9, 32), (1, 2048), HOPPER),
    _mla((17, 32), DRAFTS, ANY, ANY, FA, MLA, HOPPER),
    # up to 64 heads
    _mla((33, 64), SINGLE, (129, None), (1, 2048), MLA, HOPPER),
    _mla((33, 64), SINGLE, (129, None), (2049, 8192), FA, MLA, HOPPER),
    _mla((33, 64), SINGLE, (1, 2), (8193, 32768), FA, HOPPER),
    _mla((33, 64), SINGLE, ANY, ANY, HOPPER),
    _mla((33, 64), DRAFTS, (1, 2), (1, 32768), HOPPER),
    _mla((33, 64), DRAFTS, (1, 2), ANY, FA, HOPPER),
    _mla((33, 64), DRAFTS, (3, 8), (1, 8192), HOPPER),
    _mla((33, 64), DRAFTS, (9, 32), (1, 2048), HOPPER),
    _mla((33, 64), DRAFTS, ANY, ANY, FA, MLA, HOPPER),
    # more heads
    _mla((65, None), SINGLE, (1, 2), (1, 2048), TRITON),
    _mla((65, None), SINGLE, (1, 2), (8193, 32768), HOPPER),
    _mla((65, None), SINGLE, (1, 2), ANY, FA, HOPPER),
    _mla((65, None), SINGLE, (3, 8), (1, 8192), HOPPER),
    _mla((65, None), SINGLE, (3, 8), (8193, 32768), FA, HOPPER),
    _mla((65, None), SINGLE, (9, 32), (1, 2048), FA, HOPPER),
    _mla((65, None), SINGLE, (33, None), (1, 2048), MLA, FA, HOPPER),
    _mla((65, None), DRAFTS, (1, 2), (1, 8192), HOPPER),
    _mla((65, None), DRAFTS, (3, 8), (1, 2048), HOPPER),
    _mla((65, None), (1, 8), ANY, ANY, FA, MLA, HOPPER),
)
