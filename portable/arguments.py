"""Arguments of a wrong kind are named: each is held against its annotation, which is all that has to be written.

`checked` looks before the call, for what is called once; `named` only when the call has failed, for what is called in
every step and layer: 0.2 us a call.
"""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from functools import cache, wraps
from numbers import Integral, Real
from operator import index
from types import SimpleNamespace
from typing import Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np
import numpy.typing as npt
import torch

Test = Callable[[Any], bool]
P = ParamSpec("P")
R = TypeVar("R")


def named(function: Callable[P, R]) -> Callable[P, R]:
    """The function; where it fails on an argument of a wrong kind, the TypeError names it.

    >>> @named
    ... def double(x: int) -> int:
    ...     return x + x.real
    >>> double(None)
    Traceback (most recent call last):
    TypeError: x is None; it must be an int
    """

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            wrong = _wrong(function, args, kwargs)
            if wrong is None or (isinstance(error, ValueError) and wrong[0] in str(error)):
                raise
            raise TypeError(wrong[1]) from error

    return call


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """The function, which is not called with an argument of a wrong kind: a TypeError names it.

    A number that is an integer of another library comes to it as an int.

    >>> @checked
    ... def area(size: tuple[int, int], *, scale: float | None = None) -> int:
    ...     return size[0] * size[1]
    >>> area((2, 3), scale="x")
    Traceback (most recent call last):
    TypeError: scale is 'x'; it must be a number or None
    """

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if wrong := _wrong(function, args, kwargs):
            raise TypeError(wrong[1])
        run: Any = function
        result: R = run(*map(_plain, args), **{name: _plain(value) for name, value in kwargs.items()})
        return result

    return call


def _plain(value: object) -> object:
    return index(value) if isinstance(value, Integral) and not isinstance(value, int) else value


def check_fields(value: Any) -> None:
    """Raise a TypeError unless every field of a dataclass is what its annotation says."""
    owner: Any = type(value)
    for name, hint in hints_of(owner).items():
        for reason in _misfits(name, getattr(value, name), hint):
            raise TypeError(reason)


def at_least(least: int, **values: object) -> None:
    """Raise a ValueError unless every argument is an int of at least `least`.

    >>> at_least(1, page_size=16, max_reqs=0)
    Traceback (most recent call last):
    ValueError: max_reqs is 0; it must be an int of at least 1
    """
    for name, value in values.items():
        if not isinstance(value, int) or value < least:
            raise ValueError(f"{name} is {value!r}; it must be an int of at least {least}")


def as_device(device: torch.device | str) -> torch.device:
    """A device of torch, or a ValueError that names the argument `device`.

    >>> as_device("cpu")
    device(type='cpu')
    """
    try:
        return torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device is {device!r}; it must be the name of a device of torch: {error}") from error


def _wrong(function: Callable[..., Any], args: Any, kwargs: Any) -> tuple[str, str] | None:
    """The first argument that does not fit its annotation, and the sentence that says so."""
    try:
        given = _signature(function).bind(*args, **kwargs).arguments
    except TypeError:
        return None  # one is missing or too many: Python's own message, of the call, names it
    hints, kinds = hints_of(function), _signature(function).parameters
    for name, value in given.items():
        if name in hints:
            several = kinds[name].kind is inspect.Parameter.VAR_POSITIONAL
            for each in value if several else (value,):
                for reason in _misfits(name, each, hints[name]):
                    return name, reason
    return None


