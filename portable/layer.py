"""What every request of a layer has in common: hashable facts, and the tensors that differ from layer to layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal, NamedTuple

import torch

from portable.arguments import at_least, check_fields, checked

Family = Literal["gqa", "mla", "mamba1", "mamba2"]
Window = tuple[int | None, int | None]  # (left, right) keys beside the diagonal, inclusive; None = open
CACHE_LAYOUTS = ("strided", "k_packed", "shuffled")
SERVED_BY = {"gqa": "Attention", "mla": "MlaAttention", "mamba1": "Mamba", "mamba2": "Mamba"}


class UnsupportedError(ValueError):
    """No kernel can do what was asked; the message holds every reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """The facts of an attention (or state-space) layer that choose its kernels.

    Build one with `Layer.gqa`, `Layer.mla`, `Layer.mamba1` or `Layer.mamba2`.

    >>> layer = Layer.gqa(num_heads=32, num_kv_heads=8, head_dim=128, dtype=torch.bfloat16)
    >>> layer.group, layer.v_head_dim, round(layer.scale, 4)
    (4, 128, 0.0884)
    """

    family: Family
    num_heads: int
    num_kv_heads: int
    qk_head_dim: int
    v_head_dim: int
    scale: float  # multiplies q @ k, before softcap, mask and sink
    dtype: torch.dtype
    kv_dtype: torch.dtype  # what the cache stores; an fp8 type takes the scales of LayerTensors
    window: Window = (None, None)
    softcap: float | None = None  # scores become softcap * tanh(scores / softcap)
    sinks: bool = False  # one more logit per head, with value 0
    alibi: bool = False  # a slope per head times the distance to the key
    chunk: int | None = None  # local attention: keys of the query's own chunk only; Mamba: SSD chunk
    causal: bool = True
    cache_layout: str = "strided"
    kv_lora_rank: int = 0  # MLA: width of the latent; 0 elsewhere
    qk_rope_head_dim: int = 0  # MLA: width of the part that carries positions
    state_dim: int = 0  # Mamba: N
    conv_width: int = 0  # Mamba: taps of the causal convolution
    num_groups: int = 0  # Mamba: groups that share B and C
    batch_invariant: bool = False  # a row's bits do not depend on the rest of the batch

    def __post_init__(self) -> None:
        check_fields(self)
        at_least(1, num_heads=self.num_heads, num_kv_heads=self.num_kv_heads)
        at_least(1, qk_head_dim=self.qk_head_dim, v_head_dim=self.v_head_dim)
        at_least(0, kv_lora_rank=self.kv_lora_rank, qk_rope_head_dim=self.qk_rope_head_dim)
        at_least(0, state_dim=self.state_dim, conv_width=self.conv_width, num_groups=self.num_groups)
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")
        if not (math.isfinite(self.scale) and self.scale > 0):
            raise ValueError(f"scale is {self.scale}; it must be finite and above 0 (1/sqrt(head_dim) is usual)")
        if self.softcap is not None and not (math.isfinite(self.softcap) and self.softcap > 0):
            raise ValueError(f"softcap is {self.softcap}; it must be finite and above 0, or None for no cap")
        if not self.dtype.is_floating_point:
            raise ValueError(f"dtype is {self.dtype}; it must be a floating-point type")
        if not self.kv_dtype.is_floating_point:
            raise ValueError(f"kv_dtype is {self.kv_dtype}; it must be a floating-point type, fp8 included")
        for side, width in zip(("left", "right"), self.window, strict=True):
            if width is not None and width < 0:
                raise ValueError(
                    f"window {side} is {width}; it counts keys beside the diagonal, so it is 0 or more, "
                    "or None for an open side"
                )
        if self.chunk is not None and self.chunk < 1:
            raise ValueError(f"chunk is {self.chunk}; it must be at least 1, or None for no chunks")
        if self.cache_layout not in CACHE_LAYOUTS:
            raise ValueError(f"cache_layout is {self.cache_layout!r}; it must be one of {', '.join(CACHE_LAYOUTS)}")

    @classmethod
    @checked
    def gqa(
        cls,
        *,
        num_heads: int,
        head_dim: int,
        num_kv_heads: int | None = None,
        v_head_dim: int | None = None,
        scale: float | None = None,
        dtype: torch.dtype = torch.bfloat16,
        kv_dtype: torch.dtype | None = None,
        window: Window | int = (None, None),
        softcap: float | None = None,
        sinks: bool = False,
        alibi: bool = False,
        chunk: int | None = None,
        causal: bool = True,
        cache_layout: str = "strided",
        batch_invariant: bool = False,
    ) -> Layer:
        """Multi-head, grouped-query or multi-query attention.

        Args:
            num_heads: query heads H.
            head_dim: elements of a head of q and k.
            num_kv_heads: KV heads Hkv, a divisor of num_heads; None: num_heads.
            v_head_dim: elements of a head of v and of the output; None: head_dim.
            scale: multiplies q @ k, before all else; None: 1/sqrt(head_dim).
            dtype: of q, k, v and the output.
            kv_dtype: of the cache; None: dtype. An fp8 type (torch.float8_e4m3fn, float8_e4m3fnuz) takes the scales of
                `LayerTensors`.
            window: (left, right) keys that a query sees beside its own position, inclusive; None leaves a side open.
                An int W is a model's "sliding window W": the token itself and the W - 1 before it.
            softcap: scaled scores become softcap * tanh(score / softcap), in units of the score; None: no cap.
            sinks: one more logit per head, with value 0; each run is given `LayerTensors.sinks`.
            alibi: scores get -slope * distance to the key in tokens; each run is given `LayerTensors.alibi`.
            chunk: tokens per chunk of local attention: a query sees keys of its own chunk of positions alone, and
                page_size divides it. None: all keys. (The chunk of a Mamba layer is another: a step of its scan.)
            causal: whether a query sees no later keys. False is of a whole layer, `Batch.causal` of a step's requests.
            cache_layout: "strided" [pages, page_size, Hkv, D], "k_packed" or "shuffled"; see `allocate_cache`.
            batch_invariant: only kernels whose bits for a request are the same in every batch.

        >>> Layer.gqa(num_heads=8, head_dim=64, window=4).window
        (3, 0)
        """
        at_least(1, head_dim=head_dim)
        if isinstance(window, int):
            if window < 1:
                raise ValueError(f"window is {window}; a sliding window counts the token itself, so it is at least 1")
            window = (window - 1, 0)
        return cls(
            family="gqa",
            num_heads=num_heads,
            num_kv_heads=num_heads if num_kv_heads is None else num_kv_heads,
            qk_head_dim=head_dim,
            v_head_dim=head_dim if v_head_dim is None else v_head_dim,
            scale=default_scale(head_dim) if scale is None else scale,
            dtype=dtype,
            kv_dtype=dtype if kv_dtype is None else kv_dtype,
            window=window,
            softcap=softcap,
            sinks=sinks,
            alibi=alibi,
            chunk=chunk,
            causal=causal,
            cache_layout=cache_layout,
            batch_invariant=batch_invariant,
        )

    @classmethod
    @checked
    def mla(
        cls,
        *,
        num_heads: int,
        kv_lora_rank: int = 512,
        qk_nope_head_dim: int = 128,
        qk_rope_head_dim: int = 64,
        v_head_dim: int = 128,
        scale: float | None = None,
        dtype: torch.dtype = torch.bfloat16,
        kv_dtype: torch.dtype | None = None,
        batch_invariant: bool = False,
    ) -> Layer:
        """DeepSeek's multi-head latent attention; the default widths are those of DeepSeek-V2 and V3.

        Args:
            num_heads: query heads H.
            kv_lora_rank: elements of a token's latent.
            qk_nope_head_dim: elements of a head's q and k without positions, which the latent is up-projected to.
            qk_rope_head_dim: elements of q and k that carry positions; all heads share those of k.
            v_head_dim: elements of a head of v and of the output.
            scale: multiplies q @ k; None: that of the up-projected heads, 1/sqrt(nope + rope), 1/sqrt(192) for the
                default, in both algorithms.
            dtype: of queries, latents, weights and the output.
            kv_dtype: of the cache; None: dtype. An fp8 type takes a scalar `LayerTensors.k_scale`.
            batch_invariant: only kernels whose bits for a request are the same in every batch.

        >>> layer = Layer.mla(num_heads=16)
        >>> layer.qk_head_dim, layer.v_head_dim, layer.latent_dim
        (192, 128, 576)
        """
        at_least(1, kv_lora_rank=kv_lora_rank, qk_nope_head_dim=qk_nope_head_dim, qk_rope_head_dim=qk_rope_head_dim)
        head_dim = qk_nope_head_dim + qk_rope_head_dim
        return cls(
            family="mla",
            num_heads=num_heads,
            num_kv_heads=num_heads,
            qk_head_dim=head_dim,
            v_head_dim=v_head_dim,
            scale=default_scale(head_dim) if scale is None else scale,
            dtype=dtype,
            kv_dtype=dtype if kv_dtype is None else kv_dtype,
            kv_lora_rank=kv_lora_rank,
            qk_rope_head_dim=qk_rope_head_dim,
            batch_invariant=batch_invariant,
        )

    @classmethod
    @checked
    def mamba2(
        cls,
        *,
        num_heads: int,
        head_dim: int = 64,
        state_dim: int = 128,
        conv_width: int = 4,
        num_groups: int = 1,
        chunk: int = 256,
        dtype: torch.dtype = torch.bfloat16,
        state_dtype: torch.dtype = torch.float32,
    ) -> Layer:
        """A Mamba-2 (SSD) layer, whose cache holds states.

        Args:
            num_heads: heads H of the state.
            head_dim: channels P of a head.
            state_dim: elements N of a channel's state.
            conv_width: taps of the causal convolution, the newest token's included.
            num_groups: groups of heads that share B and C, a divisor of num_heads.
            chunk: tokens that the scan of a prompt takes at a time. It bounds no attention, as `Layer.gqa`'s does.
            dtype: of inputs and outputs.
            state_dtype: of the states [slots, H, P, N].

        >>> Layer.mamba2(num_heads=80).chunk
        256
        """
        at_least(1, num_heads=num_heads, head_dim=head_dim, state_dim=state_dim, conv_width=conv_width)
        at_least(1, num_groups=num_groups)
        if num_heads % num_groups:
            raise ValueError(f"num_heads {num_heads} is not a multiple of num_groups {num_groups}")
        return cls(
            family="mamba2",
            num_heads=num_heads,
            num_kv_heads=num_heads,
            qk_head_dim=head_dim,
            v_head_dim=head_dim,
            scale=1.0,
            dtype=dtype,
            kv_dtype=state_dtype,
            chunk=chunk,
            state_dim=state_dim,
            conv_width=conv_width,
            num_groups=num_groups,
        )

    @classmethod
    @checked
    def mamba1(
        cls,
        *,
        num_channels: int,
        state_dim: int = 16,
        conv_width: int = 4,
        chunk: int = 256,
        dtype: torch.dtype = torch.bfloat16,
        state_dtype: torch.dtype = torch.float32,
    ) -> Layer:
        """A Mamba-1 (selective scan) layer: a head of width 1 per channel, all in one group.

        Args:
            num_channels: channels of x behind the input projection; each is a head.
            state_dim, conv_width, chunk, dtype, state_dtype: as for `Layer.mamba2`.

        >>> layer = Layer.mamba1(num_channels=1536)
        >>> layer.num_heads, layer.qk_head_dim, layer.num_groups
        (1536, 1, 1)
        """
        at_least(1, num_channels=num_channels)
        layer = cls.mamba2(
            num_heads=num_channels,
            head_dim=1,
            state_dim=state_dim,
            conv_width=conv_width,
            chunk=chunk,
            dtype=dtype,
            state_dtype=state_dtype,
        )
        return replace(layer, family="mamba1")

    @property
    def brief(self) -> str:
        """The facts that tell the layers of a model apart, in few words.

        >>> Layer.gqa(num_heads=32, num_kv_heads=8, head_dim=128, window=(127, 0)).brief, Layer.mla(num_heads=16).brief
        ('gqa 32/8 d128 bfloat16 window (127, 0)', 'mla 16/16 d192 v128 bfloat16')
        """
        words = [f"{self.family} {self.num_heads}/{self.num_kv_heads} d{self.qk_head_dim}"]
        words += [f"v{self.v_head_dim}"] if self.v_head_dim != self.qk_head_dim else []
        words += [f"{self.dtype}".removeprefix("torch.")]
        words += [f"window {self.window}"] if self.window != (None, None) else []
        words += [f"chunk {self.chunk}"] if self.chunk is not None else []
        return " ".join(words)

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def qk_nope_head_dim(self) -> int:
        """MLA: width of the part of a head's key that comes from the latent."""
        return self.qk_head_dim - self.qk_rope_head_dim

    @property
    def conv_channels(self) -> int:
        """Mamba: channels of the causal convolution, B and C beside x in Mamba-2.

        >>> Layer.mamba2(num_heads=80).conv_channels, Layer.mamba1(num_channels=1536).conv_channels
        (5376, 1536)
        """
        both = 2 * self.num_groups * self.state_dim if self.family == "mamba2" else 0
        return self.num_heads * self.qk_head_dim + both

    @property
    def latent_dim(self) -> int:
        """MLA: width of a cache row, the latent and the rope part."""
        return self.kv_lora_rank + self.qk_rope_head_dim


