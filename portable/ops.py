"""The registered torch operations behind `Attention.run` and `Attention.write`.

They take tensors and the handle of a plan slot; the plan itself is looked up inside. So torch.compile sees one
opaque call whose arguments keep their kinds from step to step, and never recompiles because a plan changed.
Defined with `torch.library.Library`, which costs 3.6 us a call where `custom_op` costs 16 to 22 with mutated
arguments (measured with torch 2.13).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch

from portable.kernel import KV
from portable.layer import LayerTensors
from portable.states import SsmTensors

Optional = torch.Tensor | None


class Slot(Protocol):
    """What a handle stands for: the newest plan of one slot of an attention object."""

    def attend(
        self, q: torch.Tensor, kv: KV | None, new: KV | None, tensors: LayerTensors, out: torch.Tensor, lse: Optional
    ) -> None: ...

    def write(self, new: KV, kv: KV, tensors: LayerTensors) -> None: ...


class LatentSlot(Protocol):
    """What a handle of MLA stands for."""

    def attend_latents(
        self,
        given: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
        pages: Optional,
        weights: tuple[torch.Tensor, torch.Tensor],
        tensors: LayerTensors,
        out: torch.Tensor,
        lse: Optional,
    ) -> None: ...

    def write(self, new: KV, kv: KV, tensors: LayerTensors) -> None: ...


class StateSlot(Protocol):
    """What a handle of recurrent layers stands for."""

    def conv(
        self, x: torch.Tensor, weight: torch.Tensor, bias: Optional, pool: torch.Tensor, out: torch.Tensor, silu: bool
    ) -> None: ...

    def scan(
        self,
        given: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, Optional],
        pool: torch.Tensor,
        tensors: SsmTensors,
        out: torch.Tensor,
    ) -> None: ...


_slots: WeakValueDictionary[int, Any] = WeakValueDictionary()
_next_handle = 0


def register(slot: Slot | LatentSlot | StateSlot) -> int:
    """A handle for the slot, valid while the slot lives."""
    global _next_handle
    _next_handle += 1
    _slots[_next_handle] = slot
    return _next_handle


def _slot(handle: int) -> Any:
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
_library.define(
    "mla_attend(Tensor q_nope, Tensor q_pe, Tensor kv_c, Tensor k_pe, Tensor? cache, Tensor w_uk, Tensor w_uv, "
    "Tensor? k_scale, Tensor(a!) out, Tensor(b!)? lse, int handle) -> ()"
)
_library.define(
    "state_conv(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) pool, Tensor(b!) out, bool silu, int handle) -> ()"
)
_library.define(
    "state_scan(Tensor x, Tensor dt, Tensor b, Tensor c, Tensor? z, Tensor(a!) pool, Tensor a, Tensor? d, "
    "Tensor? dt_bias, bool dt_softplus, float dt_least, float dt_most, Tensor(b!) out, int handle) -> ()"
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
    slot, tensors = _slot(handle), LayerTensors(sinks, alibi, k_scale, v_scale, q_scale)
    if not torch.is_grad_enabled() and _is_current(q):  # 3 to 6 us less than to enter the contexts
        slot.attend(q, cache, new, tensors, out, lse)
        return
    with torch.no_grad(), _on_device_of(q):  # else the cache would keep the graph of every step alive
        slot.attend(q, cache, new, tensors, out, lse)


def _mla_attend(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    kv_c: torch.Tensor,
    k_pe: torch.Tensor,
    cache: Optional,
    w_uk: torch.Tensor,
    w_uv: torch.Tensor,
    k_scale: Optional,
    out: torch.Tensor,
    lse: Optional,
    handle: int,
) -> None:
    slot: LatentSlot = _slot(handle)
    given, tensors = (q_nope, q_pe, kv_c, k_pe), LayerTensors(k_scale=k_scale)
    if not torch.is_grad_enabled() and _is_current(q_nope):
        slot.attend_latents(given, cache, (w_uk, w_uv), tensors, out, lse)
        return
    with torch.no_grad(), _on_device_of(q_nope):
        slot.attend_latents(given, cache, (w_uk, w_uv), tensors, out, lse)


def _state_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: Optional,
    pool: torch.Tensor,
    out: torch.Tensor,
    silu: bool,
    handle: int,
) -> None:
    with torch.no_grad(), _on_device_of(x):
        slot: StateSlot = _slot(handle)
        slot.conv(x, weight, bias, pool, out, silu)


def _state_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    z: Optional,
    pool: torch.Tensor,
    a: torch.Tensor,
    d: Optional,
    dt_bias: Optional,
    dt_softplus: bool,
    dt_least: float,
    dt_most: float,
    out: torch.Tensor,
    handle: int,
) -> None:
    with torch.no_grad(), _on_device_of(x):
        slot: StateSlot = _slot(handle)
        slot.scan((x, dt, b, c, z), pool, SsmTensors(a, d, dt_bias, dt_softplus, (dt_least, dt_most)), out)


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
    slot, tensors = _slot(handle), LayerTensors(sinks, alibi, k_scale, v_scale, q_scale)
    if not torch.is_grad_enabled() and _is_current(k):
        slot.write(KV(k, v), KV(k_cache, v_cache), tensors)
        return
    with torch.no_grad(), _on_device_of(k):
        slot.write(KV(k, v), KV(k_cache, v_cache), tensors)


@cache
def _current_device(kind: str) -> Callable[[], int]:
    current: Callable[[], int] = torch.get_device_module(kind).current_device
    return current


def _is_current(tensor: torch.Tensor) -> bool:
    """Whether the tensor's device is the current one of its kind, or has no number."""
    index = tensor.get_device()
    return index < 0 or index == _current_device(tensor.device.type)()


