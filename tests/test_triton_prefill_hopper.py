"""Hopper's prefill: what its tensor maps address, the work list, what is compiled; on an sm90 the contract."""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_triton_launch import pretended

from portable.conformance import cells, contract
from portable.conformance.inputs import segment

triton = pytest.importorskip("triton")

import portable  # noqa: E402
from portable.backends.triton import fast  # noqa: E402
from portable.backends.triton import prefill_hopper as hopper  # noqa: E402
from portable.backends.triton.launch import recorded  # noqa: E402
from portable.kernel import KV, Kernel, Op  # noqa: E402
from portable.layer import Layer, LayerTensors  # noqa: E402
from portable.platform.detect import describe  # noqa: E402

pytestmark = pytest.mark.skipif(hopper.device is None, reason="this Triton has no Gluon")
LAYER = Layer.gqa(num_heads=4, num_kv_heads=2, head_dim=64)


def views():
    """[tokens, heads, width] and [pages, page size, heads, width], as caches are laid out."""
    x = torch.arange(3 * 16 * 4 * 136, dtype=torch.int32).to(torch.bfloat16)
    yield "packed", x[: 48 * 4 * 64].view(48, 4, 64), False
    yield "gaps", x.view(48, 4, 136)[:, 1:3, 8:72], False
    yield "heads first", x[: 48 * 4 * 64].view(4, 48, 64).transpose(0, 1), False
    yield "heads first with gaps", x.view(4, 48, 136)[:, :40, :128].transpose(0, 1), False
    yield "pages", x[: 48 * 4 * 64].view(3, 16, 4, 64), True
    yield "pages by heads", x[: 48 * 4 * 64].view(3, 4, 16, 64).transpose(1, 2), True
    yield "K and V side by side", x[: 48 * 4 * 128].view(3, 16, 4, 128)[..., 64:], True
    yield "one of two layers' pages", x[: 48 * 4 * 128].view(3, 2, 16, 4, 64)[:, 1], True


@pytest.mark.parametrize(("x", "paged"), [(x, paged) for _, x, paged in views()], ids=[name for name, *_ in views()])
def test_a_map_addresses_every_element(x, paged):
    rows = hopper.rows_of(x, 16, paged)
    assert rows is not None
    pages = x if paged else x[None]
    page, token, head, column = np.indices(pages.shape)
    row = page * rows.page_row + token + head * rows.head_row
    at = row * rows.map.strides[0] + column + head * rows.head_column
    strides = (x.stride() if paged else (0, *x.stride()))[:4]
    want = sum(i * s for i, s in zip((page, token, head, column), strides, strict=True))
    assert (at == want).all()
    assert row.max() < rows.map.shape[0] and (column + head * rows.head_column).max() < rows.map.shape[1]
    assert rows.map.shape[1] <= rows.map.strides[0]  # rows do not overlap


@pytest.mark.parametrize(
    ("x", "paged"),
    [
        (torch.zeros(8, 2, 68, dtype=torch.float16)[..., :64][..., 4:], False),  # 8 bytes off
        (torch.zeros(8, 1, 68, dtype=torch.float16)[..., :64], False),  # rows 136 bytes apart
        (torch.zeros(2, 64, 8, dtype=torch.float16).transpose(1, 2)[None].transpose(1, 2), True),
        (torch.zeros(3 * 1032, dtype=torch.float16).as_strided((3, 4, 2, 64), (1032, 256, 64, 1)), True),
        (torch.zeros(0, 2, 64, dtype=torch.float16), False),
    ],
    ids=["address", "stride", "columns apart", "pages apart", "empty"],
)
def test_what_no_map_describes(x, paged):
    assert hopper.rows_of(x, 16, paged) is None


lens = st.lists(st.tuples(st.integers(0, 400), st.integers(0, 600)), min_size=1, max_size=6)


