"""`Attention`: plan a step once, then write and run every layer of one kind with tensors only."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import cache
from typing import TYPE_CHECKING

import torch

from portable import ops
from portable.arguments import at_least, checked, named
from portable.batch import Batch
from portable.check import check_cache
from portable.child import saying
from portable.kernel import ATTENTION, KV, PAGES, AttnOut, Kernel, Needs, Op
from portable.layer import Layer, LayerTensors, UnsupportedError, check_family
from portable.limits import Limits
from portable.local_steps import local, local_capacity, local_host, local_size
from portable.mha import MhaPlan
from portable.packages import Package, installed
from portable.padded_plans import PaddedPlans, whole
from portable.parts import Parts
from portable.persistent import near
from portable.platform.detect import detect
from portable.plugin_kernels import fault, plugin_kernels
from portable.ragged import next_power_of_2
from portable.select import Choice, Request, requested_by, select, why_not_here
from portable.sizes import Size
from portable.slot import Slot
from portable.verdicts import Verdicts, answer

if TYPE_CHECKING:
    from portable.explain import Explanation
    from portable.platform.target import Target
    from portable.warmup import Launch

NO_TENSORS = LayerTensors()


@cache
def load_kernels() -> tuple[Kernel, ...]:
    """Every kernel of the backends folder, and of plug-ins of the entry-point group `portable.kernels`.

    `PORTABLE_PLUGINS` lists the names of those that may load (unset: all, empty: none). One that cannot be offered is
    reported and left out.
    """
    kernels: list[Kernel] = []
    backends = importlib.import_module("portable.backends")
    for info in sorted(pkgutil.iter_modules(backends.__path__), key=lambda info: info.name):
        kernels += getattr(importlib.import_module(f"portable.backends.{info.name}"), "KERNELS", ())
    return (*kernels, *plugin_kernels(kernels))


@named
def available_kernels(device: torch.device | str | None = None) -> tuple[Kernel, ...]:
    """The kernels that can run on a device with the packages of this machine, whatever the layer.

    >>> "torch.sdpa" in {kernel.name for kernel in available_kernels("cpu")}
    True
    """
    target = detect(device)
    packages = installed(target, None)
    verdicts = verdicts_on(target, packages)
    return tuple(kernel for kernel in load_kernels() if not why_not_here(kernel, target, packages, verdicts))


def verdicts_on(target: Target, packages: Mapping[str, Package]) -> Verdicts:
    """The verdicts of the self-test on a target's kernels."""

    def test(kernel: Kernel, target: Target) -> str | None:
        if kernel.caps.op not in ATTENTION:
            return fault(kernel, target)
        found: str | None = importlib.import_module("portable.backends.selftest").fault(kernel, target)
        return found

    return Verdicts(target, packages, test, load_kernels())


def self_test(device: str, names: Sequence[str]) -> None:
    """Test kernels in this process for another one, which reads the faults from the standard output."""
    with saying() as say:
        known = {kernel.name: kernel for kernel in load_kernels()}
        kernels = [known[name] for name in names]  # one that only the other process has is not this one's to judge
        target = detect(device)
        test = verdicts_on(target, {}).test
        importlib.import_module("portable.backends.selftest")
        torch.zeros(1, device=target.device).cpu()
        with importlib.import_module("portable.conformance.outcomes").on(target):
            answer((test(kernel, target) for kernel in kernels), say)