def _on_device_of(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Kernels launch on the current device, so make it the tensor's (a fault on the second GPU otherwise)."""
    if tensor.device.type == "cpu":
        return nullcontext()
    guard: AbstractContextManager[object] = torch.get_device_module(tensor.device).device(tensor.device)
    return guard


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Makes a device the current one of its kind, unless it is."""
    if device.type == "cpu" or device.index in (None, _current_device(device.type)()):
        return nullcontext()
    guard: AbstractContextManager[object] = torch.get_device_module(device).device(device)
    return guard


_SPOKEN = {  # arguments of the ops, as callers know them
    **{"k_cache": "cache k", "v_cache": "cache v", "cache": "cache k"},
    **{name: f"tensors.{name}" for name in (*LayerTensors._fields, "a", "d", "dt_bias")},
    **{name: f"weights.{name}" for name in ("w_uk", "w_uv")},
}


def _fake(op: str) -> Callable[..., None]:
    """What torch calls in the op's stead where an argument has no memory: to trace it, and for a meta tensor.

    It computes nothing, so with a meta tensor among others `out` would be left as it was: tensors on different devices
    are refused here, at no cost to a call that runs.
    """
    names = [argument.name for argument in getattr(torch.ops.portable, op).default._schema.arguments]

    def fake(*arguments: Any) -> None:
        given = {n: each.device for n, each in zip(names, arguments, strict=True) if isinstance(each, torch.Tensor)}
        right = next((device for device in given.values() if device.type != "meta"), None)
        for name, device in given.items():
            if right is not None and device != right:
                latents = op == "cache_write" and "v_cache" not in given
                name = {"k": "kv_c", "v": "k_pe"}.get(name, name) if latents else name
                raise ValueError(f"{_SPOKEN.get(name, name)} is on {device}; all tensors of a call must be on {right}")

    return fake


for _name, _run in (
    ("attend", _attend),
    ("mla_attend", _mla_attend),
    ("cache_write", _cache_write),
    ("state_conv", _state_conv),
    ("state_scan", _state_scan),
):
    _library.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"portable::{_name}", _fake(_name), lib=_library)

attend = torch.ops.portable.attend.default
mla_attend = torch.ops.portable.mla_attend.default
cache_write = torch.ops.portable.cache_write.default
state_conv = torch.ops.portable.state_conv.default
state_scan = torch.ops.portable.state_scan.default