@cache
def _signature(function: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(function)


class Numbers:
    """What numpy makes an array of. Its own ArrayLike has other parts in each version, `str` among them."""


@cache
def hints_of(owner: Any) -> dict[str, Any]:
    """Annotations of arguments or fields, without those that only a type checker can import."""
    module = sys.modules.get(owner.__module__)
    names = {**(vars(module) if module else {}), "npt": SimpleNamespace(ArrayLike=Numbers, NDArray=npt.NDArray)}
    hints = {}
    for name, hint in owner.__annotations__.items():
        with suppress(NameError):
            hints[name] = get_type_hints(type("_", (), {"__annotations__": {name: hint}}), names)[name]
    hints.pop("return", None)
    return hints


def _misfits(name: str, value: object, hint: Any) -> Iterator[str]:
    """Why a value does not fit, at most one sentence; of a named tuple it is about the field."""
    if not fits(value, hint):
        yield f"{name} is {_shown(value)}; it must be {_wanted(hint)}"
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        for field, kind in hints_of(type(value)).items():
            yield from _misfits(f"{name}.{field}", getattr(value, field), kind)


def fits(value: object, hint: Any) -> bool:
    """Whether a value is of the kind that an annotation says; the elements of sequences are looked at too.

    >>> fits((torch.zeros(1), None), tuple[torch.Tensor, torch.Tensor | None]), fits([1, 2.5], Sequence[int])
    (True, False)
    """
    return _test_of(hint)(value)


@cache
def _test_of(hint: Any) -> Test:
    """Taken apart once for each annotation: to do so for each value took half of a `Layer`'s 155 us on a slow core."""
    hint = getattr(hint, "__value__", hint)  # of an alias: NDArray is one from numpy 2.5 on
    origin, inner = get_origin(hint), get_args(hint)
    if hint in _TESTS:
        return _TESTS[hint]
    if isinstance(hint, TypeVar):
        return _any_of(hint.__constraints__) if hint.__constraints__ else _anything
    if origin in (Union, types.UnionType):
        return _any_of(inner)
    if origin is Literal:  # which of them it may be, the function says itself
        return lambda value: type(value) in map(type, inner)
    if origin is None:
        return lambda value: _isinstance(value, hint)
    test = _elements_of(origin, inner)
    if origin.__module__ != "collections.abc":
        return lambda value: isinstance(value, origin) and test(value)
    # tensors and the like can be iterated, and are no sequences of anything of ours
    return lambda value: (
        isinstance(value, origin) and not isinstance(value, str | torch.Tensor | np.ndarray) and test(value)
    )


def _elements_of(origin: Any, inner: tuple[Any, ...]) -> Test:
    """What is asked of the elements of a value that is an `origin`."""
    if origin is tuple and inner[1:] != (...,):
        tests = [*map(_test_of, inner)]
        return lambda value: len(value) == len(tests) and all(fit(each) for fit, each in zip(tests, value, strict=True))
    if issubclass(origin, Mapping):
        of_key, of_value = map(_test_of, inner)
        return lambda value: all(of_key(key) and of_value(each) for key, each in value.items())
    if issubclass(origin, Sequence | AbstractSet):
        test = _test_of(inner[0])
        return lambda value: all(map(test, value))
    return _anything


def _any_of(hints: Iterable[Any]) -> Test:
    tests = [*map(_test_of, hints)]
    return lambda value: any(test(value) for test in tests)


def _anything(value: object) -> bool:
    return True


def _isinstance(value: object, kind: Any) -> bool:
    try:
        return isinstance(value, kind)
    except TypeError:  # a protocol that cannot be asked
        return True


_TESTS: dict[Any, Test] = {
    Any: _anything,
    Numbers: lambda value: (
        (isinstance(value, Sequence | Real) and not isinstance(value, str | bytes)) or hasattr(value, "__array__")
    ),
    None: lambda value: value is None,
    type(None): lambda value: value is None,
    bool: lambda value: isinstance(value, bool | np.bool_),
    float: lambda value: isinstance(value, Real) and not isinstance(value, bool),
    int: lambda value: isinstance(value, Integral) and not isinstance(value, bool),
}


def _wanted(hint: Any) -> str:
    """An annotation in words."""
    hint = getattr(hint, "__value__", hint)
    origin, inner = get_origin(hint), get_args(hint)
    if isinstance(hint, TypeVar) and hint.__constraints__:
        return " or ".join(map(_wanted, hint.__constraints__))
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(map(_wanted, inner)))
    if origin is Literal:
        return " or ".join(map(repr, inner))
    if origin is tuple and inner[1:] != (...,):
        return f"a tuple ({', '.join(map(_wanted, inner))})"
    if origin is not None and origin is not np.ndarray and issubclass(origin, Sequence):
        return f"a sequence (each {_wanted(inner[0])})"
    kind = origin or hint
    return _WORDS.get(kind) or f"{'an' if kind.__name__[0] in 'AEIOU' else 'a'} {kind.__name__}"


_WORDS = {
    None: "None", type(None): "None", int: "an int", float: "a number", bool: "a bool", str: "a string",
    Numbers: "an array or nested sequence of numbers", torch.Tensor: "a tensor", np.ndarray: "an array",
    torch.dtype: "a torch.dtype", torch.device: "a torch.device",
}  # fmt: skip


def _shown(value: object) -> str:
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)[:60]
    if isinstance(value, tuple | list) and not hasattr(value, "_fields"):
        return f"a {type(value).__name__} ({', '.join(type(each).__name__ for each in value)})"[:80]
    name = type(value).__name__
    return f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"
