"""A kernel of an adapter that is called directly records no gradient, whatever requires one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_adapter_mutations import Subject, install_for, subjects

import portable
from portable.backends.selftest import plain_layers
from portable.conformance import cells
from portable.conformance.inputs import build
from portable.kernel import KV
from portable.layer import LayerTensors


def kind(subject: Subject) -> tuple[object, ...]:
    """What its adapter does with a call."""
    adapter, features = subject.kernel.run.__self__, subject.kernel.caps.features
    return type(adapter), adapter.convention.rows, "sinks" in features, "qv" in adapter.convention.names


KINDS = list({kind(subject): subject for subject in subjects()}.values())


def case_of(subject: Subject) -> cells.Case:
    kernel = subject.kernel
    arch = next(
        arch for arch in ("gfx942", "gfx950", "sm90", "sm100") if not kernel.why_not_on(portable.describe(arch))
    )
    layer, page_size = next(plain_layers(kernel, portable.describe(arch)))
    layer = replace(layer, sinks="sinks" in kernel.caps.features)
    return cells.Case(op=kernel.caps.op, layer=layer, lens=((1, 18), (1, 0), (1, 33)), page_size=page_size)


def needing_gradients(given: tuple[torch.Tensor | None, ...]) -> list[torch.Tensor | None]:
    return [each if each is None else each.clone().requires_grad_() for each in given]


@pytest.mark.parametrize("subject", KINDS, ids=lambda subject: subject.kernel.name)
def test_a_call_with_gradients_on_is_that_with_gradients_off(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, case, found = subject.kernel, case_of(subject), []
    with install_for(monkeypatch, subject.installs[0]):
        inputs = build(kernel, case, "cpu")
        q, *tensors = needing_gradients((inputs.q, *inputs.tensors))
        kv = KV(*needing_gradients(inputs.kv))
        for mode in (torch.no_grad, torch.enable_grad, torch.enable_grad):
            out = torch.empty(*q.shape[:2], inputs.v.shape[-1], dtype=q.dtype)
            lse = torch.empty(q.shape[1::-1]) if "lse" in kernel.caps.features else torch.empty(0)
            with mode():
                given = None if not lse.numel() else lse
                kernel.run(q, kv, inputs.segment, case.layer, LayerTensors(*tensors), out, given)
            assert not out.requires_grad and not lse.requires_grad
            found.append((out, lse))
    for out, lse in found[1:]:
        assert torch.equal(out, found[0][0]) and torch.equal(lse, found[0][1])
