"""One adapter for every vendor callable: its conventions are data, and each is removed here and nowhere else.

A `Convention` says what a callable names, expects and returns; an `Adapter` makes a kernel's `prepare` and `run` of it.
What all layers of a step share is made once, in `prepare`; a call adds the tensors of its layer.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad

from portable.backends.convention import CSR, Convention, why_not_called
from portable.backends.rows import as_batch, as_slots, may_be_empty, seen_rows, token_csr
from portable.kernel import KV, Kernel, KernelCaps, Segment
from portable.layer import Layer, LayerTensors, UnsupportedError
from portable.merge import lse_rows
from portable.paging import num_pages, page_csr
from portable.ragged import cu_from_lens, ragged_arange

__all__ = ["Adapter", "Convention", "why_not_called"]


class Step(NamedTuple):
    """What all layers of a step share."""

    function: Callable[..., Any]
    calls: tuple[dict[str, Any], ...]  # two where requests differ in being causal; none where no row has a key
    causal: torch.Tensor | None  # [T] bool: the rows for which the first of two calls is right
    seen: torch.Tensor | None  # [T] bool: the rows that see a key; None where all do
    batch: tuple[int, int] | None  # (B, Sq) where q is [B, Sq, H, D]
    sources: torch.Tensor | None  # [B * Sq] i64, the token at each place; None where it is the same
    places: torch.Tensor | None  # [T] i64, the place of each token


class Adapter:
    """A vendor callable as the functions of a kernel.

    `Adapter(convention).kernel(caps)` is the kernel.
    """

    def __init__(self, convention: Convention) -> None:
        self.convention = convention
        self._plain = convention.lse.layout == "ht" and convention.lse.base == "e" and convention.rows == "packed"
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
        function, batch, sources, places = self.bind(), None, None, None
        tokens = segment.tokens.stop - segment.tokens.start
        if not (tokens and segment.max_seq_len):
            return Step(function, (), None, None, batch, sources, places)
        if self.convention.rows == "batch":
            batch, sources, places = as_batch(segment)
        common = self._common(segment, layer)
        rows = None
        if isinstance(segment.causal, torch.Tensor):
            request = torch.from_numpy(ragged_arange(segment.host_query_lens)[0])
            rows = segment.causal[request.to(segment.causal.device).long()]
        ways = (bool(segment.causal),) if rows is None else (True, False)
        calls = tuple({**common, **self._masks(layer, causal)} for causal in ways)
        seen = seen_rows(segment, layer) if may_be_empty(segment, layer) else None
        return Step(function, calls, rows, seen, batch, sources, places)

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
            if convention.pages == "token":
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
        found = [self._call(step, call, q, kv, segment, layer, tensors, out, lse is not None) for call in step.calls]
        got, got_lse = found[0]
        if step.causal is not None:
            got = torch.where(step.causal[:, None, None], got, found[1][0])
            if got_lse is not None and found[1][1] is not None:
                got_lse = torch.where(step.causal, got_lse, found[1][1])
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
        convention, names = self.convention, self.convention.names
        k, v, width = kv.k, kv.v, out.shape[-1]
        if v is None:
            k = k.unsqueeze(-2)  # latent pages have one head
        elif convention.equal_value_dim and (wide := max(k.shape[-1], v.shape[-1])) > min(k.shape[-1], v.shape[-1]):
            q, k, v = (pad(each, (0, wide - each.shape[-1])) for each in (q, k, v))
        if step.batch is not None:
            q = (q if step.sources is None else q[step.sources]).unflatten(0, step.batch)
        call = dict(fixed)
        if convention.pages == "token" and segment.block_table is not None:
            (k, v), call[names["kv_indices"]] = as_slots(KV(k, v), call[names["kv_indices"]], segment.page_size)
        if "qv" in names:
            call[names["qv"]], q = q[..., :width], q[..., width:]
            v, k = k[..., :width], k[..., width:]
        call[names["q"]], call[names["k"]] = q, k
        if "v" in names:
            call[names["v"]] = v
        if "lse" in names:
            call[names["lse"]] = wants_lse
        if layer.sinks and tensors.sinks is not None:
            call[names["sinks"]] = tensors.sinks.to(convention.sink_dtype or tensors.sinks.dtype)
        if layer.alibi:
            call[names["alibi"]] = tensors.alibi
        if "k_descale" in names:
            call[names["k_descale"]] = self._descale(tensors.k_scale, segment, layer)
            call[names["v_descale"]] = self._descale(tensors.v_scale, segment, layer)
        if "out" in names:
            wide_v = width if v is None or layer.cache_layout != "strided" else v.shape[-1]
            direct = step.batch is None and len(step.calls) == 1 and out.is_contiguous() and wide_v == width
            call[names["out"]] = out if direct else out.new_empty((*q.shape[:-1], wide_v))
        result = step.function(**call)
        got, got_lse = self._unpack(result, call, wants_lse)
        if step.batch is not None:
            got = got.flatten(0, 1)
            got = got if step.places is None else got[step.places]
        if got.shape[-1] != width:
            got = got[..., :width]
        if got_lse is None:
            return got, None
        rows, cu = out.shape[0] if step.batch is None else step.batch[0] * step.batch[1], segment.cu_seqlens_q
        form = convention.lse
        if self._plain and got_lse.dtype is torch.float32 and got_lse.shape == (out.shape[1], rows):
            return got, got_lse  # saves 2 us
        if step.batch is not None and form.layout.startswith("b"):
            queries, layout = step.batch[1], form.layout
            got_lse = got_lse.squeeze(-1) if layout == "bhs1" else got_lse
            got_lse = got_lse[:, :queries] if layout == "bsh" else got_lse[..., :queries].transpose(1, 2)
            got_lse, form = got_lse.flatten(0, 1), replace(form, layout="th")
        got_lse = lse_rows(got_lse, form, out.shape[1], rows, cu)
        return got, got_lse if step.places is None else got_lse[:, step.places]

    def _unpack(
        self, result: Any, call: Mapping[str, Any], wants_lse: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The output and the LSE among the results, which are told apart by how many there are."""
        convention = self.convention
        results = tuple(result) if isinstance(result, tuple | list) else (result,)
        at = convention.returns.get(len(results)) if wants_lse else None
        if wants_lse and (at is None or results[at] is None):
            name, counts = f"{convention.module}.{convention.function}", " or ".join(map(str, convention.returns))
            raise RuntimeError(f"{name} returned {len(results)} values; with an LSE they are {counts}")
        got = call[convention.names["out"]] if convention.writes_out else results[0]
        return got, None if at is None else results[at]

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
