"""A launch that costs a few microseconds of host time: what Triton compiled is kept, and called directly.

Triton's own `kernel[grid](...)` binds, classes and looks up every argument anew. Here a function is written once for a
kernel, its constexprs and the types of its arguments: it takes addresses and integers, looks them up in a dict, and
calls the compiled kernel's launcher with the raw stream.

What Triton compiles depends on a tensor's dtype, whether its address is a multiple of 16 and, on AMD, whether its
storage is within 2 GiB; and on whether an integer is 1, a multiple of 16, and within 32 bits. The dict's keys hold the
integers themselves, so that equal strides are found without being classed; what is not found is classed, and then
found or left to Triton. Of integers that Triton does not specialise the key only says whether they are within 32 bits.

This file alone uses what Triton keeps private. Where that does not look as in 3.6.0 and 3.9.0, or where hooks and
knobs want more, `kernel[grid](...)` does it all.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, NamedTuple

import torch
import triton

LIMIT = 4096  # sets of integers that a launcher remembers: with one more it starts afresh
LEADING = ("gridX", "gridY", "gridZ", "stream", "function")
FOLLOWING = ("kernel_metadata", "launch_metadata", "launch_enter_hook", "launch_exit_hook")

# torch's public ones cost 0.3 us more each; a build of torch without GPUs has neither
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
raw_stream: Callable[[int], int] = getattr(
    torch._C, "_cuda_getCurrentRawStream", lambda index: torch.cuda.current_stream(index).cuda_stream
)
RUNTIME: Any = getattr(getattr(triton, "knobs", None), "runtime", None)
CHAINS = (getattr(RUNTIME, "launch_enter_hook", None), getattr(RUNTIME, "launch_exit_hook", None))
ENTERING: Any = getattr(CHAINS[0], "calls", None)  # functions to call with each launch; usually none
LEAVING: Any = getattr(CHAINS[1], "calls", None)


class Compiled(NamedTuple):
    """What a launch calls."""

    run: Callable[..., None]
    function: Any
    metadata: Any
    encode: Callable[[Any, int], Sequence[Any]]  # a descriptor, and which of the kernel's it is: what `run` gets of it


class Kernel:
    """A `triton.jit` function with its constexprs and options, for arguments of certain types.

    `types` are those of the arguments, a tuple of them for a tuple. `on` makes a device current: a GPU's index, or -1
    for tensors that are not on one.
    """

    def __init__(
        self,
        kernel: Any,
        options: dict[str, Any],
        types: Sequence[Any],
        on: Callable[[int], AbstractContextManager[Any]],
    ) -> None:
        self.kernel = kernel
        self.on = on
        self.options = {"enable_fp_fusion": True, **options}  # Triton 3.10 turns its default
        self.classes: dict[Any, Compiled | None] = {}  # None: Triton launches it
        self.warm: dict[Any, Any] = {}  # what an emulated device's warm-up compiled; Triton launches it
        self.exact: dict[Any, Compiled] = {}
        self.launch: Callable[..., None] = _Writer(self).launcher(types) or self.cold

    def cold(self, grid: tuple[int, ...], *arguments: Any, key: Any = None) -> None:
        """Launch what `exact` does not hold, and keep it there under `key`."""
        device = next(tensors(arguments)).get_device()
        with self.on(device):
            if device < 0 or busy(self.kernel):
                self.kernel[grid](*arguments, **self.options)
                return
            kind = self.kind(device, arguments)
            if kind not in self.classes:
                if torch.cuda.is_current_stream_capturing():
                    raise RuntimeError(
                        f"kernel {self.kernel.__name__} was not compiled for these arguments before the capture of a "
                        "graph began; run it once, or call warmup, before"
                    )
                self.classes[kind] = compiled(self.kernel[grid](*arguments, **self.options))
                return
            found = self.classes[kind]
            if found is None or key is None:
                self.kernel[grid](*arguments, **self.options)
                return
        if len(self.exact) >= LIMIT:
            self.exact.clear()
        self.exact[key] = found
        self.launch(grid, *arguments)

    def warmup(self, device: int, grid: tuple[int, ...], arguments: Sequence[Any]) -> bool:
        """Compile for `arguments`, which may be meta tensors, and load; a module cannot be loaded during a capture.

        False where that was done before.
        """
        with self.on(device):
            kind = self.kind(device, arguments)
            if kind in (self.classes if device >= 0 else self.warm):
                return False
            made = self.kernel.warmup(*arguments, grid=grid, **self.options)
            if device >= 0:
                self.classes[kind] = compiled(made)
            else:
                self.warm[kind] = made
            return True

    def kind(self, device: int, arguments: Sequence[Any]) -> tuple[Any, ...]:
        """What Triton compiles for, or something finer."""
        params = getattr(self.kernel, "params", [None] * len(arguments))
        return (device, *map(self._class, params, arguments))

    def _class(self, param: Any, value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(self._class(None, each) for each in value)
        if is_map(type(value)):
            return value.base.dtype, tuple(value.block_shape), value.layout, value.padding
        if isinstance(value, torch.Tensor):
            small = torch.version.hip is None or value.untyped_storage().nbytes() < 2**31
            return value.dtype, any_address(param) or value.data_ptr() % 16 == 0, small
        if type(value) is not int or (param is not None and param.is_constexpr):
            return type(value) if type(value) in (bool, float) else (type(value), value)
        bits = 32 if -(2**31) <= value < 2**31 else 63 if value < 2**63 else 64
        return bits if param is not None and param.do_not_specialize else (bits, value == 1, value % 16 == 0)


class _Writer:
    """Writes the Python of a launcher."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.key = ["device"]
        self.lines: list[str] = []
        self.pointers: list[str] = []  # the tensors' names; their addresses are the same with p in front
        self.aligned: list[str] = []  # those whose alignment matters
        self.maps = 0  # descriptors so far

    def launcher(self, types: Sequence[Any]) -> Callable[..., None] | None:
        """None where the kernel is none of `triton.jit`, or where an argument needs more than is written here."""
        kernel, options = self.kernel.kernel, self.kernel.options
        params = getattr(kernel, "params", None)
        if params is None or len(types) > len(params):
            return None
        scope: dict[str, Any] = {"exact": self.kernel.exact, "cold": self.kernel.cold, "kernel": kernel, "busy": busy}
        scope.update(on=self.kernel.on, current_device=current_device, raw_stream=raw_stream, MapState=MapState)
        names = [f"a{place}" for place in range(len(types))]
        passed = [self._take(*each) for each in zip(names, types, params[: len(types)], strict=True)]
        for place, param in enumerate(params[len(types) :]):
            if param.name in options and param.is_constexpr:
                scope[f"c{place}"] = options[param.name]
            elif param.has_default and param.name not in options:
                scope[f"c{place}"] = param.default
            else:
                return None
            passed.append(f"c{place}")
        if None in passed or not self.pointers:
            return None
        if self.aligned:
            aligned = ", ".join(f"p{name} & 15 == 0" for name in self.aligned)
            self.key.append(f"({' | '.join(f'p{name}' for name in self.aligned)}) & 15 and ({aligned},)")
        if torch.version.hip:
            self.key += [f"{name}.untyped_storage().nbytes() < 0x80000000" for name in self.pointers]
        run = f"run(x, y, z, raw_stream(device), function, metadata, None, None, None, {', '.join(map(str, passed))})"
        lines = [
            f"def launcher(grid, {', '.join(names)}):",
            *self.lines,
            f"device = {self.pointers[0]}.get_device()",
            *(f"p{name} = {name}.data_ptr()" for name in self.pointers),
            f"key = ({', '.join(self.key)})",
            "found = exact.get(key)",
            "if found is None or busy(kernel):",
            f"    return cold(grid, {', '.join(names)}, key=key)",
            "run, function, metadata, encode = found",
            "x, y, z = (*grid, 1, 1)[:3]",
            "if device == current_device():",
            f"    {run}",
            "else:",
            "    with on(device):",
            f"        {run}",
        ]
        exec("\n    ".join(lines), scope)
        launcher: Callable[..., None] = scope["launcher"]
        return launcher

    def _take(self, name: str, kind: Any, param: Any) -> str | None:
        """What the compiled kernel gets for argument `name` of a type; its part of the key is added."""
        if param is not None and param.is_constexpr:
            self.key.append(name)
        elif isinstance(kind, tuple):
            parts = [f"{name}_{place}" for place in range(len(kind))]
            self.lines += [f"{', '.join(parts)}, = {name}"] if parts else []
            taken = [self._take(part, each, None) for part, each in zip(parts, kind, strict=True)]
            return None if None in taken else f"({''.join(f'{each}, ' for each in taken)})"
        elif issubclass(kind, torch.Tensor):
            self.pointers.append(name)
            if not any_address(param):
                self.aligned.append(name)
            self.key.append(f"{name}.dtype")
            return f"p{name}"
        elif is_map(kind):
            self.lines += [
                f"m{name} = {name}.__dict__.get('state')",
                f"if m{name} is None or m{name}.base is not {name}.base:",
                f"    m{name} = {name}.state = MapState({name})",
            ]
            self.key.append(f"m{name}.kind")
            self.maps += 1
            return f"*(m{name}.encoded or m{name}.encode({name}, encode, {self.maps - 1}))"
        elif kind is int:
            narrow = f"-0x80000000 <= {name} <= 0x7FFFFFFF or {name}"
            self.key.append(f"({narrow})" if param is not None and param.do_not_specialize else name)
        elif kind not in (bool, float, type(None)):  # of these the type says all
            return None
        return name


