"""Which of NVIDIA's kernels are asked first where they were timed beside each other; data of ci/results/*-sm90*.json.

Times of MLA were taken at 16, 32, 64 and 128 heads, 1 and 4 new tokens, 1 to 256 requests and 1,024 to 65,536 keys, a
factor of 4 apart, on pages of 16 and 64; a row reaches to where the next time is nearer. Kernels within 3 % of the
fastest count as equal, so that a row serves both page sizes.

The H200 reads 1.4 times as fast as the H100, so that kernels which multiply less are left behind from fewer heads on.
"""

from __future__ import annotations

from dataclasses import replace

from portable.platform.target import ANY, Fastest, Range

FA, MLA, HOPPER, TRITON = "flash_attn", "flash_mla", "triton.mla_decode_hopper", "triton.mla_decode"
SINGLE, DRAFTS = (1, 1), (2, 8)
LARGE = (64, None)  # pages, below which a copy by TMA holds fewer rows


def _mla(heads: Range, queries: Range, reqs: Range, keys: Range, *first: str, pages: Range = ANY) -> Fastest:
    return Fastest(
        "mla_decode", ("sm90",), first, num_heads=heads, query_len=queries, reqs=reqs, seq_len=keys, page_size=pages
    )


_H100 = (  # and whatever else is an sm90
    _mla((1, 16), (1, 8), ANY, ANY, HOPPER),
    # up to 32 heads
    _mla((17, 32), SINGLE, (1, 2), (1, 2048), TRITON, pages=LARGE),
    _mla((17, 32), SINGLE, (1, 2), ANY, HOPPER),
    _mla((17, 32), SINGLE, (9, 32), ANY, HOPPER),
    _mla((17, 32), SINGLE, ANY, (1, 2048), TRITON),
    _mla((17, 32), SINGLE, (33, 128), (2049, 8192), MLA, FA, HOPPER),
    _mla((17, 32), SINGLE, (129, None), (2049, 8192), FA, MLA, HOPPER),
    _mla((17, 32), SINGLE, ANY, ANY, HOPPER),
    _mla((17, 32), DRAFTS, (1, 2), (1, 2048), TRITON),
    _mla((17, 32), DRAFTS, (1, 2), (2049, 32768), HOPPER),
    _mla((17, 32), DRAFTS, (1, 2), ANY, FA, HOPPER),
    _mla((17, 32), DRAFTS, (3, 8), (1, 8192), HOPPER),
    _mla((17, 32), DRAFTS, (9, 32), (1, 2048), HOPPER),
    # up to 64 heads
    _mla((33, 64), SINGLE, (129, None), (1, 2048), MLA, HOPPER),
    _mla((33, 64), SINGLE, (129, None), (2049, 8192), MLA, FA, HOPPER),
    _mla((33, 64), SINGLE, (1, 2), (8193, 32768), FA, HOPPER),
    _mla((33, 64), SINGLE, ANY, ANY, HOPPER),
    _mla((33, 64), DRAFTS, (1, 2), (1, 32768), HOPPER),
    _mla((33, 64), DRAFTS, (3, 8), (1, 8192), HOPPER),
    _mla((33, 64), DRAFTS, (9, 32), (1, 2048), HOPPER),
    _mla((33, 64), DRAFTS, (9, 32), (2049, 8192), MLA, FA, HOPPER),
    # more heads
    _mla((65, None), SINGLE, (1, 2), (1, 2048), TRITON),
    _mla((65, None), SINGLE, (1, 2), (8193, 32768), HOPPER),
    _mla((65, None), SINGLE, (1, 2), ANY, FA, HOPPER),
    _mla((65, None), SINGLE, (3, 8), (1, 8192), HOPPER),
    _mla((65, None), SINGLE, (3, 8), (8193, 32768), FA, HOPPER),
    _mla((65, None), SINGLE, (9, 32), (1, 2048), FA, HOPPER),
    _mla((65, None), SINGLE, (33, None), (1, 2048), MLA, FA, HOPPER),
    _mla((65, None), SINGLE, (33, 128), (2049, 5792), MLA, FA, HOPPER),
    _mla((65, None), DRAFTS, (1, 2), (1, 8192), HOPPER),
    _mla((65, None), DRAFTS, (1, 2), (8193, 32768), FA, HOPPER),
    _mla((65, None), DRAFTS, (3, 8), (1, 2048), HOPPER),
    _mla((65, None), DRAFTS, (33, None), (32769, None), MLA, FA, HOPPER),
    # all others
    _mla(ANY, (1, 8), ANY, ANY, FA, MLA, HOPPER),
    # in a replayed graph within 12 % of each other on an H100, 6 % on an H200; an eager call takes the host 5 to 7 us
    # in C++, in Triton 11 to 21 (the slowest of four hosts 8 to 9, and 17 to 22). MLA's latents (its heads have 192)
    # were not timed
    *(Fastest(op, ("sm90",), ("hip",), qk_head_dim=(1, 128)) for op in ("cache_write", "cache_gather", "merge")),
    # 49 rows of decodes and verifications, heads of 64 and 128: 0.35 (sinks and a window) to 1.03 of the time of vLLM's
    # FA3, all on an H100
    Fastest("paged", ("sm90",), ("triton",), query_len=(1, 8), qk_head_dim=(64, 128)),
)