class LayerTensors(NamedTuple):
    """What differs from layer to layer at run time, on the device of q; every field may be None.

    Args:
        sinks: [H] of any floating dtype: logits of the sinks, natural-log units, not scaled. Needed where the layer has
            sinks, refused elsewhere; so is alibi.
        alibi: [H] of any floating dtype: slopes; a key at a distance of n tokens loses slope * n.
        k_scale: of an fp8 cache, one element or [Hkv], one per KV head, float32 (bfloat16 and float16 are taken too):
            a key is its byte's value times the scale, and `write` divides by it. None: 1. Of MLA's latents one element.
        v_scale: the same of values. None: 1. MLA has none.
        q_scale: one element or [Hkv], float32, for kernels that quantise q themselves; q is given unscaled. MLA has
            none.

    >>> LayerTensors().sinks is None
    True
    """

    sinks: torch.Tensor | None = None
    alibi: torch.Tensor | None = None
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    q_scale: torch.Tensor | None = None


def check_family(layer: Layer, owner: str) -> None:
    """Raise a ValueError that names the class to use, unless `owner` serves layers of this family."""
    right = SERVED_BY.get(layer.family)
    if right == owner:
        return
    serves = " and ".join(repr(family) for family, name in SERVED_BY.items() if name == owner)
    use = f": use {right}" if right else ""
    raise ValueError(f"layer.family is {layer.family!r}; {owner} serves {serves} layers{use}")


def differing(layers: Sequence[Layer]) -> dict[str, tuple[object, ...]]:
    """The fields in which layers differ, with the value of each layer: what keeps them from sharing one `Attention`.

    >>> layers = [Layer.gqa(num_heads=4, head_dim=64, window=w) for w in (128, (None, None))]
    >>> differing(layers), differing(layers[:1] * 2)
    ({'window': ((127, 0), (None, None))}, {})
    """
    values = {field.name: tuple(getattr(layer, field.name) for layer in layers) for field in fields(Layer)}
    return {name: found for name, found in values.items() if len(set(found)) > 1}


def default_scale(head_dim: int) -> float:
    """1/sqrt(head_dim).

    >>> default_scale(64)
    0.125
    """
    if head_dim < 1:
        raise ValueError(f"head_dim is {head_dim}; it must be at least 1")
    return 1.0 / math.sqrt(head_dim)
