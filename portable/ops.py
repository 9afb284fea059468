"""The registered torch operations behind `Attention.run` and `Attention.write`.

They take tensors and the handle of a plan slot; the plan itself is looked up inside. So torch.compile sees one
opaque call whose arguments keep their kinds from step to step, and never recompiles because a plan changed.
Defined with `torch.library.Library`, which costs 3.6 us a call where `custom_op` costs 16 to 22 with mutated
arguments (measured with torch 2.13).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol
from weakref import WeakValueDictionary

import torch

from portable.kernel import KV
from portable.layer import LayerTensors

Optional = torch.Tensor | None


class Slot(Protocol):
    """What a handle stands for: the newest plan of one slot of an attention object."""

    def attend(
        self, q: torch.Tensor, kv: KV | None, new: KV | None, tensors: LayerTensors, out: torch.Tensor, lse: Optional
    ) -> None: ...

    def write(self, new: KV, kv: KV, tensors: LayerTensors) -> None: ...


_slots: WeakValueDictionary[int, Slot] = WeakValueDictionary()
_next_handle = 0


def register(slot: Slot) -> int:
    """A handle for the slot, valid while the slot lives."""
    global _next_handle
    _next_handle += 1
    _slots[_next_handle] = slot
    return _next_handle


def _slot(handle: int) -> Slot:
    slot = _slots.get(handle)
    if slot is None:
        raise ValueError(f"handle {handle} belongs to no plan that is alive; keep the Attention object that planned it")
    return slot


_TENSORS = "Tensor? sinks, Tensor? alibi, Tensor? k_scale, Tensor? v_scale, Tensor? q_scale"
_library = torch.library.Library("portable", "DEF")
_library.define(
    "attend(Tensor q, Tensor? k_cache, Tensor? v_cache, Tensor? k, Tensor? v, "
    f"{_TENSORS}, Tensor(a!) out, Tensor(b!)? lse, int handle) -> ()"
)
_library.define(
    f"cache_write(Tensor k, Tensor? v, Tensor(a!) k_cache, Tensor(b!)? v_cache, {_TENSORS}, int handle) -> ()"
)


def _attend(
    q: torch.Tensor,
    k_cache: Optional,
    v_cache: Optional,
    k: Optional,
    v: Optional,
    sinks: Optional,
    alibi: Optional,
    k_scale: Optional,
    v_scale: Optional,
    q_scale: Optional,
    out: torch.Tensor,
    lse: Optional,
    handle: int,
) -> None:
    cache = None if k_cache is None else KV(k_cache, v_cache)
    new = None if k is None else KV(k, v)
    with torch.no_grad(), _on_device_of(q):  # else the cache would keep the graph of every step alive
        _slot(handle).attend(q, cache, new, LayerTensors(sinks, alibi, k_scale, v_scale, q_scale), out, lse)


def _cache_write(
    k: torch.Tensor,
    v: Optional,
    k_cache: torch.Tensor,
    v_cache: Optional,
    sinks: Optional,
    alibi: Optional,
    k_scale: Optional,
    v_scale: Optional,
    q_scale: Optional,
    handle: int,
) -> None:
    with torch.no_grad(), _on_device_of(k):
        _slot(handle).write(KV(k, v), KV(k_cache, v_cache), LayerTensors(sinks, alibi, k_scale, v_scale, q_scale))


def _on_device_of(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Kernels launch on the current device, so make it the tensor's (a fault on the second GPU otherwise)."""
    if tensor.device.type == "cpu":
        return nullcontext()
    guard: AbstractContextManager[object] = torch.get_device_module(tensor.device).device(tensor.device)
    return guard


for _name, _run in (("attend", _attend), ("cache_write", _cache_write)):
    _library.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"portable::{_name}", lambda *_: None, lib=_library)

attend = torch.ops.portable.attend.default
cache_write = torch.ops.portable.cache_write.default