@settings(max_examples=30, deadline=None)
@given(lens, st.sampled_from([(None, None), (50, 0)]))
def test_the_tiles_hold_every_query_once_and_the_heaviest_come_first(lens, window):
    layer = replace(LAYER, window=window)
    with recorded(describe("sm90", "H100")):
        made = segment(hopper.KERNELS[0], tuple(lens), layer)
    tiles = made.prepared.tiles.numpy()
    assert made.prepared.programs == 132
    rows = np.concatenate([np.arange(first, first + count) for first, count in tiles[:, :2]] or [np.arange(0)])
    assert sorted(rows) == list(range(sum(q for q, _ in lens)))
    assert ((tiles[:, 1] > 0) & (tiles[:, 1] <= hopper.BLOCK_M)).all()
    starts = np.cumsum([(0, 0), *lens], 0)
    seen = []
    for first, count, key, length, position, request, *_ in tiles:
        queries, keys = lens[request]
        assert (key, length) == (starts[request, 1], keys)
        assert position == keys - queries + first - starts[request, 0]
        end = min(position + count, keys)
        seen.append(end - (0 if window[0] is None else max(0, position - window[0])))
    assert seen == sorted(seen, reverse=True)


@settings(max_examples=30, deadline=None)
@given(lens, st.sampled_from([(None, None), (50, 0)]), st.sampled_from([1, 2]))
def test_heads_in_parts_list_every_head_of_every_tile_once_and_programs_get_as_much(lens, window, kv_heads):
    layer = Layer.gqa(num_heads=12, num_kv_heads=6, head_dim=64, window=window)
    one_head = sum(keys for _, keys in lens) * 2 * 64 * layer.dtype.itemsize
    with recorded(describe("sm90", "H100")), pytest.MonkeyPatch.context() as patch:
        whole = segment(hopper.KERNELS[0], tuple(lens), layer).prepared
        patch.setattr(hopper, "L2", kv_heads * one_head)
        patch.setattr(hopper, "target_of", lambda tensor: replace(describe("sm90", "H100"), compute_units=7))
        step = segment(hopper.KERNELS[0], tuple(lens), layer)
    items, total = step.prepared.tiles.numpy(), step.prepared.total
    assert total == whole.total == 12 * len(whole.tiles)
    if not one_head or not total:  # nothing to keep in the L2
        assert np.array_equal(items, whole.tiles)
        return
    want = sorted((*tile[:6], head) for tile in whole.tiles.tolist() for head in range(12))
    assert sorted(map(tuple, items[:, :7].tolist())) == want
    programs = [items[i::7] for i in range(7)]
    part = 2 * kv_heads
    each = part * len(whole.tiles)
    for i, item in enumerate(items):  # a part is begun when the one before is begun throughout
        assert i // 7 * 7 // each <= item[6] // part <= (i // 7 * 7 + 6) // each
    work = [(hopper.blocks_of(mine, step, layer) + hopper.BEGIN).sum() for mine in programs]
    assert max(work) - min(work) <= hopper.blocks_of(items, step, layer).max() + hopper.BEGIN


def test_lengths_that_only_the_device_knows_are_left_to_the_portable_kernel():
    with recorded(describe("sm90", "H100")):
        made = replace(segment(hopper.KERNELS[0], ((300, 300),), LAYER), exact=False)
        assert not isinstance(hopper.prepare(made, LAYER), hopper.Items)