class Attention(PaddedPlans[MhaPlan]):
    """All the attention layers of a model that share one `Layer`.

    Args:
        layer: what the layers have in common.
        page_size: tokens per page of their caches.
        device: a torch device or its name, or None for the best of this machine (`PORTABLE_DEVICE`).
        max_reqs, max_tokens, max_seq_len: the largest step that will be planned.
        num_pages: pages of a cache, where it is known: a kernel that cannot address them all is not chosen. Without it
            such a kernel refuses the cache when it runs.
        backend: a provider or kernel name to use, or "op=name,..."; None for `PORTABLE_BACKEND` or the best.

    Raises:
        UnsupportedError: no kernel serves this layer on this device; the message lists every reason.

    >>> layer = Layer.gqa(num_heads=4, num_kv_heads=2, head_dim=8, dtype=torch.float32)
    >>> attn = Attention(layer, page_size=4, device="cpu")
    >>> pages = torch.zeros(8, 4, 2, 8), torch.zeros(8, 4, 2, 8)
    >>> batch = Batch.from_lens([5], [5], block_table=[[3, 6]], page_size=4)
    >>> plan = attn.plan(batch)
    >>> q, k, v = torch.randn(5, 4, 8), torch.randn(5, 2, 8), torch.randn(5, 2, 8)
    >>> attn.write(k, v, pages, plan)
    >>> attn.run(q, pages, plan, k=k, v=v).out.shape
    torch.Size([5, 4, 8])
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
        backend: str | None = None,
    ) -> None:
        check_family(layer, "Attention")
        self.limits = Limits(page_size=page_size, max_reqs=max_reqs, max_tokens=max_tokens, max_seq_len=max_seq_len)
        if layer.chunk is not None and layer.chunk % page_size:
            raise UnsupportedError(f"chunk {layer.chunk} is not a multiple of page_size {page_size}")
        self.layer = layer
        self.page_size = page_size
        self.max_reqs, self.max_tokens, self.max_seq_len = max_reqs, max_tokens, max_seq_len
        self.target = detect(device)
        self.device = torch.device(self.target.device)
        self._kernels = Kernels(self.target, layer, requested_by(backend), num_pages)
        self._positional = layer.window != (None, None) or layer.alibi or layer.chunk is not None  # its mask
        self._slots: dict[int, Slot] = {}
        self._plans: dict[int, MhaPlan] = {}  # the newest of each slot, by the slot's handle
        causal, longest = layer.causal, next_power_of_2(max_seq_len)
        usual = {
            "decode": (Op.PAGED, Needs(causal, page_size, query_len=1, seq_len=longest)),
            "extend": (Op.PAGED, Needs(causal, page_size, query_len=64, seq_len=longest)),
            "prefill": (Op.PREFILL, Needs(causal, None, query_len=longest, seq_len=longest)),
            "cache_write": (Op.CACHE_WRITE, Needs(page_size=page_size)),
        }
        # The kernel of each phase at the longest sequence: a layer that nothing serves fails here, not in a step.
        self.choices: Mapping[str, Choice] = {phase: self._kernels.choice(*asked) for phase, asked in usual.items()}

    def explain(self) -> Explanation:
        """Every choice with its reasons; print it."""
        return self._kernels.explain(self.page_size)

    @named
    def plan(self, step: Batch | Parts, *, pad_to: int | Size | None = None, slot: int = 0) -> MhaPlan:
        """Host work for one step, shared by all layers. The plan lives until the next one on its slot.

        A layer with a `chunk` gets `variants.local` of the step. `Parts` run one by one and are merged.

        Args:
            pad_to: what the step is padded to, for a graph: a size, or so many requests with as many new tokens each
                as the step's have. All that `run` and `write` read then lies where it lay in the last plan of this size
                on this slot, so that a graph captured with one plan is replayed after another. The step may be on the
                host: one copy brings it to the device, and of its block table only what changed.
            slot: plans of several slots live at the same time, each in memory and room for partial results of its own,
                which what runs on the slot shares, layers of a step too: on one stream, not on two at once.

        Raises:
            ValueError: the step is larger than this object was made for, on another device, or of another page size; it
                does not fit into `pad_to`.
            UnsupportedError: parts, a shard or a cross step, for a layer whose mask depends on positions; no kernel can
                be captured for `pad_to`.
            RuntimeError: a step is padded to a size while a graph is being captured.

        >>> layer = Layer.gqa(num_heads=4, num_kv_heads=2, head_dim=8, dtype=torch.float32)
        >>> Attention(layer, page_size=4, device="cpu").plan(Batch.from_lens([1], [5], block_table=[[3, 6]],
        ...     page_size=4), pad_to=8)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        portable.layer.UnsupportedError: no kernel can serve paged on cpu ... graph level SINGLE is above NEVER...
        """
        parts = step.batches if isinstance(step, Parts) else (step,)
        if self._positional and any(not part.self_attention for part in parts):
            raise UnsupportedError("keys that are not a whole sequence, for a layer with a window, ALiBi or chunks")
        if self.layer.chunk is not None and any(part.view is not None for part in parts):
            raise UnsupportedError(
                f"layer.chunk is {self.layer.chunk}, so plan() takes local itself: give it the plain batch"
            )
        if parts[0].block_table is None:
            parts[0].needs_exact("attention over contiguous K/V")
        if pad_to is not None:
            return self._plan_padded(step, pad_to, slot)
        self.limits.check(parts[0], self.device, "Attention")
        if self.layer.chunk is not None:
            parts = (local(parts[0], self.layer.chunk),)
        return self._kept(self._slot(slot).renew(parts))

    def _plan_padded(self, step: Batch | Parts, pad_to: int | Size, slot: int) -> MhaPlan:
        step = whole(step)
        size, chunk = self._checked_size(step, pad_to), self.layer.chunk
        if chunk is not None:
            if size.ahead:
                raise UnsupportedError(
                    f"pad_to has ahead {size.ahead}; a layer with chunks does not advance on the device"
                )
            size.check(step)  # what its chunks make of a step may fit where the step does not
            seen = near(step) or not isinstance(step.causal, bool)  # else one launch reads its pages off the view
            step, size = (local if seen else local_host)(step, chunk), local_size(size, chunk)
        return self._renew_padded(step, size, slot)

    def _kept(self, plan: MhaPlan) -> MhaPlan:
        self._plans[plan.handle] = plan
        return plan

    def _lost(self, handle: int) -> None:
        self._plans.pop(handle, None)

    def _slot(self, slot: int) -> Slot:
        if slot not in self._slots:
            at_least(0, slot=slot)
            self._slots[slot] = Slot(self.layer, self._kernels)
        return self._slots[slot]

    def _slot_of(self, plan: MhaPlan) -> Slot:
        return next(slot for slot in self._slots.values() if slot.handle == plan.handle)

    def workspace_bytes(self, *, slots: int | None = None) -> int:
        """Bytes of the device that padded plans hold: the memory of their slots, and what kernels prepared in it.

        Args:
            slots: None for what is held now; else what `use_workspace` needs for plans of so many slots.
        """
        if slots is None:
            return sum(slot.nbytes for slot in self._slots.values())
        return self._bytes_of(slots)

    def _largest(self) -> tuple[int, int, int]:
        chunk = self.layer.chunk
        if chunk is None:
            return super()._largest()
        return local_capacity(self.max_reqs, self.max_tokens, chunk), self.max_tokens, chunk

    @checked
    def warmup(
        self, *, query_lens: Sequence[int] | None = None, return_lse: bool = True,
        cache: tuple[torch.Tensor, torch.Tensor | None] | None = None, tensors: LayerTensors | None = None,
    ) -> int:  # fmt: skip
        """Compile all that steps of this object's limits launch, and load it for the life of the process.

        Kernels of vendors that compile at their first call are tested now, and others chosen for those that fail. A
        graph can be captured afterwards: what is cold then is a RuntimeError. What was compiled is kept on disk too
        (`PORTABLE_CACHE_DIR`), so that the next process only loads it.

        Args:
            query_lens: the new tokens per request of the steps to come, (1,) for decodes alone; None: any.
            return_lse: whether `run` will be asked for an LSE.
            cache: pages like those to come, where they are not as `allocate_cache` makes them.
            tensors: the like of those to come; None: a layer's sinks and slopes, and scales per tensor of an fp8 cache.

        Returns:
            The number of kernels that were compiled, or read from disk.

        >>> layer = Layer.gqa(num_heads=4, num_kv_heads=2, head_dim=8, dtype=torch.float32)
        >>> Attention(layer, page_size=4, device="cpu").warmup()  # nothing is compiled there
        0
        """
        from portable import warmup

        lens, lses = self.limits.checked(query_lens, self.layer.chunk), (False, True) if return_lse else (False,)
        if cache is not None:
            check_cache(self.layer, KV(*cache), self.page_size, self.device)
        return self._kernels.warm(
            warmup.needs(self.layer, self.limits, lens, lses),
            warmup.steps(self.limits, lens),
            tuple(warmup.caches(self.layer, self.page_size)) if cache is None else (KV(*cache),),
            warmup.example(self.layer) if tensors is None else tensors,
            lses,
        )

    @named
    def write(
        self, k: torch.Tensor, v: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor | None], plan: MhaPlan,
        tensors: LayerTensors = NO_TENSORS,
    ) -> None:  # fmt: skip
        """Scatter the new tokens into their pages: k [T, Hkv, D] and v [T, Hkv, Dv] to the plan's slots, in place.

        A scale divides what is stored, saturating at the largest value of an fp8 type. Slot -1 writes nothing.
        """
        self._check_current(plan)
        ops.cache_write(k, v, cache[0], cache[1], *tensors, plan.handle)

    @named
    def run(
        self,
        q: torch.Tensor,
        cache: tuple[torch.Tensor, torch.Tensor | None] | None,
        plan: MhaPlan,
        *,
        k: torch.Tensor | None = None,
        v: torch.Tensor | None = None,
        tensors: LayerTensors = NO_TENSORS,
        out: torch.Tensor | None = None,
        return_lse: bool = False,
    ) -> AttnOut:
        """One layer: q [T, H, D] against its requests' keys, for the step that `plan` holds.

        Args:
            q: the new tokens' queries, packed in batch order.
            cache: the layer's pages, written already; None for a batch without a cache.
            k, v: the new tokens' [T, Hkv, D] and [T, Hkv, Dv], where the caller has them: first chunks then attend
                without a detour through the pages. For a batch without a cache, of all its tokens.
            tensors: sinks, ALiBi slopes and fp8 scales of this layer.
            out: [T, H, Dv] to write into; any strides.
            return_lse: also give lse [H, T] float32, natural log.
        """
        self._check_current(plan)
        layer = self.layer
        if (k is None) != (v is None):
            raise ValueError(f"{'k' if k is None else 'v'} is None; k and v come together")
        if out is None:
            out = q.new_empty((q.shape[0], layer.num_heads, layer.v_head_dim))
        lse = None
        if return_lse:
            lse = q.new_empty((layer.num_heads, q.shape[0]), dtype=torch.float32)
        if cache is not None and not isinstance(cache, tuple):
            raise ValueError(f"cache is a {type(cache).__name__}; it must be the pair of K and V pages")
        k_cache, v_cache = (None, None) if cache is None else cache
        ops.attend(q, k_cache, v_cache, k, v, *tensors, out, lse, plan.handle)
        return AttnOut(out, lse)

    def _check_current(self, plan: MhaPlan) -> None:
        if torch.compiler.is_compiling():
            return
        if self._plans.get(plan.handle) is not plan:
            raise ValueError("plan is stale or another object's: a plan lives until the next plan() on its slot")


class Kernels:
    """The kernel for each operation and bucket of a layer on a target, decided once."""

    def __init__(self, target: Target, layer: Layer, requested: Request | None, num_pages: int | None = None) -> None:
        if num_pages is not None:
            at_least(1, num_pages=num_pages)
        self.target, self.layer, self.requested, self.num_pages = target, layer, requested, num_pages
        self.installed = installed(target, requested)
        self.verdicts = verdicts_on(target, self.installed)
        self._choices: dict[tuple[Op, Needs], Choice] = {}

    def choice(self, op: Op, needs: Needs) -> Choice:
        """The kernel, with the reasons against the others."""
        found = self._choices.get((op, needs))
        if found is None:
            known = op in PAGES and self.num_pages is not None
            reaching = needs._replace(num_pages=self.num_pages) if known else needs
            found = self._choices[op, needs] = select(
                op, self.target, self.layer, reaching, self.requested, self.installed, load_kernels(),
                verdict=self.verdicts,
            )  # fmt: skip
        return found

    def explain(self, page_size: int = 16) -> Explanation:
        """Every choice that the layer's steps take, with its reasons."""
        from portable.explain import explain

        return explain(
            self.target,
            self.layer,
            page_size=page_size,
            requested=self.requested,
            installed=self.installed,
            kernels=load_kernels(),
            verdict=self.verdicts,
        )

    def __call__(self, op: Op, needs: Needs) -> Kernel:
        found = self._choices.get((op, needs))
        return (self.choice(op, needs) if found is None else found).kernel

    def settle(self, each: float = 600.0) -> None:
        """Test what compiles at its first call, up to `each` seconds a kernel, and choose again where one fails."""
        for key in tuple(self._choices):
            while self.verdicts.settle(self.choice(*key).kernel, each) is not None:
                del self._choices[key]

    def warm(
        self,
        asked: Iterable[tuple[Op, Needs]],
        batches: Iterable[Batch],
        pages: tuple[KV, ...],
        tensors: LayerTensors,
        lses: tuple[bool, ...],
        launch: Launch | None = None,
    ) -> int:
        """Choose and settle all that is asked for, and compile ours for these steps; see `warmup.warm`."""
        from portable import warmup

        for op, needs in asked:
            with suppress(UnsupportedError) if needs.graph else nullcontext():
                self.choice(op, needs)
        self.settle()
        here = self.target.device != "cpu" or self.target.emulated
        ours = filter(warmup.recordable, {kernel.caps.provider for kernel in load_kernels()} if here else ())
        modules = [importlib.import_module(f"portable.backends.{name}.launch") for name in sorted(ours)]
        if not modules:
            return 0
        device = torch.device(self.target.device)
        return warmup.warm(
            self.layer,
            self,
            lambda: warmup.recorded(modules, self.target),
            lambda calls: sum(int(module.warmup(each, device)) for module, each in zip(modules, calls, strict=True)),
            batches,
            pages,
            tensors,
            lses,
            launch,
        )

    def of(self, layer: Layer) -> Kernels:
        """The kernels of another layer on the same target."""
        return Kernels(self.target, layer, self.requested, self.num_pages)
