"""MLA decode: planning and running read nothing from the device; tiles fit; Hopper's ranges; what is compiled there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from portable.conformance import cells, contract

triton = pytest.importorskip("triton")

import portable  # noqa: E402
from portable.backends.triton import mla_decode, mla_decode_hopper, mla_decode_tiles  # noqa: E402
from portable.backends.triton.launch import launch, recorded  # noqa: E402
from portable.kernel import KV, Kernel, Needs, Op, Segment  # noqa: E402
from portable.layer import Layer, LayerTensors  # noqa: E402
from portable.platform.emulated import activate  # noqa: E402

(KERNEL,) = mla_decode.KERNELS
ARCHS = ("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201", "sm80", "sm86", "sm89", "sm90", "sm100", "sm120")
SM90 = torch.cuda.is_available() and portable.detect("cuda").arch == "sm90"
gluon = pytest.mark.skipif(mla_decode_hopper.device is None, reason="this Triton has no Gluon")


def meta(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def segment(kernel: Kernel, queries, keys, width=256, page_size=64, causal=True) -> Segment:
    """Meta tensors have no values: whatever reads one fails."""
    queries, keys = np.array(queries, dtype=np.int32), np.array(keys, dtype=np.int32)
    return Segment(
        kernel=kernel,
        requests=slice(0, len(keys)),
        tokens=slice(0, int(queries.sum())),
        cu_seqlens_q=meta(len(keys) + 1),
        seq_lens=meta(len(keys)),
        block_table=meta(len(keys), width),
        page_size=page_size,
        causal=causal,
        max_query_len=int(queries.max()),
        max_seq_len=int(keys.max()),
        host_query_lens=queries,
        host_seq_lens=keys,
    )


def launches(arch: str, layer: Layer, made: Segment, kernel: Kernel = KERNEL):
    """What a step of one layer launches."""
    tokens, heads = made.tokens.stop, layer.num_heads
    with recorded(portable.describe(arch)) as calls:
        made = replace(made, prepared=kernel.prepare(made, layer))
        kernel.run(
            meta(tokens, heads, layer.latent_dim, dtype=layer.dtype),
            KV(meta(100, made.page_size, layer.latent_dim, dtype=layer.kv_dtype), None),
            made,
            layer,
            LayerTensors(),
            meta(tokens, heads, layer.kv_lora_rank, dtype=layer.dtype),
            meta(heads, tokens, dtype=torch.float32),
        )
    return calls


@pytest.mark.parametrize("arch", ["gfx942", "gfx950", "sm90"])
@pytest.mark.parametrize("page_size", [1, 7, 64, 256])
def test_a_step_lists_its_work_reads_a_row_once_and_joins_the_parts(arch, page_size):
    made = segment(KERNEL, [1] * 4, [9000, 3, 500, 70], page_size=page_size, width=-(-9000 // page_size))
    names = [call.kernel.kernel.__name__ for call in launches(arch, Layer.mla(num_heads=16), made)]
    assert names == ["schedule_kernel", "attend_mla_kernel", "combine_mla_kernel"]


def test_short_requests_that_fill_the_device_are_not_split():
    made = segment(KERNEL, [1] * 400, [64] * 400, width=1)
    names = [call.kernel.kernel.__name__ for call in launches("gfx942", Layer.mla(num_heads=16), made)]
    assert names == ["schedule_kernel", "attend_mla_kernel"]


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("heads", [1, 16, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("widths", [(512, 64), (384, 192), (320, 256), (128, 64)])
@pytest.mark.parametrize("tight", [False, True])
def test_a_block_of_keys_fits_the_shared_memory(arch, heads, dtype, widths, tight, monkeypatch):
    """Beside the queries where those stay there; on AMD they pass through it once, in the place of the keys."""
    monkeypatch.setattr(mla_decode_tiles, "TIGHT", tight)
    rank, rope = widths
    target, layer = (
        portable.describe(arch),
        Layer.mla(num_heads=heads, dtype=dtype, kv_lora_rank=rank, qk_rope_head_dim=rope),
    )
    for queries in (1, 4, 8):
        tile = mla_decode_tiles.tile_of(target, layer, queries)
        row = sum(map(mla_decode_tiles.padded, widths)) * dtype.itemsize
        blocks = tile.num_stages if target.matrix == "wgmma" and tile.block_m == 64 else tile.num_stages - 1
        rows = tile.block_n if target.vendor == "amd" else tile.block_m + blocks * tile.block_n
        assert rows * row <= target.shared_memory
        least = 8 if target.matrix == "wmma" and dtype == torch.float32 else 16
        assert least <= tile.block_m <= max(16, 1 << (heads * queries - 1).bit_length())


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
@pytest.mark.parametrize(
    ("heads", "lens", "fp8"),
    [
        (16, ((1, 70), (1, 33)), False),
        (16, ((1, 70), (1, 33)), True),
        (32, ((2, 40),), False),
        (32, ((2, 40),), True),
        (128, ((1, 33),), False),
        (16, ((8, 40),), False),
    ],
)
def test_deepseeks_widths(arch, heads, lens, fp8):
    """The contract's ranks are small; here 576 columns take the tiles that are shipped, 512 of them as values."""
    kv_dtype = {"gfx942": torch.float8_e4m3fnuz, "gfx950": torch.float8_e4m3fn}[arch] if fp8 else torch.bfloat16
    layer = Layer.mla(num_heads=heads, kv_dtype=kv_dtype)
    case = cells.Case(
        op=Op.MLA_DECODE, layer=layer, lens=lens, page_size=16, scales="scalar" if fp8 else "none", strided=True
    )
    with activate(arch):
        contract.check(KERNEL, case, "cpu")