def test_launches_by_the_short_way_are_those_of_triton():
    """From the second call on Triton is not asked; descriptors of other tensors of these strides are not checked."""
    layer = Layer.gqa(num_heads=4, num_kv_heads=2, head_dim=64, dtype=torch.bfloat16)

    def call(made, heads, out):
        hopper.attend(*heads, made, layer, LayerTensors(), out, None)

    with pretended() as gpu, pytest.MonkeyPatch.context() as patch:
        patch.setattr(hopper, "target_of", lambda tensor: describe("sm90", "H100"))
        patch.setattr(hopper, "upload", lambda arrays, device: [torch.from_numpy(array) for array in arrays])
        made = segment(hopper.KERNELS[0], ((130, 130),), layer)
        given = [(torch.empty(130, n, 64, dtype=torch.bfloat16) for n in (4, 2, 2)) for _ in range(3)]
        heads = [(q, KV(k, v)) for q, k, v in given]
        out = torch.empty(130, 4, 64, dtype=torch.bfloat16)
        for each in heads:
            call(made, each, out)
        loaded, (held,) = gpu.loaded, made.prepared.kernel._kernels.values()
        assert loaded == 1 and len(held.exact) == 1
        for (q, kv), (*_, (grid, _, _, arguments)) in zip(heads, gpu.launches, strict=True):
            assert grid == (8, 1, 1)
            assert [each.base.data_ptr() for each in arguments[:3]] == [each.data_ptr() for each in (q, *kv)]
            assert [each.shape for each in arguments[:3]] == [[130, 256], [130, 128], [130, 128]]
            assert arguments[3:5] == (None, None) and arguments[5] == out.data_ptr()
            assert arguments[6:] == gpu.launches[0][3][3][6:]


@contextmanager
def encoded():
    """Triton's own launcher on a pretended GPU: what its C gets, and what was encoded, a tuple for each."""
    from triton.backends.nvidia import driver

    launches, maps = [], []

    def fill(address, swizzle, size, kind, block, shape, strides, padding):
        maps.append((address, swizzle, size, kind, tuple(block), tuple(shape), tuple(strides), padding))
        return maps[-1]

    def launch(*arguments):
        own = arguments[-1] if len(arguments) == 16 else arguments[13:]  # the kernel's, with 3.9 and with 3.6
        launches.append([each.data_ptr() if isinstance(each, torch.Tensor) else each for each in own])

    class Launcher(driver.CudaLauncher):
        def __init__(self, source, metadata):
            for name in ("num_ctas", "launch_cooperative_grid", "launch_pdl"):
                setattr(self, name, getattr(metadata, name, 1))
            for name in ("global_scratch", "profile_scratch"):
                setattr(self, f"{name}_size", 0)
                setattr(self, f"{name}_align", 1)
            self.gsan_enabled, self.arg_annotations, self.kernel_signature = False, None, None
            self.launch = driver.wrap_handle_tensordesc(launch, dict(source.signature), metadata.tensordesc_meta)

    with pretended(), pytest.MonkeyPatch.context() as patch:
        active = triton.runtime.driver.active
        active.launcher_cls = Launcher
        active.utils.get_device_properties = lambda device: {"max_shared_mem": 227 << 10, "warpSize": 32}
        active.utils.fill_tma_descriptor = active.utils.fill_tma_descriptor_tiled = fill
        patch.setattr(hopper, "target_of", lambda tensor: describe("sm90", "H100"))
        patch.setattr(hopper, "upload", lambda arrays, device: [torch.from_numpy(array) for array in arrays])
        yield launches, maps, patch


