"""Products whose columns are cut in parts, a batch each: a wave then holds the columns of its own part only.

Of one part they are the products of two matrices, and nothing is cut.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def cut(rows, PARTS: tl.constexpr):
    """Rows [n, columns] as [PARTS, n, columns of a part]."""
    if PARTS > 1:
        rows = tl.permute(tl.reshape(rows, [rows.shape[0], PARTS, rows.shape[1] // PARTS]), 1, 0, 2)
    return rows


@triton.jit
def joined(rows, PARTS: tl.constexpr):
    """What `cut` made, as rows again."""
    if PARTS > 1:
        rows = tl.reshape(tl.permute(rows, 1, 0, 2), [rows.shape[1], PARTS * rows.shape[2]])
    return rows


@triton.jit
def scores_of(queries, keys, scores, PARTS: tl.constexpr):
    """queries times keys, both cut, onto `scores`, which may be None: [PARTS, m, n], whose sum the scores are."""
    return tl.dot(queries, keys.T if PARTS == 1 else tl.trans(keys, 0, 2, 1), scores, input_precision="ieee")


@triton.jit
def values_of(weights, values, total, PARTS: tl.constexpr):
    """weights [m, n] times values, which are cut, onto `total`, which is so as well."""
    if PARTS > 1:
        weights = tl.broadcast_to(weights[None, :, :], [PARTS, weights.shape[0], weights.shape[1]])
    return tl.dot(weights, values, total, input_precision="ieee")


@triton.jit
def by_row(factor, PARTS: tl.constexpr):
    """A factor [m] of rows, as what is cut is multiplied with."""
    return factor[:, None] if PARTS == 1 else factor[None, :, None]