@pytest.mark.parametrize("rank", [512, 448, 80, 40, 16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("fp8", [False, True])
def test_rdnas_pieces_of_the_rank(rank, dtype, fp8, monkeypatch):
    """No RDNA device is emulated: here its tiles run on a gfx942."""
    layer = Layer.mla(num_heads=16, kv_lora_rank=rank, dtype=dtype, kv_dtype=torch.float8_e4m3fnuz if fp8 else dtype)
    tile = mla_decode_tiles.tile_of(portable.describe("gfx1100"), layer, 1)
    assert tile.pieces == tile.num_warps == {512: 16, 448: 16, 80: 4, 40: 4, 16: 1}[rank]
    monkeypatch.setattr(mla_decode, "tile_of", lambda *_: tile)
    case = cells.Case(
        op=Op.MLA_DECODE, layer=layer, lens=((1, 70), (2, 33)), page_size=16, scales="scalar" if fp8 else "none"
    )
    with activate("gfx942"):
        contract.check(KERNEL, case, "cpu")


@pytest.mark.parametrize("arch", ["gfx1100", "gfx1201"])
@pytest.mark.parametrize("name", ["mla decode 16 heads", "mla decode 16 heads float32"])
def test_rdna_spills_nothing(arch, name, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "ci"))
    import compile_cases
    from compile_facts import facts, faults

    for function, made in compile_cases.compiled(compile_cases.CASES[name], arch):
        assert faults(facts(made, arch), arch, function, products=False) == []


def tile(arch, queries=1, **layer):
    made = mla_decode_tiles.tile_of(portable.describe(arch), Layer.mla(**layer), queries)
    return made.block_m, made.block_n, made.num_stages


def test_tiles_by_what_assembles_them(monkeypatch):
    """With Triton 3.9, 64 rows and 64 keys of 16 bits spill on an sm90."""
    fp8 = {"kv_dtype": torch.float8_e4m3fn}
    for tight, wide in ((False, (64, 64, 2)), (True, (32, 64, 3))):
        monkeypatch.setattr(mla_decode_tiles, "TIGHT", tight)
        assert tile("sm90", num_heads=128) == tile("sm90", 4, num_heads=16) == wide
        assert tile("sm90", num_heads=128, **fp8) == (64, 64, 3) and tile("sm90", num_heads=16, **fp8) == (16, 64, 4)
        assert tile("sm90", num_heads=16) == (16, 64, 3) and tile("sm80", num_heads=128)[0] == 64
        assert tile("sm90", num_heads=128, kv_lora_rank=128, qk_rope_head_dim=64) == (64, 64, 2)
        assert tile("sm100", num_heads=16, **fp8)[1] == 32
        assert tile("sm100", num_heads=16, dtype=torch.float32, **fp8)[1] == 16


@pytest.mark.parametrize("tight", [False, True])
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("heads", [16, 48, 128])
def test_a_batch_invariant_layer_has_one_tile(arch, heads, tight, monkeypatch):
    monkeypatch.setattr(mla_decode_tiles, "TIGHT", tight)
    assert len({tile(arch, queries, num_heads=heads, batch_invariant=True) for queries in (1, 2, 4, 8)}) == 1


def test_where_it_is_offered():
    needs = Needs(page_size=64, query_len=8, seq_len=4096, lse=True)
    for heads in (1, 16, 128):
        layer = Layer.mla(num_heads=heads, kv_dtype=torch.float8_e4m3fnuz)
        for arch in ("gfx942", "sm90"):
            assert KERNEL.why_not(portable.describe(arch), layer, needs) == ()
    for rank in (513, 768, 1024):  # 69,632 bytes of LDS and more, or registers that are spilled
        wide = Layer.mla(num_heads=16, kv_lora_rank=rank)
        for arch in ("gfx942", "gfx950", "sm90"):
            assert f"v_head_dim {rank} is above 512" in KERNEL.why_not(portable.describe(arch), wide, needs)
    hopper = mla_decode_hopper.KERNELS[0] if mla_decode_hopper.KERNELS else None
    if hopper is not None:
        layer, sm90 = Layer.mla(num_heads=128), portable.describe("sm90")
        assert hopper.why_not(sm90, layer, needs) == ()
        assert "kv_dtype" in hopper.why_not(sm90, replace(layer, kv_dtype=torch.float8_e4m3fn), needs)[0]
        for other in (needs._replace(page_size=8), needs._replace(query_len=16)):
            assert hopper.why_not(sm90, layer, other)
        assert hopper.why_not(portable.describe("gfx942"), layer, needs)


def ranges(lens, groups, heads, least=2):
    """What the device leaves: starts, merges, and the size of a range."""
    load = mla_decode_hopper.load
    queries = torch.tensor([q for q, _ in lens], dtype=torch.int32)
    keys = torch.tensor([k for _, k in lens], dtype=torch.int32)
    cu = torch.zeros(len(lens) + 1, dtype=torch.int32)
    cu[1:] = queries.cumsum(0)
    tiles = max(1, -(-int(queries.max()) * heads // 64))
    starts = torch.full((groups + 2, 2), -7, dtype=torch.int32)
    merges = torch.full((min(groups, len(lens)) * tiles, 8), -7, dtype=torch.int32)
    with activate("gfx942"):
        launch(
            load.ranges_kernel, (len(lens),), cu, keys, starts, merges, len(lens), groups, least, TILES=tiles,
            BY_REQUEST=len(lens) <= groups, BLOCK_N=32, OVERHEAD=load.OVERHEAD.value, VECTOR=256, num_warps=4,
        )  # fmt: skip
    return starts.tolist(), merges.tolist(), tiles


@gluon
@settings(max_examples=12, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from([0, 1, 31, 33, 300, 5000])), min_size=1, max_size=6),
    st.sampled_from([1, 5, 132]),
    st.sampled_from([16, 128]),
)
def test_ranges_hold_every_block_once_and_parts_have_slots_of_their_own(lens, groups, heads):
    starts, merges, tiles = ranges(lens, groups, heads)
    overhead, size, requests = mla_decode_hopper.load.OVERHEAD.value, starts[groups + 1][0], len(lens)
    blocks = [max(1, -(-keys // 32)) for _, keys in lens]
    assert size == max(2, -(-sum(n + overhead for n in blocks) // groups))
    seen: dict[int, list[tuple[int, int, int]]] = {r: [] for r in range(requests)}
    slots = set()
    for group in range(groups):
        (first, at), last = starts[group], min(starts[group + 1][0], requests - 1)
        for request in range(first, last + 1):  # as the programs walk
            begin, end = (
                min(max(edge - at - overhead, 0), blocks[request]) for edge in (group * size, (group + 1) * size)
            )
            at += overhead + blocks[request]
            if begin < end:
                seen[request].append((begin, end, request + group))
                if end - begin < blocks[request]:
                    assert request + group not in slots and request + group < requests + groups
                    slots.add(request + group)
    starts_of = np.cumsum([0, *(q for q, _ in lens)])
    joined = {(m[0], m[2], m[4] - m[2] * (requests + groups)): m for m in merges if m[3]}
    assert len(joined) == tiles * sum(len(parts) > 1 for parts in seen.values())
    for request, parts in seen.items():
        assert [begin for begin, _, _ in parts] == [0, *(end for _, end, _ in parts[:-1])]
        assert parts[-1][1] == blocks[request]
        assert [slot for *_, slot in parts] == list(range(parts[0][2], parts[0][2] + len(parts)))
        if len(parts) > 1:
            for tile in range(tiles):
                _, queries, _, count, _, *_ = joined[starts_of[request], tile, parts[0][2]]
                assert (queries, count) == (lens[request][0], len(parts))


@gluon
@pytest.mark.parametrize(("heads", "page", "lse"), [(16, 64, True), (128, 16, False)])
def test_what_is_compiled_for_hopper(heads, page, lse):
    """Asynchronous products and copies by TMA; everything in registers, or the products would wait for each other."""
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonASTSource

    kernel = mla_decode_hopper.device.attend_mla_hopper_kernel
    constants = {"HEADS": heads, "TILES": 2, "LIVE": 64, "HALF": 256, "ROPE": 64, "STAGES": mla_decode_hopper.STAGES}
    constants |= {"PAGE": page, "CAUSAL": True, "causal": None} | ({} if lse else {"lse": None})
    signature = {name: "constexpr" if name in constants else "i32" for name in kernel.arg_names}
    for name, rows, columns in (
        ("q_half", 64, 256),
        ("q_rope", 64, 64),
        ("k_half", min(32, page), 256),
        ("k_rope", min(32, page), 64),
    ):
        layout = gl.NVMMASharedLayout.get_default_for([rows, columns], gl.bfloat16)
        signature[name] = f"tensordesc<bf16[{rows}, {columns}],{layout!r}>"
    signature |= {"out": "*bf16", "parts": "*fp32", "parts_lse": "*fp32", "scale": "fp32"}
    signature |= dict.fromkeys(("starts", "cu_seqlens_q", "seq_lens", "table"), "*i32")
    signature |= {"lse": "*fp32"} if lse else {}
    source = GluonASTSource(kernel, signature, constants, {})
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "enable_fp_fusion": True})
    assert made.metadata.shared <= portable.describe("sm90").shared_memory
    for instruction in ("wgmma.mma_async", "cp.async.bulk.tensor"):
        assert instruction in made.asm["ptx"]
    assert ".local" not in made.asm["ptx"]


@gluon
def test_a_view_of_pages_is_a_matrix_of_rows():
    whole = torch.arange(6 * 2 * 16 * 24).view(6, 2, 16, 24)
    for pages in (whole[:, 1, :, :16], whole[:, 0], whole.flatten(1, 2)[:, :5]):
        made = mla_decode_hopper.rows_of(pages)
        assert made is not None
        matrix, page = made
        for i in range(len(pages)):
            assert torch.equal(matrix[i * page : i * page + pages.shape[1]], pages[i])
    assert mla_decode_hopper.rows_of(whole[:, 0].transpose(1, 2)) is None
    assert mla_decode_hopper.rows_of(whole[:0, 0]) is None


@pytest.mark.device  # or no lane of CI would run it
@pytest.mark.skipif(not SM90, reason="there is no sm90")
@pytest.mark.parametrize("kernel", [*mla_decode_hopper.KERNELS, KERNEL], ids=lambda kernel: kernel.name)
def test_contract(kernel):
    for case in cells.cases(kernel, portable.detect("cuda")):
        contract.check(kernel, case, "cuda")
