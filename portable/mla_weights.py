"""MLA's up-projection, split once: what turns latents into heads, and queries into latents."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from portable.arguments import checked
from portable.layer import Layer
from portable.sets import short


class MlaWeights(NamedTuple):
    """The two halves of `kv_b_proj` by head. Both algorithms read the same memory: one of them transposed."""

    w_uk: torch.Tensor  # [H, qk_nope_head_dim, rank]
    w_uv: torch.Tensor  # [H, v_head_dim, rank]

    @classmethod
    @checked
    def from_kv_b_proj(cls, source: torch.nn.Module | torch.Tensor, layer: Layer) -> MlaWeights:
        """The halves of a weight [H * (qk_nope_head_dim + v_head_dim), rank], in the layer's dtype.

        Args:
            source: the weight, of 16 bits or more, or the linear module that has it. A module that does more than
                multiply by a weight of plain numbers (a packed one, 8 bits with scales elsewhere, adapters) is applied
                to the identity, so its own code dequantises, without dropout; it must be linear.

        Raises:
            ValueError: a bias, a module that is not linear, a weight of 8 bits or without memory, or a shape that does
                not fit the layer.

        >>> layer = Layer.mla(num_heads=2, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6)
        >>> [tuple(half.shape) for half in MlaWeights.from_kv_b_proj(torch.nn.Linear(16, 28, bias=False), layer)]
        [(2, 8, 16), (2, 6, 16)]
        """
        heads, rank, nope = layer.num_heads, layer.kv_lora_rank, layer.qk_nope_head_dim
        rows = heads * (nope + layer.v_head_dim)
        with torch.no_grad():
            weight = source if isinstance(source, torch.Tensor) else weight_of(source, rank, layer.dtype)
            if weight.device.type == "meta":
                raise ValueError("kv_b_proj has a weight on meta; it must be in memory: load it first")
            if not weight.dtype.is_floating_point:
                raise ValueError(
                    f"kv_b_proj has a weight of {short(weight.dtype)}; it must hold numbers of floating point"
                )
            if weight.dtype.itemsize == 1:
                raise ValueError(
                    f"kv_b_proj has a weight of {short(weight.dtype)}, whose scales are elsewhere; it must be "
                    f"dequantised: {short(layer.dtype)} is right"
                )
            if weight.shape != (rows, rank):
                raise ValueError(
                    f"kv_b_proj has a weight of shape {list(weight.shape)}; {heads} heads of {nope} + "
                    f"{layer.v_head_dim} on a latent of {rank} need {[rows, rank]}"
                )
            weight = weight.detach().to(layer.dtype).view(heads, nope + layer.v_head_dim, rank)
            return cls(weight[:, :nope].contiguous(), weight[:, nope:].contiguous())

    def up_project(self, kv_c: torch.Tensor, k_pe: torch.Tensor, rows: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Latents [T, rank] and [T, rope] to K [T, H, nope + rope] and V [T, H, Dv], each written once.

        Args:
            rows: of a product; 0: all. With a number, a row's bits depend on no other; see `product`.
        """
        heads, nope, _ = self.w_uk.shape
        k = kv_c.new_empty(len(kv_c), heads, nope + k_pe.shape[-1])
        v = kv_c.new_empty(len(kv_c), heads, self.w_uv.shape[1])
        if len(kv_c):
            product(kv_c[:, None], self.w_uk.mT, k[..., :nope], rows)
            product(kv_c[:, None], self.w_uv.mT, v, rows)
            k[..., nope:] = k_pe[:, None]
        return k, v

    def absorb(self, q_nope: torch.Tensor, q_pe: torch.Tensor, rows: int = 0) -> torch.Tensor:
        """Queries [T, H, nope] and [T, H, rope] as queries of latents, [T, H, rank + rope]."""
        rank, rope = self.w_uk.shape[-1], q_pe.shape[-1]
        q = q_nope.new_empty(*q_nope.shape[:2], rank + rope)
        latent, position = q.split_with_sizes((rank, rope), -1)  # 0.8 us less than two slices
        product(q_nope, self.w_uk, latent, rows)
        position.copy_(q_pe)
        return q

    def expand(self, latent: torch.Tensor, out: torch.Tensor, rows: int = 0) -> None:
        """Outputs [T, H, rank] over latents as outputs [T, H, Dv], into `out`."""
        product(latent, self.w_uv.mT, out, rows)


def product(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, rows: int = 0) -> None:
    """x [T, H, K], or [T, 1, K] for all heads, times weight [H, K, N], into out [T, H, N].

    Args:
        rows: 0 for one product of all, whose kernel, and so the order of its sums, follows from the number of tokens.
            Else products of so many rows each, of the same strides, the last one filled up with zeros.

    >>> x, weight, out = torch.randn(5, 2, 3), torch.randn(2, 3, 4), torch.empty(5, 2, 4)
    >>> product(x, weight, out, rows=2)
    >>> torch.allclose(out, torch.einsum("thk,hkn->thn", x, weight), atol=1e-5)
    True
    """
    heads = weight.shape[0]
    if not rows:
        torch.bmm(x.transpose(0, 1).expand(heads, -1, -1), weight, out=out.transpose(0, 1))
        return
    for at in range(0, len(x), rows):
        part = x[at : at + rows]
        block = x.new_zeros(x.shape[1], rows, x.shape[2])
        block[:, : len(part)] = part.transpose(0, 1)
        out[at : at + rows] = torch.bmm(block.expand(heads, -1, -1), weight).transpose(0, 1)[: len(part)]


