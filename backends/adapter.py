"""One adapter for every vendor callable: its conventions are data, and each is removed here and nowhere else.

A `Convention` says what a callable names, expects and returns; an `Adapter` makes a kernel's `prepare` and `run` of it.
What all layers of a step share is made once, in `prepare`; a call adds the tensors of its layer.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad

from portable.backends.convention import CSR, OF_THE_CALL, Convention, why_not_called
from portable.backends.rows import as_batch, as_slots, check_reach, may_be_empty, seen_rows, token_csr
from portable.kernel import KV, Kernel, KernelCaps, LseForm, Segment, head_dims
from portable.layer import Layer, LayerTensors, UnsupportedError
from portable.merge import lse_rows
from portable.paging import num_pages, page_csr
from portable.ragged import cu_from_lens, ragged_arange

__all__ = ["Adapter", "Convention", "why_not_called"]


HT = {base: LseForm(base=base) for base in ("e", "2")}


class Step(NamedTuple):
    """What all layers of a step share."""

    function: Callable[..., Any]
    calls: tuple[dict[str, Any], ...]  # two where requests differ in being causal; none where no row has a key
    causal: torch.Tensor | None  # [T] bool: the rows for which the first of two calls is right
    seen: torch.Tensor | None  # [T] bool: the rows that see a key; None where all do
    batch: tuple[int, int] | None  # (B, Sq) where q is [B, Sq, H, D]
    sources: torch.Tensor | None  # [B * Sq] i64, the token at each place; None where it is the same
    places: torch.Tensor | None  # [T] i64, the place of each token
    wide: int = 0  # what q, K and V are padded to; 0: they are as wide as they should be
    limited: bool = False  # whether memory may lie where the callable does not reach it
    direct: bool = False  # whether a dense `out` is what the callable may write


class Adapter:
    """A vendor callable as the functions of a kernel.

    `Adapter(convention).kernel(caps)` is the kernel.
    """

    def __init__(self, convention: Convention) -> None:
        self.convention = convention
        # "" where it has no such keyword
        of_call = (convention.names.get(name, "") for name in OF_THE_CALL)
        self._q, self._qv, self._k, self._v, self._out, self._sinks, self._alibi = islice(of_call, 7)
        self._k_descale, self._v_descale, self._asks_lse = of_call
        self._checked: Callable[..., Any] | None = None

    def kernel(self, caps: KernelCaps) -> Kernel:
        """The kernel of these caps, which get the convention's `lse`."""
        return Kernel(replace(caps, lse=self.convention.lse), self.run, self.prepare)

    def bind(self) -> Callable[..., Any]:
        """The callable, with its module imported and its signature checked.

        Raises:
            UnsupportedError: it does not take a keyword that it would be given, or wants another.
        """
        convention = self.convention
        found: Any = importlib.import_module(convention.module)
        for name in convention.function.split("."):
            found = getattr(found, name)
        function: Callable[..., Any] = found
        if function is not self._checked:
            if reason := why_not_called(function, convention.keywords):
                raise UnsupportedError(f"{convention.module}.{convention.function} {reason}")
            self._checked = function
        return function

    def prepare(self, segment: Segment, layer: Layer) -> Step:
        """The arguments of a step; it waits for no device."""
        function, convention, caps = self.bind(), self.convention, segment.kernel.caps
        batch = sources = places = None
        tokens = segment.tokens.stop - segment.tokens.start
        if not (tokens and segment.max_seq_len):
            return Step(function, (), None, None, batch, sources, places)
        if convention.rows == "batch":
            batch, sources, places = as_batch(segment)
        common = self._common(segment, layer)
        rows = None
        if isinstance(segment.causal, torch.Tensor):
            request = torch.from_numpy(ragged_arange(segment.host_query_lens)[0])
            rows = segment.causal[request.to(segment.causal.device).long()]
        ways = (bool(segment.causal),) if rows is None else (True, False)
        calls = tuple({**common, **self._masks(layer, causal)} for causal in ways)
        seen = seen_rows(segment, layer) if may_be_empty(segment, layer) else None
        key_dim, width = head_dims(caps.op, layer)
        wide = max(key_dim, width) if convention.equal_value_dim and key_dim != width else 0
        limited = not (caps.max_tensor_bytes is caps.max_block_id is convention.address_window is None)
        direct = batch is None and len(calls) == 1 and wide in (0, width)
        return Step(function, calls, rows, seen, batch, sources, places, wide, limited, direct)

    def _common(self, segment: Segment, layer: Layer) -> dict[str, Any]:
        """What a step fixes, masks aside, by the callable's keywords."""
        convention, names = self.convention, self.convention.names
        longest = segment.max_query_len
        if convention.folds_single and longest == 1 and (segment.host_query_lens != 1).any():
            longest = 2  # a longer grid costs nothing, and rows stay with their requests
        known: dict[str, Any] = {
            "cu_seqlens_q": segment.cu_seqlens_q,
            "seq_lens": segment.seq_lens,
            "max_query_len": longest,
            "max_seq_len": segment.max_seq_len,
            "block_table": segment.block_table,
            "page_size": segment.page_size,
            "scale": layer.scale,
            "softcap": layer.softcap or 0.0,
        }
        if "cu_seqlens_k" in names:
            square = segment.exact and (segment.host_query_lens == segment.host_seq_lens).all()
            known["cu_seqlens_k"] = segment.cu_seqlens_q if square else cu_from_lens(segment.seq_lens)
        if any(name in names for name in CSR):
            assert segment.block_table is not None
            if convention.pages != "page":
                csr, known["page_size"] = token_csr(segment), 1
            else:
                pages = num_pages(segment.host_seq_lens, segment.page_size)
                csr = page_csr(segment.block_table, segment.seq_lens, segment.page_size, pages)
            known |= zip(CSR, (csr.indptr, csr.indices, csr.last_page_len), strict=True)
        said = {keyword: known[name] for name, keyword in names.items() if name in known}
        made = {keyword: make(segment, layer) for keyword, make in convention.step.items()}
        return {**convention.fixed, **said, **made}

    def _masks(self, layer: Layer, causal: bool) -> dict[str, Any]:
        """Causality and window. A callable with an argument for the first closes the right side itself."""
        names = self.convention.names
        left, right = layer.window
        if causal:
            right = None if "causal" in names else 0
        left, right = (self.convention.open_side if side is None else side for side in (left, right))
        window = (left, right, *self.convention.window_more)
        known = {"causal": causal, "window": window, "window_left": left, "window_right": right}
        return {names[name]: value for name, value in known.items() if name in names}

    def run(
        self,
        q: torch.Tensor,
        kv: KV,
        segment: Segment,
        layer: Layer,
        tensors: LayerTensors,
        out: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        """One layer of the step, into `out` and `lse`."""
        step: Step = segment.prepared
        if not step.calls:
            out.zero_()
            if lse is not None:
                _ = lse.copy_(tensors.sinks[:, None]) if tensors.sinks is not None else lse.fill_(-torch.inf)
            return
        got, got_lse = self._call(step, step.calls[0], q, kv, segment, layer, tensors, out, lse is not None)
        if step.causal is not None:
            other = self._call(step, step.calls[1], q, kv, segment, layer, tensors, out, lse is not None)
            got = torch.where(step.causal[:, None, None], got, other[0])
            if got_lse is not None and other[1] is not None:
                got_lse = torch.where(step.causal, got_lse, other[1])
        form, zeroes = self.convention.lse, self.convention.zeroes_empty
        as_promised = form.empty == "sink" or (form.empty == "-inf" and not layer.sinks)
        if not zeroes or (lse is not None and not as_promised):
            seen = step.seen
            if got.is_cuda and torch.cuda.is_current_stream_capturing():
                seen = seen_rows(segment, layer)  # what is replayed has other lengths
            if seen is not None and not zeroes:
                got = got.masked_fill(~seen[:, None, None], 0)
            if seen is not None and got_lse is not None:
                got_lse = got_lse.masked_fill(~seen, -torch.inf)
                if layer.sinks and tensors.sinks is not None:
                    got_lse = torch.where(seen, got_lse, tensors.sinks.float()[:, None])
        if got is not out:
            out.copy_(got)
        if lse is not None and got_lse is not None:
            lse.copy_(got_lse)

    def _call(
        self,
        step: Step,
        fixed: dict[str, Any],
        q: torch.Tensor,
        kv: KV,
        segment: Segment,
        layer: Layer,
        tensors: LayerTensors,
        out: torch.Tensor,
        wants_lse: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """One call: its output [T, H, Dv], which may be `out`, and its LSE [H, T] in natural log or None."""
        convention, (k, v), width = self.convention, kv, out.shape[-1]
        if step.wide:
            assert v is not None
            q, k, v = (pad(each, (0, step.wide - each.shape[-1])) for each in (q, k, v))
        if step.batch is not None:
            q = q if step.sources is None else q[step.sources]
            q = q.unsqueeze(1) if step.batch[1] == 1 else q.view(*step.batch, *q.shape[1:])
        call = fixed.copy()
        if step.limited:
            pages = None if segment.block_table is None else len(k)
            check_reach(segment.kernel.caps, convention.address_window, pages, q, k, v)
        if convention.pages != "page" and segment.block_table is not None:
            slots = convention.names["kv_indices"]
            (k, v), call[slots] = as_slots(kv, call[slots], segment.page_size, paged=convention.pages == "single")
        elif v is None:
            k = k.unsqueeze(-2)  # latent pages have one head
        if self._qv:
            call[self._qv], q = q.split_with_sizes((width, q.shape[-1] - width), -1)
            v, k = k.split_with_sizes((width, k.shape[-1] - width), -1)
        call[self._q], call[self._k] = q, k
        if self._v:
            call[self._v] = v
        if self._asks_lse:
            call[self._asks_lse] = wants_lse
        if layer.sinks and tensors.sinks is not None:
            call[self._sinks] = tensors.sinks.to(convention.sink_dtype or tensors.sinks.dtype)
        if layer.alibi:
            call[self._alibi] = tensors.alibi
        if self._k_descale:
            call[self._k_descale] = self._descale(tensors.k_scale, segment, layer)
            call[self._v_descale] = self._descale(tensors.v_scale, segment, layer)
        if self._out:
            direct = step.direct and out.is_contiguous()
            call[self._out] = out if direct else out.new_empty((*q.shape[:-1], step.wide or width))
        got, got_lse = self._unpack(step.function(**call), call, wants_lse)
        if step.batch is not None:
            got = got.squeeze(1) if step.batch[1] == 1 else got.flatten(0, 1)
            got = got if step.places is None else got[step.places]
        if step.wide and got.shape[-1] != width:
            got = got[..., :width]
        if got_lse is None:
            return got, None
        got_lse = self._lse(got_lse, step, out.shape[1], out.shape[0], segment.cu_seqlens_q)
        return got, got_lse if step.places is None else got_lse[:, step.places]

    def _lse(self, lse: torch.Tensor, step: Step, heads: int, tokens: int, cu: torch.Tensor) -> torch.Tensor:
        """An LSE as [H, rows]; what needs no conversion takes no time: `lse_rows` would take 4 us."""
        form = self.convention.lse
        if step.batch is not None:
            requests, queries = step.batch
            tokens = requests * queries
            if form.layout == "bhs" and queries == 1 and lse.shape == (requests, heads, 1):
                rows, columns, _ = lse.stride()
                lse, form = lse.as_strided((heads, requests), (columns, rows)), HT[form.base]  # one view, not two
            elif form.layout[0] == "b":
                lse = lse.squeeze(-1) if form.layout == "bhs1" else lse
                lse = lse.permute(2, 0, 1) if form.layout == "bsh" else lse.transpose(0, 1)  # [H, B, Sq]
                lse = lse if lse.shape[2] == queries else lse[..., :queries]
                lse, form = lse.squeeze(2) if queries == 1 else lse.flatten(1), HT[form.base]
        if lse.dtype is torch.float32 and form.base == "e":
            if form.layout == "ht" and lse.shape == (heads, tokens):
                return lse
            if form.layout == "th" and lse.shape == (tokens, heads):
                return lse.T
        return lse_rows(lse, form, heads, tokens, cu)

    def _unpack(
        self, result: Any, call: Mapping[str, Any], wants_lse: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The output and the LSE among the results, which are told apart by how many there are."""
        convention = self.convention
        results = result if isinstance(result, tuple) else tuple(result) if isinstance(result, list) else (result,)
        found = None
        if wants_lse:
            at = convention.returns.get(len(results))
            found = None if at is None else results[at]
            if found is None:
                name, counts = f"{convention.module}.{convention.function}", " or ".join(map(str, convention.returns))
                raise RuntimeError(f"{name} returned {len(results)} values; with an LSE they are {counts}")
        return call[self._out] if convention.writes_out else results[0], found

    def _descale(self, scale: torch.Tensor | None, segment: Segment, layer: Layer) -> torch.Tensor | None:
        """The scale of an fp8 cache in the callable's shape; None for other caches."""
        if layer.kv_dtype.itemsize > 1:
            return None
        if scale is None:
            scale = torch.ones((), device=segment.seq_lens.device)
        if self.convention.descale == "one":
            if scale.numel() != 1:
                raise ValueError(f"scale has shape {tuple(scale.shape)}; {self.convention.function} takes one number")
            return scale.float().reshape(1)
        return scale.float().reshape(1, -1).expand(len(segment.seq_lens), layer.num_kv_heads)
