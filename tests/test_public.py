"""What a user sees first: the names of the package, and what its objects print."""

import dataclasses
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import portable
from portable import Attention, Batch, Layer, Mamba, MlaAttention, Size
from portable.planned import Padded
from portable.variants import local, prefix


def test_every_public_name_can_be_had_and_nothing_else_is_shown():
    found = {}
    exec("from portable import *", found)
    assert {*portable.__all__} == {*found} - {"__builtins__"}
    assert all(found[name] is getattr(portable, name) for name in portable.__all__)
    assert {name for name in dir(portable) if not name.startswith("_")} == {*portable.__all__}


def test_what_is_imported_at_its_first_use_is_shown_before():
    code = (
        "import sys, portable; assert 'Graphs' in dir(portable) and '__version__' in dir(portable);"
        "late = ('graphs', 'mamba_run', 'mamba_copies', 'mla_attention', 'mla_weights', 'explain');"
        "print([name for name in late if f'portable.{name}' in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


class NoLaunch(TorchDispatchMode):
    """Whatever torch is asked for is an error."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} ran")


STEP = Batch.from_lens([1, 5], [9, 5], block_table=np.array([[0, 1, 2], [3, 4, 0]]), page_size=4, device="cpu")
SHARED = Batch.from_lens([1, 1], [9, 6], block_table=[[0, 1, 2], [0, 3, 4]], page_size=4)
GQA = Layer.gqa(num_heads=32, num_kv_heads=8, head_dim=128)
MLA = Layer.mla(num_heads=16)
MAMBA = Layer.mamba2(num_heads=80)


def attention(layer=GQA):
    return Attention(layer, page_size=4, device="cpu")


def mla():
    return MlaAttention(MLA, page_size=4, device="cpu")


def mamba():
    return Mamba(MAMBA, device="cpu")


def padded(plan):
    return dataclasses.replace(plan, padded=Padded(STEP, Size(8), {}))


SHOWN = [
    (attention, "Attention(gqa 32/8 d128 bfloat16, page 4, cpu)"),
    (
        lambda: attention(Layer.gqa(num_heads=4, head_dim=64, v_head_dim=32, window=8, chunk=16, dtype=torch.float16)),
        "Attention(gqa 4/4 d64 v32 float16 window (7, 0) chunk 16, page 4, cpu)",
    ),
    (mla, "MlaAttention(mla 16/16 d192 v128 bfloat16, page 4, cpu)"),
    (mamba, "Mamba(mamba2 80/80 d64 bfloat16 chunk 256, cpu)"),
    (lambda: STEP, "Batch(2 requests, 6 tokens, page 4)"),
    (lambda: Batch.from_lens([1], [1]), "Batch(1 request, 1 token, no pages)"),
    (lambda: local(STEP, 4), "Batch(3 requests, 6 tokens, page 4)"),
    (lambda: attention().plan(STEP), "MhaPlan(2 requests, 6 tokens, page 4)"),
    (lambda: attention().plan(prefix(SHARED, 4)), "MhaPlan(2 requests, 2 tokens, page 4, 2 parts)"),
    (lambda: padded(attention().plan(STEP)), "MhaPlan(2 requests, 6 tokens, page 4, padded to 8 x 1 tokens)"),
    (lambda: mla().plan(STEP), "MlaPlan(2 requests, 6 tokens, page 4)"),
    (lambda: mla().plan(prefix(SHARED, 4)), "MlaPlan(2 requests, 2 tokens, page 4, 2 parts)"),
    (lambda: mamba().plan(STEP, [[3], [2]]), "MambaPlan(2 requests, 6 tokens)"),
    (lambda: padded(mamba().plan(STEP, [[3], [2]])), "MambaPlan(2 requests, 6 tokens, padded to 8 x 1 tokens)"),
]


@pytest.mark.parametrize(("make", "text"), SHOWN, ids=[text for _, text in SHOWN])
def test_objects_print_the_facts_of_the_host_alone(make, text):
    made = make()
    with NoLaunch():
        assert repr(made) == text


@pytest.mark.parametrize(
    ("owner", "layer", "message"),
    [
        (Attention, MLA, "layer.family is 'mla'; Attention serves 'gqa' layers: use MlaAttention"),
        (Attention, MAMBA, "layer.family is 'mamba2'; Attention serves 'gqa' layers: use Mamba"),
        (MlaAttention, GQA, "layer.family is 'gqa'; MlaAttention serves 'mla' layers: use Attention"),
        (Mamba, MLA, "layer.family is 'mla'; Mamba serves 'mamba1' and 'mamba2' layers: use MlaAttention"),
        (Attention, dataclasses.replace(GQA, family="gqb"), "layer.family is 'gqb'; Attention serves 'gqa' layers"),
    ],
)
def test_a_layer_of_another_family_is_told_its_class(owner, layer, message):
    pages = {} if owner is Mamba else {"page_size": 4}
    with pytest.raises(ValueError) as error:
        owner(layer, **pages, device="cpu")
    assert str(error.value) == message


def test_a_page_size_that_was_forgotten_is_told():
    with pytest.raises(ValueError, match=r"needs 20 pages of 1 token, .* 2 wide \(page_size is 1, as it is where "):
        Batch.from_lens([20], [20], block_table=[[0, 1]])
    with pytest.raises(ValueError, match=r"needs 10 pages of 2 tokens, but block_table is 2 wide$"):
        Batch.from_lens([20], [20], block_table=[[0, 1]], page_size=2)