def weight_of(module: torch.nn.Module, rank: int, dtype: torch.dtype) -> torch.Tensor:
    """The weight [out, in] of a linear module as numbers, whatever it stores.

    Raises:
        ValueError: it has a bias, which a product of matrices cannot hold, does not take a latent, or is not linear.
    """
    bias = getattr(module, "bias", None)
    if (bias() if callable(bias) else bias) is not None:  # of torch's own quantised linears it is a method
        raise ValueError(f"kv_b_proj is a {type(module).__name__} with a bias; MLA's up-projection has none")
    with evaluated(module):
        numbers = plain_weight(module)
        return applied_weight(module, rank, dtype) if numbers is None else numbers


@contextmanager
def evaluated(module: torch.nn.Module) -> Iterator[None]:
    """Without dropout and the like; `eval()` itself is left alone, for adapters merge their weights there."""
    training = [each for each in module.modules() if each.training]
    try:
        for each in training:
            each.training = False
        yield
    finally:
        for each in training:
            each.training = True


def applied_weight(module: torch.nn.Module, rank: int, dtype: torch.dtype) -> torch.Tensor:
    """The weight of a module that is asked for its product with the identity, in the first dtype that it takes.

    Raises:
        ValueError: it takes none, or does what no weight does.
    """
    stored = [*module.parameters(), *module.buffers()]
    device = next((each.device for each in stored if each.device.type != "meta"), None)  # a hook loads what is on meta
    own = (each.dtype for each in stored if each.is_floating_point() and each.dtype.itemsize > 1)
    failed: Exception | None = None
    for each in dict.fromkeys((dtype, *own, torch.float32)):
        identity = torch.eye(rank, dtype=each, device=device)
        try:
            found = module(identity)
        except Exception as error:
            failed = failed or error
            continue
        weight = product_of(module, found).mT
        if weight.device.type != "meta":
            check_linear(module, weight, identity)
        return weight
    raise ValueError(
        f"kv_b_proj is a {type(module).__name__} that does not take [{rank}, {rank}] of {short(dtype)}: {failed}"
    ) from failed


def product_of(module: torch.nn.Module, found: object) -> torch.Tensor:
    """The product [rows, out] among what a module returned; some engines return the bias too."""
    product, *more = found if isinstance(found, tuple) else (found,)
    if any(each is not None for each in more):
        raise ValueError(
            f"kv_b_proj is a {type(module).__name__} that returns a bias beside its product; "
            "MLA's up-projection has none"
        )
    if not isinstance(product, torch.Tensor) or product.dim() != 2:
        shape = list(product.shape) if isinstance(product, torch.Tensor) else type(product).__name__
        raise ValueError(
            f"kv_b_proj is a {type(module).__name__} that turns a matrix into {shape}; it must be a matrix"
        )
    return product


NEARLY = 1 / 32  # of the largest output: activations in 127 steps from -1 to 1 are off by 0.8%, bfloat16 by 0.4%


def check_linear(module: torch.nn.Module, weight: torch.Tensor, identity: torch.Tensor) -> None:
    """Raise a ValueError unless the module gives 0 for 0, and for signs, whole and halved, the product by its weight.

    Formats of 8 and 4 bits hold 0, 1, -1 and their halves, so quantised activations are as near as can be; a norm, an
    activation function or a clamp is not, at one of the two sizes.
    """
    name, place = type(module).__name__, torch.arange(len(identity), device=identity.device)
    signs = torch.where(place * place % 7 % 2 == 0, 1.0, -1.0).to(identity.dtype)
    for size in (1.0, 0.5):
        zero, found = product_of(module, module(torch.stack([signs * 0, signs * size]))).double()
        if zero.any():
            raise ValueError(
                f"kv_b_proj is a {name} that adds up to {zero.abs().max():.3g} to its product, as a bias does; "
                "MLA's up-projection has none"
            )
        right = weight.double() @ (signs.double() * size)
        off, most = (found - right).abs().max(), right.abs().max()
        if not off <= NEARLY * most:
            raise ValueError(
                f"kv_b_proj is a {name} that is not linear: outputs of up to {most:.3g} are off by {off:.3g} from a "
                "product by a weight, which is all that MLA's up-projection does"
            )


def plain_weight(module: torch.nn.Module) -> torch.Tensor | None:
    """The weight of a module that does nothing but multiply by it; None where the module's own code is to be asked."""
    weight = getattr(module, "weight", None)
    code = getattr(module.forward, "__func__", None)  # of the module itself, which loaders and adapters may replace
    call = type(module).__call__ is torch.nn.Module.__call__
    every = torch.nn.modules.module  # hooks of every module
    more = module._forward_pre_hooks or module._forward_hooks
    more = more or every._global_forward_pre_hooks or every._global_forward_hooks
    if code is not torch.nn.Linear.forward or not call or more or not isinstance(weight, torch.Tensor):
        return None
    if weight.is_quantized or type(weight).dequantize is not torch.Tensor.dequantize:  # one that knows its own scales
        return weight.dequantize()
    is_plain = type(weight) in (torch.Tensor, torch.nn.Parameter) and weight.is_floating_point()
    return weight if is_plain and weight.dtype.itemsize > 1 else None


def joined(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """[..., A] and [..., B] as [..., A + B]: a view where the two are neighbours in memory, as the parts of a split."""
    width = left.shape[-1] + right.shape[-1]
    neighbours = (
        left.stride() == right.stride()
        and left.stride(-1) == 1
        and left.untyped_storage().data_ptr() == right.untyped_storage().data_ptr()
        and right.storage_offset() == left.storage_offset() + left.shape[-1]
    )
    if not neighbours:
        return torch.cat([left, right], -1)
    return left.as_strided((*left.shape[:-1], width), left.stride(), left.storage_offset())
