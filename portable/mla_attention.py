"""`MlaAttention`: multi-head latent attention, planned once a step, then written and run with tensors only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from portable import ops
from portable.arguments import at_least, checked, named
from portable.attention import NO_TENSORS, Kernels
from portable.batch import Batch
from portable.check import check_cache, check_latent_tensors
from portable.kernel import KV, AttnOut, Needs, Op
from portable.layer import Layer, LayerTensors, UnsupportedError, check_family
from portable.limits import Limits
from portable.mla import MAX_DECODE_QUERIES, MlaPlan, workspace_bytes, workspace_tokens
from portable.mla_slot import MlaSlot
from portable.mla_weights import MlaWeights
from portable.padded_plans import PaddedPlans, whole
from portable.parts import Parts
from portable.platform.detect import detect
from portable.ragged import next_power_of_2
from portable.select import Choice, requested_by
from portable.sizes import Size

if TYPE_CHECKING:
    from portable.explain import Explanation

Pages = KV | tuple[torch.Tensor, None] | torch.Tensor


class MlaAttention(PaddedPlans[MlaPlan]):
    """All the MLA layers of a model that share one `Layer`.

    The cache holds latents: [pages, page_size, rank + rope], as `allocate_cache` makes it. Decodes attend to the
    latents themselves; prefills to keys and values made of them, a workspace of context at a time, so that no context
    takes more memory than `workspace_bytes` tells.

    Of a `batch_invariant` layer a request's bits are the same in every batch, as long as the workspace is: contexts are
    cut where their own lengths say, so that chunks are not all full, and products with the up-projection have 256 rows.

    Args:
        layer: what the layers have in common, by `Layer.mla`.
        page_size: tokens per page of their caches.
        device: a torch device or its name, or None for the best of this machine (`PORTABLE_DEVICE`).
        max_reqs, max_tokens, max_seq_len: the largest step that will be planned.
        num_pages: pages of a cache, where it is known: a kernel that cannot address them all is not chosen.
        workspace: context tokens that are made keys and values at once, at least a page; None for a GiB of them.
        backend: a provider or kernel name to use, or "op=name,..."; None for `PORTABLE_BACKEND` or the best.

    Raises:
        ValueError: a size below 1, or a workspace that holds no page.
        UnsupportedError: no kernel serves this layer on this device; the message lists every reason.

    >>> layer = Layer.mla(num_heads=2, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6,
    ...                   dtype=torch.float32)
    >>> attn = MlaAttention(layer, page_size=4, device="cpu")
    >>> weights = MlaWeights.from_kv_b_proj(torch.randn(2 * (8 + 6), 16), layer)
    >>> plan = attn.plan(Batch.from_lens([5], [5], block_table=[[3, 6]], page_size=4))
    >>> pages, kv_c, k_pe = torch.zeros(8, 4, 20), torch.randn(5, 16), torch.randn(5, 4)
    >>> attn.write(kv_c, k_pe, pages, plan)
    >>> attn.run(torch.randn(5, 2, 8), torch.randn(5, 2, 4), kv_c, k_pe, pages, plan, weights).out.shape
    torch.Size([5, 2, 6])
    """

    @checked
    def __init__(
        self,
        layer: Layer,
        *,
        page_size: int,
        device: torch.device | str | None = None,
        max_reqs: int = 256,
        max_tokens: int = 8192,
        max_seq_len: int = 131072,
        num_pages: int | None = None,
        workspace: int | None = None,
        backend: str | None = None,
    ) -> None:
        check_family(layer, "MlaAttention")
        self.limits = Limits(page_size=page_size, max_reqs=max_reqs, max_tokens=max_tokens, max_seq_len=max_seq_len)
        self.layer = layer
        self.page_size = page_size
        self.max_reqs, self.max_tokens, self.max_seq_len = max_reqs, max_tokens, max_seq_len
        self.workspace = workspace_tokens(layer, page_size, workspace)
        self.target = detect(device)
        self.device = torch.device(self.target.device)
        self._kernels = Kernels(self.target, layer, requested_by(backend), num_pages)
        self._slots: dict[int, MlaSlot] = {}
        longest, chunk = next_power_of_2(max_seq_len), next_power_of_2(self.workspace)
        usual = {
            "decode": (Op.MLA_DECODE, Needs(True, page_size, 1, longest)),
            "verify": (Op.MLA_DECODE, Needs(True, page_size, MAX_DECODE_QUERIES, longest)),
            "prefill": (Op.PREFILL, Needs(True, None, longest, longest)),
            "context": (Op.PREFILL, Needs(False, None, next_power_of_2(max_tokens), chunk, lse=True)),
            "merge": (Op.MERGE, Needs()),
            "cache_write": (Op.CACHE_WRITE, Needs(page_size=page_size)),
            "cache_gather": (Op.CACHE_GATHER, Needs(page_size=page_size)),
        }
        self.choices: Mapping[str, Choice] = {phase: self._kernels.choice(*asked) for phase, asked in usual.items()}

    def explain(self) -> Explanation:
        """Every choice with its reasons; print it."""
        return self._kernels.explain(self.page_size)

    def workspace_bytes(self, *, slots: int | None = None) -> int:
        """The most that the contexts of a step take at once, on the device, and what padded plans hold there.

        Args:
            slots: None for both; else what `use_workspace` needs for padded plans of so many slots.

        Beside it is an output [T, H, Dv] of a chunk's tokens: 1,053 MiB in all were measured where this is 1,019, for
        512 tokens on a context of 16k and on one of 128k alike (128 heads, bfloat16).
        """
        if slots is None:
            return workspace_bytes(self.layer, self.workspace) + sum(slot.nbytes for slot in self._slots.values())
        return self._bytes_of(slots)

    @checked
    def warmup(
        self, *, query_lens: Sequence[int] | None = None, return_lse: bool = True, cache: Pages | None = None,
        tensors: LayerTensors | None = None,
    ) -> int:  # fmt: skip
        """Compile all that steps of this object's limits launch, as `Attention.warmup` does.

        Args:
            query_lens: the new tokens per request of the steps to come, (1,) for decodes alone; None: any. Lengths up
                to 8 stand for requests on a context and for first chunks.
            return_lse: whether `run` will be asked for an LSE.
            cache: pages like those to come, where they are not as `allocate_cache` makes them.
            tensors: the like of those to come; None: a scale, of an fp8 cache.

        Returns:
            The number of kernels that were compiled, or read from disk.

        >>> MlaAttention(Layer.mla(num_heads=2), page_size=16, device="cpu").warmup()  # nothing is compiled there
        0
        """
        from portable import mla_warmup, warmup

        lens, lses = self.limits.checked(query_lens), (False, True) if return_lse else (False,)
        asked = tuple(mla_warmup.needs(self.layer, self.limits, lens, lses))
        if self.device.type != "cpu":
            mla_warmup.multiply(self.layer, self.device, self.limits, lens)
        if cache is not None:
            check_cache(self.layer, KV(pages_of(cache), None), self.page_size, self.device)
        return self._kernels.warm(
            asked,
            mla_warmup.steps(self.limits, lens, self.workspace),
            tuple(warmup.caches(self.layer, self.page_size)) if cache is None else (KV(pages_of(cache), None),),
            warmup.example(self.layer) if tensors is None else tensors,
            lses,
            mla_warmup.launches(self.workspace, asked),
        )

    @named
    def plan(self, step: Batch | Parts, *, pad_to: int | Size | None = None, slot: int = 0) -> MlaPlan:
        """Host work for one step, shared by all layers. The plan lives until the next one on its slot.

        `Parts` (a tree, a shared prefix) run one by one and are merged.

        Args:
            pad_to: what a step of decodes, of up to 8 new tokens each, is padded to for a graph; see `Attention.plan`.
            slot: plans of several slots live at the same time, each in memory and room for partial results of its own,
                which what runs on the slot shares: on one stream, not on two at once.

        Raises:
            ValueError: the step is larger than this object was made for, on another device, or of another page size.
            UnsupportedError: parts, or requests of more than 8 new tokens, with `pad_to`.
        """
        if pad_to is not None:
            return self._plan_padded(whole(step), pad_to, slot)
        self.limits.check(step.batches[0] if isinstance(step, Parts) else step, self.device, "MlaAttention")
        return self._slot(slot).renew(step)

    def _plan_padded(self, step: Batch, pad_to: int | Size, slot: int) -> MlaPlan:
        size = self._checked_size(step, pad_to)
        if size.queries > MAX_DECODE_QUERIES:
            raise UnsupportedError(
                f"pad_to has requests of {size.queries} new tokens; MLA is captured up to {MAX_DECODE_QUERIES}, which "
                "its decode kernels take: more are a prefill, whose contexts are gathered by numbers of the host"
            )
        return self._renew_padded(step, size, slot)

    def _slot(self, slot: int) -> MlaSlot:
        if slot not in self._slots:
            at_least(0, slot=slot)
            self._slots[slot] = MlaSlot(self.layer, self._kernels, self.workspace)
        return self._slots[slot]

    def _slot_of(self, plan: MlaPlan) -> MlaSlot:
        return next(slot for slot in self._slots.values() if slot.plan is plan)

    @named
    def write(
        self, kv_c: torch.Tensor, k_pe: torch.Tensor, cache: Pages, plan: MlaPlan, tensors: LayerTensors = NO_TENSORS
    ) -> None:
        """Scatter the new tokens' latents: kv_c [T, rank] and k_pe [T, rope], one row of both to each slot, in place.

        `tensors.k_scale`, a scalar, divides what an fp8 cache stores, saturating. Slot -1 writes nothing.
        """
        self._check_current(plan)
        ops.cache_write(kv_c, k_pe, pages_of(cache), None, *tensors, plan.handle)

    @named
    def run(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        kv_c: torch.Tensor,
        k_pe: torch.Tensor,
        cache: Pages | None,
        plan: MlaPlan,
        weights: MlaWeights,
        *,
        tensors: LayerTensors = NO_TENSORS,
        out: torch.Tensor | None = None,
        return_lse: bool = False,
    ) -> AttnOut:
        """One layer of the step that `plan` holds.

        Args:
            q_nope, q_pe: the new tokens' queries [T, H, nope] and [T, H, rope], packed in batch order. As the two
                parts of one tensor they are not copied for prefills.
            kv_c, k_pe: the new tokens' latents [T, rank] and [T, rope], normalised and rotated: as `write` took them.
            cache: the pages, written already; None for a batch without a cache.
            weights: the layer's up-projection.
            tensors: its `k_scale`, of an fp8 cache.
            out: [T, H, Dv] to write into; any strides.
            return_lse: also give lse [H, T] float32, natural log.
        """
        self._check_current(plan)
        tokens, heads = q_nope.shape[0], self.layer.num_heads
        if out is None:
            out = q_nope.new_empty((tokens, heads, self.layer.v_head_dim))
        lse = q_nope.new_empty((heads, tokens), dtype=torch.float32) if return_lse else None
        pages = None if cache is None else pages_of(cache)
        sinks, alibi, k_scale, v_scale, q_scale = tensors
        if not (sinks is alibi is v_scale is q_scale is None):  # the op takes a k_scale alone
            check_latent_tensors(tensors)
        ops.mla_attend(q_nope, q_pe, kv_c, k_pe, pages, *weights, k_scale, out, lse, plan.handle)
        return AttnOut(out, lse)

    def _check_current(self, plan: MlaPlan) -> None:
        if torch.compiler.is_compiling():
            return
        if not any(slot.plan is plan for slot in self._slots.values()):
            raise ValueError("plan is stale or another object's: a plan lives until the next plan() on its slot")


def pages_of(cache: Pages) -> torch.Tensor:
    """The one tensor of an MLA cache, given as itself or as `allocate_cache` gives it."""
    if isinstance(cache, torch.Tensor):
        return cache
    if not isinstance(cache, tuple) or cache[1] is not None:
        raise ValueError(f"cache is {type(cache).__name__}; of MLA it is one tensor [pages, page_size, rank + rope]")
    return cache[0]
