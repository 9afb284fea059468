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


class Bytes(torch.nn.Parameter):
    """A parameter of a class of its own, as those that hold 8 or 4 bits a number have; its scales are elsewhere."""

    def __new__(cls, data: torch.Tensor):
        return torch.Tensor._make_subclass(cls, data, False)


class OwnBytes(torch.nn.Linear):
    """A linear of torch's class with bytes for a weight, which nobody but its own forward understands."""

    def __init__(self, weight: torch.Tensor, stored: torch.Tensor) -> None:
        super().__init__(RANK, ROWS, bias=False)
        self.right, self.weight = [weight], Bytes(stored)

    def forward(self, x):
        return x @ self.right[0].T


class Adapted(torch.nn.Linear):
    """A linear with something learned on top."""

    def forward(self, x):
        return super().forward(x) + x.sum(-1, keepdim=True) / 4


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


STORED = {
    "int8": lambda weight: (weight * 30).round().to(torch.int8),
    "fp8": lambda weight: (weight / 0.01).to(torch.float8_e4m3fn),
    "4 bits": lambda weight: torch.zeros(weight.numel() // 2, 1, dtype=torch.uint8),
}


@pytest.mark.parametrize("stored", STORED)
def test_a_linear_of_bytes_that_only_it_understands_dequantises_itself(stored):
    """Bytes taken as numbers would be of the right shape."""
    weight = torch.randn(ROWS, RANK)
    same(MlaWeights.from_kv_b_proj(OwnBytes(weight, STORED[stored](weight)), LAYER), weight)


def test_what_a_linear_adds_to_its_product_is_in_the_halves():
    linear = Adapted(RANK, ROWS, bias=False)
    torch.testing.assert_close(
        MlaWeights.from_kv_b_proj(linear, LAYER).w_uk, halves(linear.weight.detach() + 0.25)[0], atol=1e-6, rtol=1e-6
    )
    linear = torch.nn.Linear(RANK, ROWS, bias=False)
    right = linear.weight.detach() * 2
    handle = linear.register_forward_hook(lambda module, given, out: out * 2)
    same(MlaWeights.from_kv_b_proj(linear, LAYER), right)
    handle.remove()
    linear.forward = lambda x: x @ right.T
    same(MlaWeights.from_kv_b_proj(linear, LAYER), right)


def test_weights_that_come_with_the_call_are_found_though_they_are_on_meta():
    linear, right = torch.nn.Linear(RANK, ROWS, bias=False, device="meta"), torch.randn(ROWS, RANK)
    with pytest.raises(ValueError, match="kv_b_proj has a weight on meta; it must be in memory"):
        MlaWeights.from_kv_b_proj(linear, LAYER)
    linear.forward = lambda x: x @ right.T
    same(MlaWeights.from_kv_b_proj(linear, LAYER), right)


@pytest.mark.filterwarnings("ignore:.*deprecated")
def test_torchs_own_linear_whose_bias_is_a_method_is_taken():
    linear = torch.nn.Linear(RANK, ROWS, bias=False)
    (packed,) = torch.ao.quantization.quantize_dynamic(torch.nn.Sequential(linear), {torch.nn.Linear})
    found = MlaWeights.from_kv_b_proj(packed, LAYER)
    for half, right in zip(found, halves(linear.weight.detach()), strict=True):
        torch.testing.assert_close(half, right, atol=0.01, rtol=0)
    with_bias = torch.nn.Sequential(torch.nn.Linear(RANK, ROWS))
    with pytest.raises(ValueError, match="kv_b_proj is a Linear with a bias"):
        MlaWeights.from_kv_b_proj(torch.ao.quantization.quantize_dynamic(with_bias, {torch.nn.Linear})[0], LAYER)


class Wrapped(torch.nn.Module):
    """A linear with code before and behind it, which are where its weight is not looked for."""

    def __init__(self, *, before=lambda x: x, behind=lambda y: y, bias=False, **how) -> None:
        super().__init__()
        self.inner, self.before, self.behind = torch.nn.Linear(RANK, ROWS, bias=bias, **how), before, behind

    def forward(self, x):
        return self.behind(self.inner(self.before(x)))


def rms(x):
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


NOT_LINEAR = {
    "a bias inside": ({"bias": True}, r"adds up to 0\.\d+ to its product, as a bias does"),
    "adds one": ({"behind": lambda y: y + 1}, "adds up to 1 to its product"),
    "a bias beside": ({"behind": lambda y: (y, torch.ones(ROWS))}, "returns a bias beside its product"),
    "a norm": ({"before": rms}, "is not linear: outputs of up to .* are off by .* from a product"),
    "a norm behind": ({"behind": rms}, "is not linear"),
    "tanh": ({"behind": torch.tanh}, "is not linear"),
    "relu": ({"behind": torch.relu}, "is not linear"),
    "absolute": ({"before": torch.abs}, "is not linear"),
    "cubed": ({"before": lambda x: x**3}, "is not linear"),
    "not a number": ({"behind": lambda y: y * torch.nan}, "adds up to nan"),
    "two matrices": ({"behind": lambda y: [y, y]}, "turns a matrix into list; it must be a matrix"),
    "heads": ({"behind": lambda y: y.view(-1, HEADS, NOPE + V_DIM)}, r"into \[16, 3, 14\]; it must be a matrix"),
}


@pytest.mark.parametrize("case", NOT_LINEAR)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_module_that_does_what_no_weight_does_is_refused(case, dtype):
    how, why = NOT_LINEAR[case]
    with pytest.raises(ValueError, match=f"kv_b_proj is a Wrapped that .*{why}"):
        MlaWeights.from_kv_b_proj(Wrapped(**how, dtype=dtype), LAYER)


def test_a_hook_that_adds_is_refused():
    linear = torch.nn.Linear(RANK, ROWS, bias=False)
    linear.register_forward_hook(lambda module, given, out: out + 1.0)
    with pytest.raises(ValueError, match="is a Linear that adds up to 1 to its product, as a bias does; MLA's up-proj"):
        MlaWeights.from_kv_b_proj(linear, LAYER)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_linear_inside_a_module_is_found_in_every_dtype(dtype):
    module = Wrapped(dtype=dtype)
    for layer in (LAYER, mla_layer(torch.bfloat16)):
        same(MlaWeights.from_kv_b_proj(module, layer), module.inner.weight.detach().to(layer.dtype))


def test_a_module_in_training_gives_the_weight_of_inference_and_is_left_in_training():
    module = Wrapped(before=torch.nn.Dropout(0.5))
    module.before.train(), module.inner.eval()
    assert module.training
    same(MlaWeights.from_kv_b_proj(module, LAYER), module.inner.weight.detach())
    assert module.training and module.before.training and not module.inner.training


def test_what_every_module_or_a_class_does_to_its_call_is_in_the_halves():
    linear = torch.nn.Linear(RANK, ROWS, bias=False)
    handle = torch.nn.modules.module.register_module_forward_hook(lambda module, given, out: out * 2)
    try:
        found = MlaWeights.from_kv_b_proj(linear, LAYER)
    finally:
        handle.remove()
    same(found, linear.weight.detach() * 2)

    class Doubled(torch.nn.Linear):
        def __call__(self, x):
            return super().__call__(x) * 2

    linear = Doubled(RANK, ROWS, bias=False)
    same(MlaWeights.from_kv_b_proj(linear, LAYER), linear.weight.detach() * 2)


@pytest.mark.filterwarnings("ignore:.*deprecated")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(4))
def test_activations_of_few_bits_are_linear_enough(dtype, seed):
    """Per tensor with a zero point, as torch does; per token and symmetric; and 8 bits of floating point."""
    torch.manual_seed(seed)
    linear = torch.nn.Linear(RANK, ROWS, bias=False)
    (packed,) = torch.ao.quantization.quantize_dynamic(torch.nn.Sequential(linear), {torch.nn.Linear})

    def per_token(x):
        scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-6) / 127
        return (x / scale).round() * scale

    def float8(x):
        scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-6) / 448
        return (x / scale).to(torch.float8_e4m3fn).to(x.dtype) * scale

    for module in (packed, Wrapped(before=per_token), Wrapped(before=float8)):
        weight = linear.weight if module is packed else module.inner.weight
        found = MlaWeights.from_kv_b_proj(module, mla_layer(dtype))
        for half, right in zip(found, halves(weight.detach()), strict=True):
            torch.testing.assert_close(half.float(), right, atol=0.01, rtol=0)


def test_what_does_not_fit_is_named():
    with pytest.raises(ValueError, match="weight of float8_e4m3fn, whose scales are elsewhere; it must be dequantised"):
        MlaWeights.from_kv_b_proj(torch.zeros(ROWS, RANK).to(torch.float8_e4m3fn), LAYER)
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
