"""The laws of the choice of a kernel, on toy kernels: order, reasons, force, purity."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from portable.explain import cases_of, explain, unused_packages
from portable.kernel import FEATURES, GraphLevel, Kernel, KernelCaps, Needs, Op, Requires
from portable.layer import Layer, UnsupportedError
from portable.packages import Package
from portable.platform import detect
from portable.platform.target import Fastest, Target
from portable.select import Request, requested_from_env, select, why_not_here
from portable.sets import ANY, multiple_of, one_of

LAYER = Layer.gqa(num_heads=8, num_kv_heads=2, head_dim=64, dtype=torch.float16)
DECODE = Needs(page_size=16, seq_len=128)


def device(vendor: str = "toy", **changes: Any) -> Target:
    facts = dict.fromkeys(("product", "compute_units", "partition", "memory", "fp8", "matrix"))
    return Target(
        **{
            **facts,
            **dict(vendor=vendor, arch=f"{vendor}1", name="Toy", index=0, wave_size=32, xcds=1),
            **dict(shared_memory=1024, graphs=True),
            **changes,
        }
    )


def kernel(name: str, op: Op = Op.PAGED, **changes: Any) -> Kernel:
    """A kernel of the provider before the dot that can do everything, but for the changes."""
    able = dict(
        op=op,
        name=name,
        provider=name.partition(".")[0],
        vendors={"toy"},
        archs=ANY,
        dtypes={torch.float16},
        head_dims=multiple_of(8),
        gqa_ratios=multiple_of(1),
        page_sizes=multiple_of(1),
        features=FEATURES,
        graph=GraphLevel.ALWAYS,
    )
    return Kernel(KernelCaps(**{**able, **changes}), run=print)


REFERENCE = kernel("reference.paged", vendors=ANY)
FAST = kernel("fast.paged", requires=(Requires("fast-lib", ">=0.1.7"),))
PLAIN = kernel("plain.paged", head_dims=one_of(64, 128), features=FEATURES - {"sinks"})
MERGE = kernel("plain.merge", Op.MERGE)
KERNELS = (REFERENCE, PLAIN, FAST, MERGE)
ORDER = {"paged": ("reference", "fast", "plain")}


def choose(
    requested: Any = None,
    installed: Any = None,
    layer: Layer = LAYER,
    needs: Needs = DECODE,
    kernels: tuple[Kernel, ...] = KERNELS,
    target: Target | None = None,
    order: Any = ORDER,
    op: Op = Op.PAGED,
) -> Any:
    return select(op, target or device(), layer, needs, requested, installed, kernels, order)


def test_the_first_able_kernel_in_order_serves_and_the_reference_is_last_even_if_listed_first() -> None:
    choice = choose(installed={"fast-lib": "0.2"})
    assert (choice.kernel, choice.rejected, choice.how) == (FAST, (), "automatic")
    assert choice.alternatives == ("plain.paged", "reference.paged")


def test_refused_kernels_are_kept_with_every_reason_wherever_they_rank() -> None:
    odd = dataclasses.replace(LAYER, qk_head_dim=40, v_head_dim=40, sinks=True)
    choice = choose(layer=odd)
    assert choice.kernel is REFERENCE
    assert choice.rejected == (
        ("fast.paged", ("fast-lib is not installed",)),
        (
            "plain.paged",
            ("head_dim 40 is not one of 64, 128", "sinks is not supported"),
        ),
    )
    behind = choose(layer=odd, installed={"fast-lib": "1"})
    assert (behind.kernel, behind.alternatives) == (FAST, ("reference.paged",))
    assert [name for name, _ in behind.rejected] == ["plain.paged"]


@given(st.permutations(["a", "b", "c", "reference"]), st.sets(st.sampled_from("abc")), st.sets(st.sampled_from("abc")))
def test_rank_is_the_order_then_registration_then_the_reference(
    registered: list[str], listed: set[str], refusing: set[str]
) -> None:
    dtypes = {True: {torch.float32}, False: {torch.float16}}
    kernels = tuple(kernel(f"{name}.paged", dtypes=dtypes[name in refusing]) for name in registered)
    order = sorted(listed, reverse=True)
    choice = choose(kernels=kernels, order={Op.PAGED: order})
    ranked = [*order, *(name for name in registered if name not in order and name != "reference"), "reference"]
    assert [choice.kernel.caps.provider, *(n.partition(".")[0] for n in choice.alternatives)] == [
        name for name in ranked if name not in refusing
    ]
    assert [name.partition(".")[0] for name, _ in choice.rejected] == [name for name in ranked if name in refusing]


def test_an_order_may_name_single_kernels() -> None:
    first, second = kernel("fast.one"), kernel("fast.two")
    assert choose(kernels=(first, second), order={"paged": ("fast.two", "fast")}).kernel is second


def test_no_candidate_lists_the_reasons_of_each_on_its_own_line() -> None:
    with pytest.raises(UnsupportedError) as error:
        choose(layer=dataclasses.replace(LAYER, dtype=torch.float32))
    head, *lines = str(error.value).split("\n  ")
    assert head == "no kernel can serve paged on toy toy1 (automatic)"
    assert [line.partition(":")[0] for line in lines] == ["fast.paged", "plain.paged", "reference.paged"]
    assert all("dtype float32 is not one of float16" in line for line in lines)
    with pytest.raises(UnsupportedError, match="no kernel is registered"):
        choose(op=Op.CONV1D)


@pytest.mark.parametrize(
    ("version", "reason"),
    [
        (None, "fast-lib is not installed"),
        ("0.1.5", "fast-lib 0.1.5 is not >=0.1.7"),
        ("0.1.7.dev3", "fast-lib 0.1.7.dev3 is not >=0.1.7"),
        ("odd", "fast-lib odd is not a version that can be compared with >=0.1.7"),
        (Package("0.1.7", "it broke"), "fast-lib 0.1.7 cannot be used: it broke"),
        (Package(None, "that is another"), "fast-lib is not installed: that is another"),
        ("0.1.7", None),
        ("0.1.7.post2.dev18", None),
        ("0.2rc1", None),
        ("1.0+local", None),
    ],
)
def test_packages_absent_wrong_or_unusable_are_reasons(version: Any, reason: str | None) -> None:
    installed = {} if version is None else {"fast-lib": version}
    choice = choose(installed=installed)
    assert dict(choice.rejected).get("fast.paged") == (None if reason is None else (reason,))
    assert (choice.kernel is FAST) == (reason is None)
    assert why_not_here(FAST, device(), installed) == (() if reason is None else (reason,))


def test_package_names_are_compared_as_distributions_are() -> None:
    spelt = kernel("fast.paged", requires=(Requires("Fast_Lib"),))
    assert choose(installed={"fast-lib": "1"}, kernels=(spelt,)).kernel is spelt


def test_a_package_is_opened_only_when_nothing_else_refuses_the_kernel() -> None:
    opened: list[str] = []
    lib = {"fast-lib": Package("1.0", lambda: opened.append("fast-lib"))}
    choose(
        installed=lib,
        layer=dataclasses.replace(LAYER, num_heads=9, num_kv_heads=3),
        kernels=(kernel("fast.paged", gqa_ratios=one_of(4), requires=FAST.caps.requires), REFERENCE),
    )
    choose(installed=lib, target=device("other"), kernels=(FAST, REFERENCE))
    choose("plain", installed=lib)
    why_not_here(FAST, device("toy", emulated=True), lib)
    assert opened == []
    choose(installed=lib)
    choose(installed=lib)
    assert opened == ["fast-lib"]


def test_a_package_is_no_reason_on_another_vendors_device() -> None:
    choice = choose(target=device("other"))
    assert dict(choice.rejected)["fast.paged"] == ("vendor 'other' is not one of toy",)


# C08: the same request for each kind of layer; nothing is overridden silently.
SPECS = {
    "decoder": (LAYER, DECODE),
    "draft": (Layer.gqa(num_heads=4, num_kv_heads=4, head_dim=128, dtype=torch.float16), DECODE),
    "encoder": (dataclasses.replace(LAYER, causal=False, sinks=True), Needs(causal=False, page_size=16)),
    "cross": (LAYER, Needs(causal=False, page_size=16)),
}


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize(
    "requested", ["plain", "plain.paged", {"paged": "plain"}, {Op.PAGED: "plain.paged"}, "paged=plain"]
)
def test_a_forced_choice_holds_for_every_layer_or_fails_with_its_reasons(spec: str, requested: Any) -> None:
    layer, needs = SPECS[spec]
    if spec == "encoder":
        with pytest.raises(UnsupportedError) as error:
            choose(requested, layer=layer, needs=needs, installed={"fast-lib": "1"})
        head, *lines = str(error.value).split("\n  ")
        assert "'plain" in head
        assert lines == ["plain.paged: sinks is not supported"]
    else:
        choice = choose(requested, layer=layer, needs=needs, installed={"fast-lib": "1"})
        assert (choice.kernel, choice.rejected, choice.alternatives) == (PLAIN, (), ())
        assert "plain" in choice.how


@pytest.mark.parametrize("spec", SPECS)
def test_without_a_request_the_choice_is_automatic_with_reasons(spec: str) -> None:
    layer, needs = SPECS[spec]
    choice = choose(layer=layer, needs=needs)
    assert choice.how == "automatic"
    assert dict(choice.rejected)["fast.paged"] == ("fast-lib is not installed",)
    assert choice.kernel is (REFERENCE if spec == "encoder" else PLAIN)


def test_a_provider_without_a_kernel_for_an_operation_leaves_it_to_the_automatic_choice() -> None:
    choice = choose("fast", op=Op.MERGE)
    assert (choice.kernel, choice.how) == (MERGE, "automatic: 'fast' has no kernel for merge")
    assert choose("fast,merge=plain", op=Op.MERGE).how == "backend 'plain'"
    assert choose("paged=fast", op=Op.MERGE).how == "automatic"


def test_the_most_specific_request_wins() -> None:
    assert choose("fast,paged=plain").kernel is PLAIN


@pytest.mark.parametrize(
    ("requested", "message"),
    [
        ("nosuch", r"backend 'nosuch' is not known; providers: reference, plain, fast$"),
        ("referense.paged", r"backend 'referense.paged' is not known; .*; kernels like it: reference.paged"),
        ("merge=nosuch", "backend 'nosuch' is not known"),
        ("merge=fast", "backend 'fast' has no kernel for merge; served by: plain"),
        ("attend=fast", "backend names the operation 'attend'; it must be one of prefill, paged, .*state_copy"),
        ("fast,plain", "two names for every operation, 'fast' and 'plain'"),
        ("paged=fast,paged=plain", "names the operation 'paged' twice"),
        ("paged=", "has an entry without a name"),
        ("fast,,", "has an entry without a name"),
        ({"attend": "fast"}, "must be one of prefill"),
    ],
)
def test_requests_that_cannot_be_meant_are_errors_that_list_what_can(requested: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        choose(requested, op=Op.PAGED)
    assert not isinstance(error.value, UnsupportedError)


def test_the_environment_variable_is_a_request_that_errors_call_by_its_name() -> None:
    assert requested_from_env({}) is None
    assert requested_from_env({"PORTABLE_BACKEND": " "}) is None
    request = requested_from_env({"PORTABLE_BACKEND": "plain, merge = fast"})
    assert request == Request("plain", ((Op.MERGE, "fast"),), source="PORTABLE_BACKEND")
    with pytest.raises(ValueError, match=r"^PORTABLE_BACKEND 'fast' has no kernel for merge"):
        choose(request)


def test_select_is_pure(monkeypatch: pytest.MonkeyPatch) -> None:
    before = choose(installed={"fast-lib": "1"})
    monkeypatch.setenv("PORTABLE_BACKEND", "nosuch")
    monkeypatch.setenv("PORTABLE_PLUGINS", "nosuch")
    assert choose(installed={"fast-lib": "1"}) == before

    class Untouchable(dict[str, str]):
        def __getitem__(self, name: str) -> str:
            raise AssertionError(f"select read the environment variable {name}")

        get = __contains__ = __getitem__  # type: ignore[assignment]

    with monkeypatch.context() as patch:
        patch.setattr(os, "environ", Untouchable())
        assert choose(installed={"fast-lib": "1"}) == before


def test_a_choice_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        choose().kernel = FAST


def test_a_new_vendor_and_its_kernel_are_selected_without_edits(monkeypatch: pytest.MonkeyPatch) -> None:
    class Vendor:
        ORDER = {"paged": ("fast", "new"), "merge": ("plain",)}  # noqa: RUF012

    known = detect.vendors()
    monkeypatch.setattr(detect, "vendors", lambda: {"toy": Vendor, **known})
    new = kernel("new.paged")
    kernels = (*KERNELS, new)
    assert choose(kernels=kernels, order=None).kernel is new
    assert choose(kernels=kernels, order=None, target=device("unheard")).kernel is REFERENCE


def test_what_was_measured_for_a_need_comes_before_the_vendors_order(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = (
        Fastest("paged", ("toy1",), ("plain", "new.other"), seq_len=(1024, None), reqs=(1, 8)),
        Fastest("paged", ("toy1",), ("new.other",), seq_len=(1024, None), num_heads=(8, 8), page_size=(16, 16)),
        Fastest("merge", ("toy1",), ("new",)),
    )

    class Vendor:
        ORDER, MEASURED = {"paged": ("new", "fast")}, rows

    known = detect.vendors()
    monkeypatch.setattr(detect, "vendors", lambda: {"toy": Vendor, **known})
    kernels = (*KERNELS, kernel("new.paged"), kernel("new.other"))

    def ranked(layer: Layer = LAYER, **needs: Any) -> list[str]:
        asked = DECODE._replace(**needs)
        choice = choose(kernels=kernels, order=None, installed={"fast-lib": "1"}, layer=layer, needs=asked)
        return [choice.kernel.name, *choice.alternatives]

    usual = ["new.paged", "new.other", "fast.paged", "plain.paged", "reference.paged"]
    assert ranked() == usual  # short sequences were not measured
    few = ["plain.paged", "new.other", "new.paged", "fast.paged", "reference.paged"]
    assert ranked(seq_len=1024) == ranked(seq_len=4096, reqs=8) == few  # the first row that fits
    many = ["new.other", "new.paged", "fast.paged", "plain.paged", "reference.paged"]
    assert ranked(seq_len=1024, reqs=16) == many
    for beyond in (dict(reqs=16, page_size=32), dict(reqs=16, layer=dataclasses.replace(LAYER, num_heads=16))):
        assert ranked(**{"seq_len": 1024, **beyond}) == usual  # type: ignore[arg-type]
    unable = dataclasses.replace(LAYER, qk_head_dim=40, v_head_dim=40)
    assert ranked(unable, seq_len=1024)[0] == "new.other"  # the fastest cannot
    forced = choose("new", kernels=kernels, order=None, needs=DECODE._replace(seq_len=1024))
    assert forced.kernel.name == "new.other"  # what is forced, in the measured order
    given = choose(kernels=kernels, order=ORDER, installed={"fast-lib": "1"}, needs=DECODE._replace(seq_len=1024))
    assert given.kernel is FAST  # an order that is given is the order


FEATURE_LAYERS = {
    "window": dict(window=4),
    "softcap": dict(softcap=50.0),
    "sinks": dict(sinks=True),
    "alibi": dict(alibi=True),
    "noncausal": dict(causal=False),
    "batch_invariant": dict(batch_invariant=True),
}
BARE: dict[str, Any] = dict(
    features=frozenset(), page_sizes=one_of(16), head_dims=one_of(64), gqa_ratios=one_of(4), kv_dtypes=()
)
MATRIX = [
    *((feature, changes, {}, f"{feature} is not supported") for feature, changes in FEATURE_LAYERS.items()),
    ("lse", {}, dict(lse=True), "lse is not supported"),
    ("graph", {}, dict(graph=GraphLevel.SINGLE), "graph level SINGLE is above NEVER"),
    *((f"page {n}", {}, dict(page_size=n), f"page_size {n} is not one of 16") for n in (32, 48)),
    *((f"dim {n}", dict(head_dim=n), {}, f"head_dim {n} is not one of 64") for n in (72, 80, 96, 192, 256)),
    *(
        (f"ratio {n}", dict(num_heads=n, num_kv_heads=1), {}, f"GQA ratio {n} is not one of 4")
        for n in (1, 3, 5, 6, 7, 8)
    ),
    (
        "fp8",
        dict(kv_dtype=torch.float8_e4m3fn),
        {},
        "kv_dtype float8_e4m3fn is not supported: the kernel declares none",
    ),
    ("layout", dict(cache_layout="shuffled"), {}, "cache layout 'shuffled' is not one of strided"),
    ("wide value", dict(v_head_dim=32), {}, "v_head_dim 32 is not one of 64"),
]


@pytest.mark.parametrize(("layer", "needs", "reason"), [row[1:] for row in MATRIX], ids=[row[0] for row in MATRIX])
def test_whatever_is_not_declared_is_refused_and_served_where_it_is(layer: Any, needs: Any, reason: str) -> None:
    bare = kernel("bare.paged", **{**BARE, "graph": GraphLevel.NEVER})
    asked = Layer.gqa(**{**dict(num_heads=8, num_kv_heads=2, head_dim=64, dtype=torch.float16), **layer})
    need = Needs(**{**dict(page_size=16, seq_len=16), **needs})
    able = kernel("able.paged", kv_dtypes=ANY, cache_layouts=("strided", "shuffled"))
    choice = choose(kernels=(bare, able), layer=asked, needs=need)
    assert choice.kernel is able
    assert reason in dict(choice.rejected)["bare.paged"]
    with pytest.raises(UnsupportedError, match=r"bare\.paged: "):
        choose("bare", kernels=(bare, able), layer=asked, needs=need)
    assert choose(kernels=(bare,)).kernel is bare


def test_an_explanation_has_a_row_per_need_even_where_nothing_can_serve() -> None:
    explanation = explain(device(), LAYER, kernels=(PLAIN, FAST, MERGE), requested="plain", order=ORDER)
    assert [(str(row.op), row.phase) for row in explanation.rows] == [
        ("prefill", ""),
        ("paged", "decode"),
        ("paged", "verify"),
        ("paged", "extend"),
        ("merge", ""),
        ("cache_write", ""),
        ("cache_gather", ""),
    ]
    served = [row.choice and row.choice.kernel.name for row in explanation.rows]
    assert served == [None, "plain.paged", "plain.paged", "plain.paged", "plain.merge", None, None]
    assert not explanation.complete
    sinks = explain(device(), dataclasses.replace(LAYER, sinks=True), kernels=KERNELS, requested="plain", order=ORDER)
    assert sinks.rows[1].rejected == (("plain.paged", ("sinks is not supported",)),)
    assert "paged (decode, verify, extend): no kernel [backend 'plain']\n    not plain.paged: sinks is not" in str(
        sinks
    )


def test_an_explanation_says_what_would_have_been_rejected_at_the_same_time() -> None:
    text = str(explain(device(), LAYER, kernels=KERNELS, order=ORDER, cases=cases_of(LAYER, 16)[1:2]))
    assert "paged (decode): plain.paged [automatic]" in text
    assert "    not fast.paged: fast-lib is not installed\n    also able: reference.paged" in text


def test_packages_that_no_kernel_uses_are_said_plainly() -> None:
    named = {"Fast.Lib": "1", "other": "2"}
    assert unused_packages(named, KERNELS) == ("other 2: no kernel of this version of portable uses it",)


def test_an_explanation_refuses_what_it_cannot_explain() -> None:
    with pytest.raises(ValueError, match="page_size is 0"):
        explain(device(), LAYER, page_size=0, kernels=())
