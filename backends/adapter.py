"""One adapter for every vendor callable: its conventions are data, and each is removed here and nowhere else.

A `Convention` says what a callable names, expects and returns; an `Adapter` makes a kernel's `prepare` and `run` of it.
What all layers of a step share is made once, in `prepare`; a call adds the tensors of its layer.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import is_grad_enabled
from torch.nn.functional import pad

from portable.backends.convention import OF_THE_CALL, Convention, why_not_called
from portable.backends.reach import Reach
from portable.backends.rows import lse_of_rows, unseen_rows
from portable.backends.step import Step, arguments, step_of
from portable.backends.turns import Caches
from portable.backends.views import View, Views, latent, latent_parts, slot_indices, slots
from portable.kernel import KV, Kernel, KernelCaps, Segment
from portable.layer import Layer, LayerTensors, UnsupportedError

SEVERAL = tuple, list  # how several results come

__all__ = ["Adapter", "Convention", "Step", "why_not_called"]


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
        self._slots = convention.names.get("kv_indices", "")
        self._writes_out = convention.writes_out
        # room for what is of a layer, so that no table grows in a call
        self._room = {keyword: None for keyword in (self._q, self._qv, self._k, self._v, self._asks_lse) if keyword}
        self._of_features = bool(self._sinks or self._alibi or self._k_descale)
        self._caches: dict[tuple[Any, ...], Caches] = {}
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
        function = self.bind()
        if not (segment.tokens.stop - segment.tokens.start and segment.max_seq_len):
            return Step(function, segment)
        rows = self.rows(segment)
        caches = partial(self._caches_of, segment, layer)
        return step_of(self.convention, function, rows, layer, self.fixed(rows, layer) | self._room, caches)

    def rows(self, segment: Segment) -> Segment:
        """The segment as the callable is to see it: the same queries over the same keys."""
        return segment

    def views(self, width: int) -> Callable[[KV], View]:
        """What makes of a cache what the callable wants."""
        if self.convention.pages != "page":
            return partial(slots, paged=self.convention.pages == "single")
        return partial(latent_parts, width=width) if self._qv else latent

    def _caches_of(self, segment: Segment, layer: Layer, reach: Reach | None, width: int) -> Caches:
        """Those of the layer's kind, for all steps."""
        dims = layer.num_kv_heads, layer.qk_head_dim, layer.v_head_dim, layer.latent_dim
        kind = reach, width, segment.page_size, dims, layer.kv_dtype, segment.seq_lens.device
        if kind not in self._caches:
            self._caches[kind] = Caches(Views(self.views(width), reach))
        return self._caches[kind]

    def fixed(self, segment: Segment, layer: Layer) -> dict[str, Any]:
        """What a step fixes, masks aside, by the callable's keywords."""
        return arguments(self.convention, segment, layer)

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
        """One layer of the step, into `out` and `lse`, of which no gradient is recorded."""
        if not is_grad_enabled():  # to ask takes 0.03 us, to enter the context 2 to 3
            self.attend(q, kv, segment, layer, tensors, out, lse)
            return
        with torch.no_grad():
            self.attend(q, kv, segment, layer, tensors, out, lse)

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
        """`run`, below its guard: what a callable with ways of its own overrides."""
        step: Step = segment.prepared
        if not step.calls:
            out.zero_()
            if lse is not None:
                _ = lse.copy_(tensors.sinks[:, None]) if tensors.sinks is not None else lse.fill_(-torch.inf)
            return
        got, got_lse = self._call(step, step.calls[0], q, kv, layer, tensors, out, lse)
        if step.causal is not None:
            other = self._call(step, step.calls[1], q, kv, layer, tensors, out, lse)
            got = torch.where(step.causal[:, None, None], got, other[0])
            if got_lse is not None and other[1] is not None:
                got_lse = torch.where(step.causal, got_lse, other[1])
        if got is not out:
            out.copy_(got)
        if lse is not None and got_lse is not None:
            lse.copy_(got_lse)
        if step.sets is not None:
            self._set_empty(step, layer, tensors, out, lse)

    def _call(
        self,
        step: Step,
        fixed: dict[str, Any],
        q: torch.Tensor,
        kv: KV,
        layer: Layer,
        tensors: LayerTensors,
        out: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """One call: its output [T, H, Dv] and its LSE [H, T] in natural log; `out` and None where they are in place."""
        call, (k, v) = fixed.copy(), kv
        if step.dense_rows:
            q = q.contiguous()
        if step.wide:
            assert v is not None
            q, k, v = (pad(each, (0, step.wide - each.shape[-1])) for each in (q, k, v))
        reach = step.reach
        if reach is not None and (step.views is not None or not reach.holds(q, k, v)):
            if reach.most is not None and (q.nbytes > reach.most or not q.is_contiguous()):
                reach.check_query(q)
            if step.views is None:
                reach.check(KV(k, v), pages=step.segment.block_table is not None)
        if step.views is not None:
            k, v, apart = step.views.of(k, v)
            if step.indices is not None:
                indices = step.indices.get(apart)
                call[self._slots] = self._indices(step, apart) if indices is None else indices
        given = q  # which stays to the end: an alias of it holds no memory
        if step.parts is not None:
            call[self._qv], given = step.parts.of(q)
        elif step.queries is not None:
            given = step.queries.of(q)
            if given is None:
                q = q.contiguous()
                given = step.queries.of(q)
        elif step.batch is not None:
            given = q[step.sources].view(*step.batch, *q.shape[1:])
        call[self._q], call[self._k] = given, k
        if self._v:
            call[self._v] = v
        if self._asks_lse:
            call[self._asks_lse] = lse is not None
        if self._of_features and (layer.sinks or layer.alibi or self._k_descale):
            self._add_features(call, step.segment, layer, tensors)
        into = None  # what of `out` is written
        if step.takes_out:
            if step.direct:
                into = step.dense.of(out) if step.dense is not None else out if out.is_contiguous() else None
            if into is None:
                call[self._out] = out.new_empty((*given.shape[:-1], step.wide or out.shape[-1]))
            else:
                call[self._out] = into
        result = step.function(**call)
        several = isinstance(result, SEVERAL)
        got = result[0] if several else result
        if self._writes_out and step.takes_out:
            got = out if into is not None else call[self._out]
        if got is not out:
            if step.batch is not None:
                if step.plain and step.grouped is not None:
                    step.grouped.of(out).copy_(got)
                    got = out
                else:
                    got = got.flatten(0, 1) if step.places is None else got.flatten(0, 1)[step.places]
            if step.wide and got.shape[-1] != out.shape[-1]:
                got = got[..., : out.shape[-1]]
        if lse is None:
            return got, None
        convention = self.convention
        at = convention.returns.get(len(result) if several else 1)
        logs = None if at is None else result[at]
        if logs is None:
            name, counts = f"{convention.module}.{convention.function}", " or ".join(map(str, convention.returns))
            found = len(result) if several else 1
            raise RuntimeError(f"{name} returned {found} values; with an LSE they are {counts}")
        # `copy_` casts, so what has the right numbers takes no view: `lse_of_rows` would take 4 us
        if logs.shape == step.logs:
            if step.lse_as is None:
                return got, logs
            step.lse_as.of(lse).copy_(logs)
            return got, None
        return got, lse_of_rows(logs, convention.lse, step.batch, step.places, lse, step.segment.cu_seqlens_q)

    def _indices(self, step: Step, apart: int) -> torch.Tensor:
        """Where keys are in pages that lie `apart` from each other, made once for a step."""
        known = step.indices or {}
        dense, indices = next(iter(known.items()))
        known[apart] = made = slot_indices(indices, dense, apart)
        return made

    @staticmethod
    def _set_empty(
        step: Step, layer: Layer, tensors: LayerTensors, out: torch.Tensor, lse: torch.Tensor | None
    ) -> None:
        """Write what the contract wants of rows without a key."""
        sets_out, sets_lse = step.sets or (False, False)
        unseen = step.unseen
        if out.is_cuda and torch.cuda.is_current_stream_capturing():
            unseen = unseen_rows(step.segment, layer)  # from the lengths of each replay
        if unseen is None:
            return
        if sets_out:
            out.masked_fill_(unseen[1], 0)
        if lse is not None and sets_lse:
            if layer.sinks and tensors.sinks is not None:
                torch.where(unseen[0], tensors.sinks.float()[:, None], lse, out=lse)
            else:
                lse.masked_fill_(unseen[0], -torch.inf)

    def _add_features(self, call: dict[str, Any], segment: Segment, layer: Layer, tensors: LayerTensors) -> None:
        """Sinks, slopes and the scales of an fp8 cache, where the layer has them."""
        if layer.sinks and tensors.sinks is not None:
            call[self._sinks] = tensors.sinks.to(self.convention.sink_dtype or tensors.sinks.dtype).contiguous()
        if layer.alibi and tensors.alibi is not None:
            call[self._alibi] = self._slopes(tensors.alibi, segment)
        if self._k_descale and layer.kv_dtype.itemsize == 1:
            for keyword, scale in ((self._k_descale, tensors.k_scale), (self._v_descale, tensors.v_scale)):
                if scale is not None:
                    call[keyword] = self._descale(scale, segment, layer)

    def _slopes(self, slopes: torch.Tensor, segment: Segment) -> torch.Tensor:
        """Slopes as the callable reads them, some by their address alone: dense float32."""
        return slopes.float().contiguous()

    def _descale(self, scale: torch.Tensor, segment: Segment, layer: Layer) -> torch.Tensor:
        """The scale of an fp8 cache in the callable's shape."""
        if self.convention.descale == "one":
            if scale.numel() != 1:
                raise ValueError(f"scale has shape {tuple(scale.shape)}; {self.convention.function} takes one number")
            return scale.float().reshape(1)
        return scale.float().reshape(1, -1).expand(len(segment.seq_lens), layer.num_kv_heads)
