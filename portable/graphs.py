"""`Graphs`: a function over attention layers, captured once for each size and replayed for any step that fits."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from portable.arguments import at_least, checked, named
from portable.batch import Batch
from portable.ops import on_device
from portable.persistent import kind_of
from portable.platform.graphs import plain, recording
from portable.platform.graphs import runtime as runtime_of
from portable.sizes import Size, least

log = logging.getLogger("portable")

Asked = Batch | Mapping[str, Any]  # the step of one object, or all the arguments of its `plan`
Outputs = torch.Tensor | tuple[torch.Tensor, ...]
Key = tuple[Size, tuple[tuple[bool | None, bool, bool, int], ...]]  # and what a graph freezes of each step beside it


@dataclass(slots=True, eq=False)
class Captured:
    """One size: its graph, and the tensors that it reads and writes."""

    graph: Any  # None where it was above the budget
    inputs: tuple[torch.Tensor, ...]
    outputs: Outputs
    nbytes: int
    filled: int = 0  # rows of the inputs that are not 0


class Graphs:
    """Graphs of `fn`, one for each size that steps are padded to; they share one pool of memory.

    Args:
        fn: takes the plans, one for each of `attentions`, and the inputs, [padded_tokens, ...] each; gives a tensor or
            a tuple of them, [padded_tokens, ...]. It runs twice for each size on a step that is all padding, once to
            compile what is cold and once to be captured: it must not read the device, and whatever else it writes must
            survive that.
        attentions: the objects whose plans it takes: Attention, MlaAttention and Mamba. One may occur more than once,
            for KV groups that its layers have; each has a plan slot of its own.
        sizes: what steps are padded to; a size is captured at its first step, or by `capture`.
        budget: bytes of the device that all graphs may take beside the plans; a size that is above it is not captured,
            and its steps run without a graph, padded all the same.
        slot: the first of the plan slots, one for each of `attentions`.
        runtime: what captures, with the members of torch's module for the device; None: that module.

    Raises:
        ValueError: no sizes, or none of the objects.
        RuntimeError: the device has no graphs.
    """

    @checked
    def __init__(
        self,
        fn: Callable[..., Outputs],
        attentions: Sequence[Any],
        sizes: Iterable[Size | int],
        *,
        budget: int | None = None,
        slot: int = 0,
        runtime: Any = None,
    ) -> None:
        at_least(0, slot=slot, budget=budget or 0)
        self.fn, self.attentions, self.budget, self.slot = fn, tuple(attentions), budget, slot
        self.sizes = tuple(dict.fromkeys(size if isinstance(size, Size) else Size(size) for size in sizes))
        if not self.sizes:
            raise ValueError("sizes is empty; give at least one size that steps are padded to")
        if not self.attentions:
            raise ValueError("attentions is empty; give the objects whose plans fn takes")
        self.device: torch.device = self.attentions[0].device
        self._runtime = runtime_of(self.device) if runtime is None else runtime
        if self._runtime is None:
            raise RuntimeError(f"{self.device} has no graphs; run fn on its own plans")
        self._pool: Any = None
        self._captured: dict[Key, Captured] = {}

    @named
    def size_of(self, steps: Asked | Sequence[Asked]) -> Size:
        """The size that a step is padded to: the least that holds it.

        Raises:
            ValueError: it fits into none; the message says why not into the largest.
        """
        batch = _batch(self._each(steps)[0])
        found = least(self.sizes, batch)
        if found is None:
            largest = max(self.sizes, key=lambda size: (size.padded_tokens, size.reqs))
            raise ValueError(
                f"the step fits into none of {len(self.sizes)} sizes; into the largest, {largest}, because "
                f"{largest.why_not(batch)}"
            )
        return found

    @named
    def __call__(self, steps: Asked | Sequence[Asked], *inputs: torch.Tensor) -> Any:
        """`fn` for a step: planned, padded to the next size, and replayed.

        Args:
            steps: a Batch for all of `attentions`, or one for each; of a Mamba a dict of what its `plan` takes.
            inputs: [num_tokens, ...] each, on the device or the host; behind them stands 0.

        Returns:
            What fn gives, cut to [num_tokens, ...]: views that the next call overwrites.
        """
        each = self._each(steps)
        size, tokens = self.size_of(each), _batch(each[0]).num_tokens
        for x in inputs:
            if len(x) != tokens:
                raise ValueError(f"an input has {len(x)} rows; the step has {tokens} new tokens")
        key = _key(size, each)
        if key not in self._captured:
            self._captured[key] = self._capture(size, each, inputs)
        captured = self._captured[key]
        plans = self._plan(each, size)
        self._fill(captured, inputs)
        if captured.graph is None:
            with torch.no_grad():
                captured.outputs = self.fn(plans, *captured.inputs)
        else:
            captured.graph.replay()
        outputs = captured.outputs
        return outputs[:tokens] if isinstance(outputs, torch.Tensor) else tuple(x[:tokens] for x in outputs)

    @named
    def capture(self, steps: Asked | Sequence[Asked], *inputs: torch.Tensor) -> int:
        """Capture every size ahead, the largest first, so that the others reuse its memory; bytes that graphs take.

        Args:
            steps, inputs: like those to come, of any number of requests and tokens: their kinds count.
        """
        for size in sorted(self.sizes, key=lambda size: -size.padded_tokens):
            each = self._each(steps)
            if (key := _key(size, each)) not in self._captured:
                self._captured[key] = self._capture(size, each, inputs)
        return self.nbytes

    @property
    def nbytes(self) -> int:
        """Bytes that the graphs take beside the plans."""
        return sum(each.nbytes for each in self._captured.values())

    @property
    def captured(self) -> tuple[Size, ...]:
        """The sizes that have a graph."""
        return tuple(dict.fromkeys(size for (size, _), each in self._captured.items() if each.graph is not None))

    def _each(self, steps: Asked | Sequence[Asked]) -> list[Asked]:
        each = [steps] * len(self.attentions) if isinstance(steps, Batch | Mapping) else list(steps)
        if len(each) != len(self.attentions):
            raise ValueError(f"steps has {len(each)} entries; there are {len(self.attentions)} attentions")
        return each

    def _plan(self, each: Sequence[Asked], size: Size) -> tuple[Any, ...]:
        plans = []
        for place, (attention, asked) in enumerate(zip(self.attentions, each, strict=True)):
            given, more = ((asked,), {}) if isinstance(asked, Batch) else ((), asked)
            plans.append(attention.plan(*given, **more, pad_to=size, slot=self.slot + place))
        return tuple(plans)

    @torch.no_grad()
    def _fill(self, captured: Captured, inputs: Sequence[torch.Tensor]) -> None:
        """The inputs into those that the graph reads, 0 over what the last step had behind them."""
        if len(inputs) != len(captured.inputs):
            raise ValueError(f"{len(inputs)} inputs are given; the size was captured with {len(captured.inputs)}")
        for x, static in zip(inputs, captured.inputs, strict=True):
            if x.shape[1:] != static.shape[1:] or x.dtype != static.dtype or len(x) > len(static):
                raise ValueError(
                    f"an input is {x.dtype} {list(x.shape)}; the size was captured with {static.dtype} "
                    f"{list(static.shape)}"
                )
            near = x.device.type == "cpu" and static.device.type != "cpu"
            static[: len(x)].copy_(x.pin_memory() if near else x, non_blocking=True)
            static[len(x) : captured.filled].zero_()
        captured.filled = max((len(x) for x in inputs), default=0)

    def _capture(self, size: Size, each: Sequence[Asked], inputs: Sequence[torch.Tensor]) -> Captured:
        """A graph of `fn` for a step that is all padding; without one where that is above the budget."""
        empty, module = [_emptied(asked) for asked in each], self._runtime
        shapes = [(size.padded_tokens, *x.shape[1:]) for x in inputs]
        with plain():
            static = tuple(
                torch.zeros(shape, dtype=x.dtype, device=self.device) for x, shape in zip(inputs, shapes, strict=True)
            )
        if self._pool is None:
            self._pool = module.graph_pool_handle()
        graph = module.CUDAGraph()
        with torch.no_grad(), on_device(self.device):
            plans = self._plan(empty, size)
            self.fn(plans, *static)
            plans = self._plan(empty, size)  # what has advanced begins anew
            pool, self._pool = self._pool, None  # of a capture that fails nothing is used again
            with recording(module, graph, self.device, pool):
                before = self._held()
                outputs = self.fn(plans, *static)
                nbytes = max(self._held() - before, 0)
            self._pool = pool
        if self.budget is not None and self.nbytes + nbytes > self.budget:
            log.warning("%s takes %d bytes, above the budget of %d for all: not captured", size, nbytes, self.budget)
            return Captured(None, static, (), 0)
        return Captured(graph, static, outputs, nbytes)

    def _held(self) -> int:
        """Bytes that torch has of the device."""
        reserved = getattr(self._runtime, "memory_reserved", None)
        return int(reserved(self.device)) if reserved is not None else 0


def _key(size: Size, each: Sequence[Asked]) -> Key:
    return size, tuple(kind_of(_batch(asked)) for asked in each)


def _batch(asked: Asked) -> Batch:
    batch: Batch = asked if isinstance(asked, Batch) else asked["batch"]
    return batch


def _emptied(asked: Asked) -> Asked:
    """The like of a step, without requests."""
    if isinstance(asked, Batch):
        none = asked.block_table
        return replace(
            asked,
            cu_seqlens_q=asked.cu_seqlens_q[:1],
            seq_lens=asked.seq_lens[:0],
            block_table=None if none is None else none[:0],
            slot_mapping=None if asked.slot_mapping is None else asked.slot_mapping[:0],
            causal=asked.causal if isinstance(asked.causal, bool) else asked.causal[:0],
            query_lens=asked.query_lens[:0],
            host_cu_seqlens_q=asked.host_cu_seqlens_q[:1],
            host_seq_lens=asked.host_seq_lens[:0],
            is_prefilling=None,
            num_reqs=0,
            num_tokens=0,
            padded_tokens=0,
            max_query_len=0,
            max_seq_len=0,
        )
    per_request = {"num_accepted", "running", "checkpoints"}
    return {
        name: _emptied(x) if name == "batch" else x[:0] if name in per_request and x is not None else x
        for name, x in asked.items()
    }
