"""Sets as data, for what a kernel declares: sizes, architectures, anything; and how a refusal names them."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache

import torch


@dataclass(frozen=True, slots=True)
class Sizes:
    """A set of integers as data: multiples of a number within bounds, or a list.

    >>> 80 in multiple_of(8, up_to=256), multiple_of(16).why_not("page_size", 24)
    (True, 'page_size 24 is not a multiple of 16')
    """

    multiple: int = 1
    least: int = 1
    most: int | None = None
    only: frozenset[int] | None = None

    def why_not(self, name: str, value: int) -> str | None:
        """The sentence that refuses `value`, or None."""
        if self.only is not None:
            if value in self.only:
                return None
            listed = ", ".join(map(str, sorted(self.only))) or "nothing: the kernel declares no size"
            return f"{name} {value} is not one of {listed}"
        if value % self.multiple:
            return f"{name} {value} is not a multiple of {self.multiple}"
        if value < self.least:
            return f"{name} {value} is below {self.least}"
        if self.most is not None and value > self.most:
            return f"{name} {value} is above {self.most}"
        return None

    def __contains__(self, value: object) -> bool:
        return isinstance(value, int) and self.why_not("", value) is None


def multiple_of(multiple: int, *, up_to: int | None = None, at_least: int = 1) -> Sizes:
    """Multiples of a number within bounds."""
    return Sizes(multiple=multiple, least=at_least, most=up_to)


def one_of(*values: int) -> Sizes:
    """Exactly these sizes."""
    return Sizes(only=frozenset(values))


ANY_SIZE = Sizes()
NO_SIZE = Sizes(only=frozenset())


class _Any:
    """Contains everything: for `vendors`, `archs` and `dtypes` of code that is plain PyTorch."""

    def __contains__(self, item: object) -> bool:
        return True

    def __repr__(self) -> str:
        return "any"


ANY = _Any()


@dataclass(frozen=True, slots=True)
class Archs:
    """A numbered architecture and those after it, of the same prefix."""

    floor: str

    def __contains__(self, arch: object) -> bool:
        floor, other = re.fullmatch(r"(\D+)(\d+)", self.floor), re.fullmatch(r"(\D+)(\d+)", str(arch))
        return bool(floor and other and floor[1] == other[1] and int(other[2]) >= int(floor[2]))

    def __repr__(self) -> str:
        return f"{self.floor} or newer"


def from_arch(floor: str) -> Archs:
    """The architectures of a vendor that numbers them by capability, from one on.

    >>> "toy90" in from_arch("toy80"), "other942" in from_arch("toy80"), from_arch("toy80")
    (True, False, toy80 or newer)
    """
    return Archs(floor)


def short(dtype: torch.dtype) -> str:
    """The name of a dtype as people write it.

    >>> short(torch.bfloat16)
    'bfloat16'
    """
    return str(dtype).removeprefix("torch.")


def listed(values: object) -> str:
    """How a refusal names the set that a value is not in."""
    return _names(frozenset(values)) if isinstance(values, Collection) else repr(values)


@cache  # of few sets, named at each refusal: a choice among 49 kernels takes 0.63 ms, 0.79 without
def _names(values: frozenset[object]) -> str:
    names = sorted(short(v) if isinstance(v, torch.dtype) else str(v) for v in values)
    return f"one of {', '.join(names)}" if names else "supported: the kernel declares none"