class MapState:
    """What launches keep with a descriptor, which is not changed after its first: 1.5 us to hash it, 3 to encode it."""

    __slots__ = ("base", "encoded", "kind")
    kinds: ClassVar[dict[tuple[Any, ...], object]] = {}  # of all that Triton compiles for, an object that stands for it

    def __init__(self, made: Any) -> None:
        self.base = made.base
        kind = (made.base.dtype, *made.block_shape, made.layout, made.padding)
        self.kind = self.kinds.setdefault(kind, object())
        self.encoded: Sequence[Any] = ()

    def encode(self, made: Any, encode: Callable[[Any, int], Sequence[Any]], place: int) -> Sequence[Any]:
        """The same for every kernel that is compiled for its kind."""
        found = encode(made, place)
        if encode is not unencoded:
            self.encoded = found
        return found


def any_address(param: Any) -> bool:
    """Whether Triton compiles the same for any address of a tensor."""
    return param is not None and (param.do_not_specialize or param.do_not_specialize_on_alignment)


def is_map(kind: type) -> bool:
    """Whether arguments of a type are descriptors of tensors, for copies that the device makes by itself."""
    return kind.__name__ == "TensorDescriptor"


def tensors(arguments: Sequence[Any]) -> Iterator[torch.Tensor]:
    """The tensors among arguments and in their tuples."""
    for each in arguments:
        if isinstance(each, torch.Tensor):
            yield each
        elif isinstance(each, tuple):
            yield from tensors(each)


