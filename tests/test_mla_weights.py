"""The up-projection: split once from any linear, exact both ways, and parts of a row that are joined without a copy."""

import pytest
import torch
from mla_cases import HEADS, NOPE, RANK, ROPE, V_DIM, mla_layer

from portable import MlaWeights
from portable.mla_weights import joined

LAYER = mla_layer(torch.float32)
ROWS = HEADS * (NOPE + V_DIM)


class Int8Linear(torch.nn.Module):
    """Bytes with a scale per row, dequantised by its own forward."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        scale = weight.abs().amax(1, keepdim=True) / 127
        self.register_buffer("weight", (weight / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)

    def forward(self, x):
        return x @ (self.weight.float() * self.scale).T


class Pair(Int8Linear):
    """As some engines return the bias beside the product."""

    def forward(self, x):
        return super().forward(x), None


def halves(weight):
    return weight.view(HEADS, NOPE + V_DIM, RANK).split([NOPE, V_DIM], 1)


def same(weights, weight):
    for half, right in zip(weights, halves(weight), strict=True):
        assert torch.equal(half, right) and half.is_contiguous()


def test_a_weight_and_a_linear_give_the_same_halves():
    linear = torch.nn.Linear(RANK, ROWS, bias=False)
    for source in (linear, linear.weight, linear.double(), linear.to(torch.bfloat16)):
        weight = source if isinstance(source, torch.Tensor) else source.weight
        found = MlaWeights.from_kv_b_proj(source, LAYER)
        same(found, weight.detach().float())
        assert not any(half.requires_grad for half in found)


@pytest.mark.parametrize("kind", [Int8Linear, Pair])
def test_a_quantised_linear_dequantises_itself(kind):
    module = kind(torch.randn(ROWS, RANK))
    same(MlaWeights.from_kv_b_proj(module, LAYER), module.weight.float() * module.scale)


@pytest.mark.filterwarnings("ignore:.*deprecated")
def test_torchs_own_quantised_linear_dequantises_itself():
    linear = torch.nn.Linear(RANK, ROWS, bias=False)
    packed = torch.quantize_per_tensor(linear.weight.detach(), 0.01, 0, torch.qint8)
    del linear.weight
    linear.weight = packed
    same(MlaWeights.from_kv_b_proj(linear, LAYER), packed.dequantize())


def test_what_does_not_fit_is_named():
    with pytest.raises(
        ValueError, match=r"weight of shape \[41, 16\]; 3 heads of 8 \+ 6 on a latent of 16 need \[42, 16"
    ):
        MlaWeights.from_kv_b_proj(torch.zeros(ROWS - 1, RANK), LAYER)
    with pytest.raises(ValueError, match="kv_b_proj is a Linear with a bias"):
        MlaWeights.from_kv_b_proj(torch.nn.Linear(RANK, ROWS), LAYER)
    with pytest.raises(ValueError, match=r"is a Int8Linear that does not take \[16, 16\] of float32"):
        MlaWeights.from_kv_b_proj(Int8Linear(torch.randn(ROWS, RANK + 1)), LAYER)


@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_heads_and_latents_are_the_products_of_the_halves(tokens):
    layer = mla_layer()
    weight = torch.randn(ROWS, RANK, dtype=torch.float64)
    weights = MlaWeights.from_kv_b_proj(weight, layer)
    kv_c, k_pe = torch.randn(tokens, RANK + ROPE, dtype=torch.float64).split([RANK, ROPE], -1)
    k, v = weights.up_project(kv_c, k_pe)
    right = (kv_c @ weight.T).view(tokens, HEADS, NOPE + V_DIM)
    torch.testing.assert_close(k, torch.cat([right[..., :NOPE], k_pe[:, None].expand(-1, HEADS, -1)], -1))
    torch.testing.assert_close(v, right[..., NOPE:].contiguous())
    q_nope, q_pe = torch.randn(tokens, HEADS, NOPE + ROPE, dtype=torch.float64).split([NOPE, ROPE], -1)
    q = weights.absorb(q_nope, q_pe)
    torch.testing.assert_close(  # scores over latents are scores over heads
        torch.einsum("thr,sr->ths", q, torch.cat([kv_c, k_pe], -1)),
        torch.einsum("thd,shd->ths", torch.cat([q_nope, q_pe], -1), k),
    )
    out = torch.full((tokens, HEADS, V_DIM + 2), torch.nan, dtype=torch.float64)
    weights.expand(kv_c[:, None].expand(-1, HEADS, -1), out[..., :V_DIM])
    torch.testing.assert_close(out[..., :V_DIM], v)
    assert out[..., V_DIM:].isnan().all()


def test_the_parts_of_a_row_are_joined_without_a_copy():
    whole = torch.randn(5, 3, 12)
    left, right = whole.split([8, 4], -1)
    found = joined(left, right)
    assert torch.equal(found, whole) and found.data_ptr() == whole.data_ptr()
    found = joined(left[1:], right[1:])
    assert torch.equal(found, whole[1:]) and found.data_ptr() == whole[1:].data_ptr()
    for a, b in ((left.clone(), right), (left, right.clone()), (right, left[..., :4]), (left[..., :4], right)):
        assert torch.equal(joined(a, b), torch.cat([a, b], -1))
    assert joined(left[:0], right[:0]).shape == (0, 3, 12)