@pytest.mark.parametrize("paged", [False, True])
def test_what_is_encoded_once_follows_addresses_strides_and_sizes(paged):
    """Each launch gets what Triton makes of it; of a place that was seen before nothing is encoded anew."""
    layer = Layer.gqa(num_heads=4, num_kv_heads=2, head_dim=64, dtype=torch.bfloat16)
    memory = torch.empty(1 << 18, dtype=torch.bfloat16)

    def view(at, gap, n, heads):
        """[n, heads, 64] at `at`, tokens `gap` elements further apart than packed; or pages of 16."""
        step = heads * 64 + gap
        if paged and heads == 2:
            return memory[at:].as_strided((n // 16, 16, 2, 64), (16 * step, step, 64, 1))
        return memory[at:].as_strided((n, heads, 64), (step, 64, 1))

    some = [(0, 0, 144), (8, 0, 144), (0, 8, 144), (64, 64, 144), (0, 0, 160)]
    with encoded() as (launches, maps, patch):
        kernel = hopper.KERNELS[paged]
        table = torch.arange(10, dtype=torch.int32)[None] if paged else None
        steps = {n: segment(kernel, ((n, n),), layer, table, 16 if paged else None) for n in (144, 160)}
        out = torch.empty(160, 4, 64, dtype=torch.bfloat16)

        def run(at, gap, n):
            q, k, v = view(at, gap, n, 4), view(at + (1 << 16), gap, n, 2), view(at + (1 << 17), gap, n, 2)
            hopper.attend(q, KV(k, v), steps[n], layer, LayerTensors(), out[:n], None)
            return q, k, v

        for each in some:
            for heads in (run(*each), run(*each)):  # the first may be the cold way
                addresses = [part[0] for part in launches[-1] if isinstance(part, tuple)]
                assert addresses == [x.data_ptr() for x in heads]
        known, seen = len(maps), len(launches)
        for each in some:
            run(*each)
        assert len(maps) == known, "a place that was seen before was encoded again"
        short = launches[seen:]
        patch.setattr(fast, "ENTERING", [None])  # as with a hook of someone: all is left to Triton
        for each, mine in zip(some, short, strict=True):
            run(*each)
            assert mine == launches[-1]
        assert len(maps) == known + 3 * len(some)


def test_a_descriptor_that_is_copied_for_another_tensor_is_encoded_for_that():
    layer = Layer.gqa(num_heads=4, num_kv_heads=4, head_dim=64, dtype=torch.bfloat16)
    x, other, out = (torch.empty(144, 4, 64, dtype=torch.bfloat16) for _ in range(3))
    rows_of = hopper.rows_of

    def copied(tensor, block, paged):
        rows = rows_of(x, block, paged)
        made = object.__new__(type(rows.map))
        made.__dict__.update(rows.map.__dict__, base=other)
        return rows._replace(map=made)

    with encoded() as (launches, _, patch):
        made = segment(hopper.KERNELS[0], ((144, 144),), layer)
        for _ in range(2):
            hopper.attend(x, KV(x, x), made, layer, LayerTensors(), out, None)
        patch.setattr(hopper, "rows_of", copied)
        hopper.attend(x, KV(x, x), made, layer, LayerTensors(), out, None)
    addresses = [[part[0] for part in launch if isinstance(part, tuple)] for launch in launches]
    assert addresses == [3 * [each.data_ptr()] for each in (x, x, other)]


def test_what_is_kept_holds_no_memory():
    x = torch.empty(16, 2, 64, dtype=torch.bfloat16)
    gone = weakref.ref(x)
    assert hopper.rows_of(x, 16, False) is not None
    del x
    assert gone() is None


def test_where_it_is_offered():
    prompt, few = (portable.kernel.Needs(query_len=n, seq_len=4096, page_size=16) for n in (512, 32))
    layer = replace(LAYER, dtype=torch.bfloat16, kv_dtype=torch.bfloat16)
    for kernel in hopper.KERNELS:
        assert kernel.why_not(describe("sm90"), layer, prompt) == ()
        assert "query length" in kernel.why_not(describe("sm90"), layer, few)[0]
        for other in (replace(layer, softcap=1.0), replace(layer, alibi=True), replace(layer, dtype=torch.float32)):
            assert kernel.why_not(describe("sm90"), other, prompt)
        for arch in ("sm80", "sm100", "gfx942"):
            assert kernel.why_not(describe(arch), layer, prompt)


@pytest.mark.parametrize(
    ("width", "v_width", "page", "left"),
    [
        (128, 128, None, False),
        (128, 128, 16, True),
        (256, 256, 64, False),
        (192, 128, None, False),
        (192, 128, 64, False),
    ],
)
def test_what_is_compiled(width, v_width, page, left, monkeypatch):
    """Asynchronous products, copies by TMA, registers moved to those who multiply; no product waits for the next."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "ci"))
    from compile_facts import facts
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonASTSource

    keys = hopper.block_n(Layer.gqa(num_heads=8, head_dim=width, v_head_dim=v_width))
    kernel = hopper.device.attend_kernel
    first = hopper.power_of_2(width)
    constants = {"HEADS": 8, "RATIO": 4, "WIDTH": first, "REST": width - first, "V_WIDTH": v_width}
    constants |= {"BLOCK_N": keys, "STAGES": 2, "LISTED": width == 192}
    constants |= {"PAGE": page, "CAUSAL": True, "LEFT": left, "causal": None}
    constants |= {} if left else {"sinks": None}
    constants |= {} if page else {"table": None}
    constants |= {} if width > first else {"q_rest": None, "k_rest": None}
    signature = {name: "constexpr" if name in constants else "i32" for name in kernel.arg_names}
    block = min(keys, page or keys)
    boxes = {"q": (hopper.ROWS, first), "k": (block, first), "v": (block, v_width)}
    boxes |= {"q_rest": (hopper.ROWS, width - first), "k_rest": (block, width - first)} if width > first else {}
    for name, box in boxes.items():
        layout = gl.NVMMASharedLayout.get_default_for(list(box), gl.bfloat16)
        signature[name] = f"tensordesc<bf16[{box[0]}, {box[1]}],{layout!r}>"
    signature |= {"out": "*bf16", "lse": "*fp32", "items": "*i32", "scale": "fp32"}
    signature |= ({"table": "*i32"} if page else {}) | ({"sinks": "*fp32"} if left else {})
    source = GluonASTSource(kernel, signature, constants, {})
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "enable_fp_fusion": True})
    assert made.metadata.shared <= describe("sm90").shared_memory
    assert facts(made, "sm90")["stack"] <= {128: 104, 192: 0, 256: 120}[width]  # bytes of registers that are spilled
    ptx = made.asm["ptx"]
    for instruction in ("wgmma.mma_async", "setmaxnreg.inc", "setmaxnreg.dec", "cp.async.bulk.tensor"):
        assert instruction in ptx


@pytest.mark.parametrize("kernel", hopper.KERNELS, ids=str)
def test_the_contract_asks_for_queries_that_it_takes(kernel):
    """And for data that tell a kernel which leaves out a feature from one that has it."""
    cases = list(cells.cases(kernel, describe("sm90")))
    assert len(cases) > 20 and {case.lens for case in cases} == set(cells.LONG.values())
    oracle = Kernel(kernel.caps, kernel.run)  # unprepared: only the data are made
    for case in cases[::8]:
        contract.telling(oracle, case, "cpu")


SM90 = torch.cuda.is_available() and portable.detect("cuda").arch == "sm90"


@pytest.mark.device  # or no lane of CI would run it
@pytest.mark.skipif(not SM90, reason="there is no sm90")
@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("op", [Op.PREFILL, Op.PAGED])
def test_contract(op, listed, monkeypatch):
    """With all heads at once, and with one KV head at a time."""
    monkeypatch.setattr(hopper, "L2", 0 if listed else hopper.L2)
    kernel = next(kernel for kernel in hopper.KERNELS if kernel.caps.op is op)
    for case in cells.cases(kernel, portable.detect("cuda")):
        contract.check(kernel, case, "cuda")


@pytest.mark.device
@pytest.mark.skipif(not SM90, reason="there is no sm90")
def test_a_sink_of_minus_infinity_is_no_sink():
    """Of rows without keys too, whose LSE is then -inf: there -inf - -inf is not a number."""
    kernel = next(kernel for kernel in hopper.KERNELS if kernel.caps.op is Op.PREFILL)
    layer = Layer.gqa(num_heads=4, num_kv_heads=2, head_dim=64, sinks=True)
    sinks = torch.tensor([-torch.inf, 0.5, -torch.inf, -1], device="cuda")
    made = segment(kernel, ((100, 40), (128, 128)), layer, device="cuda")
    q, k, v = (
        torch.randn(n, heads, 64, dtype=layer.dtype, device="cuda") for n, heads in ((228, 4), (168, 2), (168, 2))
    )
    out, lse = torch.empty_like(q), torch.empty(4, 228, device="cuda")
    kernel.run(q, KV(k, v), made, layer, LayerTensors(sinks=sinks), out, lse)
    torch.testing.assert_close(lse[:, :60], sinks[:, None].expand(4, 60))
    assert not out[:60].any()
    assert lse[:, 60:].isfinite().all() and not out.isnan().any()