def busy(kernel: Any) -> bool:
    """Whether a launch has to do more than launch: hooks, debugging, or passes of someone's own."""
    return bool(
        ENTERING is None
        or LEAVING is None
        or ENTERING
        or LEAVING
        or RUNTIME.launch_enter_hook is not CHAINS[0]
        or RUNTIME.launch_exit_hook is not CHAINS[1]
        or RUNTIME.debug
        or getattr(kernel, "pre_run_hooks", ())
        or getattr(RUNTIME, "add_stages_inspection_hook", None) is not None
    )


def compiled(made: Any) -> Compiled | None:
    """What Triton compiled, loaded; None where it does not look like what is called here."""
    try:
        run, function, metadata = made.run, made.function, made.packed_metadata
        names = [p.name for p in inspect.signature(run).parameters.values() if p.kind is not p.VAR_POSITIONAL]
    except (AttributeError, TypeError, ValueError):
        return None
    known = names[:5] == [*LEADING] and names[5:] in ([], [*FOLLOWING])
    return Compiled(run, function, metadata, unencoded)._replace(**encoding(run)) if known else None


def unencoded(made: Any, place: int) -> Sequence[Any]:
    """Where it is left to Triton."""
    return (made,)


def encoding(run: Any) -> dict[str, Any]:
    """Triton's launcher encodes the descriptors of every launch; `run` and `encode` for those that are encoded before.

    None of them where it does not look as known, or where nothing is to be encoded.
    """
    wrapped = getattr(run, "launch", None)
    if torch.version.hip or not inspect.isfunction(wrapped):
        return {}
    seen = inspect.getclosurevars(wrapped)
    make = {**seen.globals, **seen.nonlocals}.get("make_tensordesc_arg")
    facts, inner = seen.nonlocals.get("tensordesc_meta"), seen.nonlocals.get("launcher")
    if make is None or inner is None or not facts or None in facts:
        return {}
    more = [None] * (len(inspect.signature(make).parameters) - 2)  # of 3.9, which looks at none of them
    if [*inspect.signature(make).parameters] not in (["arg", "metadata"], ["arg", "metadata", "_"]):
        return {}
    short = copy.copy(run)
    short.launch = inner
    return {"run": short, "encode": lambda made, place: tuple(make(made, facts[place], *more))}