_H200 = (
    _mla((1, 16), SINGLE, (1, 2), (32769, None), HOPPER, pages=LARGE),
    _mla((1, 16), SINGLE, (1, 8), (32769, None), FA, HOPPER),
    _mla((1, 16), SINGLE, (1, 8), ANY, HOPPER),
    _mla((1, 16), SINGLE, (9, 32), (23171, None), FA, MLA, HOPPER),
    _mla((1, 16), SINGLE, (9, 32), (8193, None), FA, HOPPER),
    _mla((1, 16), SINGLE, (1, 128), (1, 2048), HOPPER),
    _mla((1, 16), SINGLE, (9, 32), ANY, HOPPER),
    _mla((1, 16), SINGLE, (91, 181), (5793, None), FA, MLA, TRITON, pages=LARGE),  # 0.93 of HOPPER's time
    _mla((1, 16), SINGLE, (33, 128), (1, 5792), HOPPER, pages=LARGE),
    _mla((1, 16), SINGLE, (33, 128), (1, 8192), FA, MLA, HOPPER),
    _mla((1, 16), SINGLE, ANY, (1, 2048), HOPPER, pages=LARGE),
    _mla((1, 16), SINGLE, ANY, (1, 2048), FA, HOPPER),
    _mla((1, 16), DRAFTS, (1, 4), ANY, HOPPER),
    _mla((1, 16), DRAFTS, (5, 32), (1, 8192), HOPPER),
    _mla((1, 16), DRAFTS, ANY, (1, 2048), HOPPER),
    # up to 32 heads
    _mla((17, 32), SINGLE, (1, 8), (1, 2048), TRITON),
    _mla((17, 32), SINGLE, (1, 2), ANY, HOPPER),
    _mla((17, 32), SINGLE, (3, 8), (1, 32768), HOPPER),
    _mla((17, 32), SINGLE, (3, 8), ANY, FA, HOPPER),
    _mla((17, 32), SINGLE, (9, 32), (1, 2048), HOPPER),
    _mla((17, 32), SINGLE, (9, 32), (1, 8192), FA, HOPPER),
    _mla((17, 32), SINGLE, (33, 128), (1, 2048), FA, HOPPER),
    _mla((17, 32), SINGLE, (129, None), (1, 2048), MLA, FA, HOPPER),
    _mla((17, 32), DRAFTS, (1, 4), (1, 2048), TRITON),
    _mla((17, 32), DRAFTS, (1, 4), (1, 32768), HOPPER),
    _mla((17, 32), DRAFTS, (1, 4), ANY, FA, HOPPER),
    _mla((17, 32), DRAFTS, (5, 32), (1, 2048), HOPPER),
    # up to 64 heads
    _mla((33, 64), SINGLE, (1, 8), (1, 32768), HOPPER),
    _mla((33, 64), SINGLE, (1, 2), ANY, HOPPER),
    _mla((33, 64), SINGLE, (3, 8), ANY, FA, HOPPER),
    _mla((33, 64), SINGLE, (9, 32), (1, 8192), HOPPER),
    _mla((33, 64), SINGLE, (33, 128), (1, 2048), HOPPER),
    _mla((33, 64), SINGLE, (129, None), (1, 8192), MLA, FA, HOPPER),
    _mla((33, 64), DRAFTS, (1, 4), (1, 32768), HOPPER),
    _mla((33, 64), DRAFTS, (5, 32), (1, 2048), HOPPER),
    _mla((33, 64), DRAFTS, (5, 32), (1, 8192), MLA, FA, HOPPER),
    # more heads
    _mla((65, None), SINGLE, (1, 2), (1, 2048), TRITON),
    _mla((65, None), SINGLE, (1, 2), (8193, 32768), HOPPER),
    _mla((65, None), SINGLE, (1, 2), ANY, FA, HOPPER),
    _mla((65, None), SINGLE, (3, 8), (1, 8192), HOPPER),
    _mla((65, None), SINGLE, (3, 8), (8193, 32768), FA, HOPPER),
    _mla((65, None), SINGLE, (9, 32), (1, 2048), FA, HOPPER),
    _mla((65, None), SINGLE, (33, None), (1, 2048), MLA, FA, HOPPER),
    _mla((65, None), SINGLE, (33, 128), (1, 8192), MLA, FA, HOPPER),
    _mla((65, None), SINGLE, (129, None), (8193, None), MLA, FA, HOPPER),
    _mla((65, None), SINGLE, (91, 128), (16385, None), MLA, FA, HOPPER),
    _mla((65, None), DRAFTS, (1, 4), (1, 8192), HOPPER),
    _mla((65, None), DRAFTS, (33, None), (32769, None), MLA, FA, HOPPER),
    # all others
    _mla(ANY, (1, 8), ANY, ANY, FA, MLA, HOPPER),
    # prompts of 192/128: 0.94 to 0.97 of FA3's time at 3,000 and 4,096 tokens (16, 128 heads), 1.03 at 8,192 (32)
    Fastest(
        "prefill",
        ("sm90",),
        ("triton.prefill_hopper",),
        qk_head_dim=(129, 192),
        query_len=(2049, None),
        seq_len=(2049, 5792),
    ),
    # 64 requests of 8k: 1.19 of FA3's time on pages of 16, 1.02 on pages of 64; heads of 64 have the sinks and windows
    Fastest(
        "paged", ("sm90",), (FA,), query_len=(5, 8), seq_len=(5793, None), qk_head_dim=(65, 128), page_size=(1, 63)
    ),
)

MEASURED = (*(replace(row, products=("H200",)) for row in _H200), *_H100)
