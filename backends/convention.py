"""How a vendor's callable wants to be called and what it gives back, as data, and whether one is called so."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from portable.kernel import LseForm, Segment
from portable.layer import Layer

# What a callable may be told, by the contract's names. Tensors of a call, and whether its LSE is wanted:
OF_THE_CALL = ("q", "qv", "k", "v", "out", "sinks", "alibi", "k_descale", "v_descale", "lse")
# What a step fixes:
OF_THE_STEP = (
    "cu_seqlens_q",  # [B + 1] i32
    "cu_seqlens_k",  # [B + 1] i32
    "seq_lens",  # [B] i32
    "max_query_len",
    "max_seq_len",
    "block_table",  # [B, W] i32
    "kv_indptr",  # [B + 1] i32, counts pages
    "kv_indices",  # [N] i32
    "kv_last_page_len",  # [B] i32
    "page_size",
    "scale",
    "softcap",  # 0.0: none
    "causal",
    "window",  # (left, right)
    "window_left",
    "window_right",
)
CSR = ("kv_indptr", "kv_indices", "kv_last_page_len")
CHOICES = {"rows": ("packed", "batch"), "pages": ("page", "token", "single"), "descale": ("heads", "one")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Convention:
    """How one callable of one range of versions wants to be called, and what it gives back.

    >>> Convention(module="math", function="pow", names={"q": "x"}).lse.layout
    'ht'
    """

    module: str
    function: str  # dotted below the module
    names: Mapping[str, str]  # the contract's name -> the callable's keyword; what is not here is never passed
    fixed: Mapping[str, Any] = field(default_factory=dict)  # keywords that are always the same
    step: Mapping[str, Callable[[Segment, Layer], Any]] = field(default_factory=dict)  # keywords made once per step
    rows: str = "packed"  # q and the output are [T, H, D]; "batch": [B, Sq, H, D]
    dense_rows: bool = False  # it does not look at how far rows of q lie apart
    equal_value_dim: bool = False  # contiguous K and V must be as wide: the narrower is padded with zeros
    open_side: int | None = -1  # of a window
    window_more: tuple[int, ...] = ()  # what follows its two sides
    literal_right: bool = False  # beside a bounded left side, a right side is the number that it is: none is open
    # What the CSR names count. "token": slots, with K and V as [N, Hkv, D]; "single": slots as pages [N, 1, Hkv, D].
    pages: str = "page"
    folds_single: bool = False  # takes a longest query of 1 for exactly one token in each request
    writes_out: bool = False  # promises that an `out` that it is given holds the output
    out_of_single: bool = False  # takes one where each request has one query, and no other
    returns: Mapping[int, int | None] = field(default_factory=lambda: {2: 1})  # how many results: which is the LSE
    zeroes_empty: bool = True  # the output of a row without keys is 0
    lse: LseForm = field(default_factory=LseForm)
    sink_dtype: torch.dtype | None = None  # what the sinks are cast to
    address_window: int | None = None  # K and V may not cross a multiple of these bytes: a carry is lost
    descale: str = "heads"  # the scale of an fp8 cache, where it has one, as [B, Hkv] f32; "one": [1] f32

    def __post_init__(self) -> None:
        if unknown := self.names.keys() - {*OF_THE_CALL, *OF_THE_STEP}:
            raise ValueError(f"names of {self.function} has {min(unknown)!r}; the contract has no such argument")
        if self.writes_out and "out" not in self.names:
            raise ValueError(f"writes_out of {self.function} is True; names must have 'out' then")
        for name, known in CHOICES.items():
            value = getattr(self, name)
            if value not in known:
                raise ValueError(f"Convention {name} is {value!r}; it must be one of {', '.join(known)}")

    @property
    def keywords(self) -> tuple[str, ...]:
        """Every keyword that may be passed."""
        return (*self.names.values(), *self.fixed, *self.step)


def why_not_called(function: Callable[..., Any], keywords: tuple[str, ...]) -> str | None:
    """What keeps a callable from being called with these keywords, or None.

    >>> why_not_called(lambda q, k, *, scale: q, ("q", "k", "softcap"))
    "takes no 'softcap'"
    >>> why_not_called(lambda q, k, *, scale: q, ("q", "k"))
    "wants 'scale'"
    """
    schema = getattr(function, "_schema", None)
    if schema is not None:
        takes = {argument.name: argument.has_default_value() for argument in schema.arguments}
        anything = False
    else:
        try:
            parameters = inspect.signature(function).parameters.values()
        except (TypeError, ValueError):  # compiled, without a signature
            return None
        named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        takes = {each.name: each.default is not each.empty for each in parameters if each.kind in named}
        anything = any(each.kind is each.VAR_KEYWORD for each in parameters)
    for keyword in keywords:
        if keyword not in takes and not anything:
            return f"takes no {keyword!r}"
    for name, optional in takes.items():
        if not optional and name not in keywords:
            return f"wants {name!r}"
    return None
