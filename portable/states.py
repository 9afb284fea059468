"""Which states a step of recurrent layers reads, where it writes them, and how its tokens are cut: what kernels see.

A state slot is one row of the pools of states (conv and SSM alike: slot i of one belongs to slot i of the other). The
kernels see slots only, by four rules that hold in every mode:

* a request starts from the state of `initial_indices`, or from zero where `has_initial` is False or the slot is
  `pad_slot`, whatever stands there;
* a decode stores the state after its j-th token in `state_indices[:, j]`;
* a prefill stores the state after a chunk in `chunk_state_indices`, of its last chunk and of those that end a block;
* a slot equal to `pad_slot` is neither read nor written. A slot that is read may be written by the same request only,
  and no slot is written twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch


@dataclass(frozen=True, slots=True, eq=False)
class DecodeStates:
    """The requests of a step that go on from a state by one token, or by 1 + k of them to verify; D rows, padded."""

    requests: slice  # rows of the batch
    tokens: slice  # of the batch, padding included
    cu_seqlens_q: torch.Tensor  # [D + 1] i32, starts at 0; padded rows have no tokens
    initial_indices: torch.Tensor  # [D] i32, the slot of the state before the first token; pad_slot: a padded row
    state_indices: torch.Tensor  # [D, 1 + k] i32, the slot of the state after token j; pad_slot: not stored
    num_accepted: torch.Tensor | None  # [D] i32 of the step before, that `initial_indices` is from; None without drafts
    max_query_len: int
    pad_slot: int


@dataclass(frozen=True, slots=True, eq=False)
class PrefillStates:
    """The requests of a step that read their prompt; P rows in M chunks, each of one request and never empty."""

    requests: slice
    tokens: slice
    cu_seqlens_q: torch.Tensor  # [P + 1] i32, starts at 0
    has_initial: torch.Tensor  # [P] bool, the request goes on from a state
    initial_indices: torch.Tensor  # [P] i32, the slot of that state; pad_slot where there is none
    state_indices: torch.Tensor  # [P] i32, the slot of the state after the last token; pad_slot without tokens
    cu_chunks: torch.Tensor  # [M + 1] i32, the tokens at which chunks start, from 0; the last entry is their number
    chunk_requests: torch.Tensor  # [M] i32, the row of each chunk
    chunk_state_indices: torch.Tensor  # [M] i32, the slot of the state after it; pad_slot: not stored
    last_chunks: torch.Tensor  # [P] i32, the last chunk of each row; -1 for a row without tokens
    checkpoint_chunks: torch.Tensor | None  # [P] i32, the chunk that ends at the row's checkpoint; -1 without one
    conv_requests: torch.Tensor  # [C] i32, the row of each block of `conv_block` tokens of the causal convolution
    conv_offsets: torch.Tensor  # [C] i32, and which block of the row it is
    conv_block: int  # at least W - 1
    max_query_len: int
    pad_slot: int


class SsmTensors(NamedTuple):
    """What differs from layer to layer at run time; `dt` becomes clamp(softplus(dt + dt_bias), dt_limit)."""

    a: torch.Tensor  # [H], or [H, N] for Mamba-1; float32, below 0
    d: torch.Tensor | None = None  # [H], multiplies x beside the state
    dt_bias: torch.Tensor | None = None  # [H]
    dt_softplus: bool = True
    dt_limit: tuple[float, float] = (0.0, float("inf"))
