"""Blocks of persistent memory: written in turns, copied at once, never anywhere else."""

from __future__ import annotations

import pytest
import torch

from portable.platform.graphs import repeatable
from portable.staging import Field, Staging
from portable.upload import ALIGNMENT

FIELDS = {"lens": Field((3,), torch.int32), "slots": Field((2, 2), torch.int64), "flags": Field((5,), torch.bool)}


def test_a_hundred_steps_come_to_the_same_addresses_and_leave_the_last_one_on_the_other_block():
    staging = Staging(sum(field.nbytes for field in FIELDS.values()), torch.device("cpu"))
    views = staging.views(FIELDS)
    where, turns = {name: tensor.data_ptr() for name, tensor in views.there.items()}, []
    for step in range(100):
        turns.append(staging.turn())
        here = views.here[turns[-1]]
        here["lens"][:], here["slots"][:], here["flags"][:] = step, step + 1, step % 2
        staging.send(views.start, views.end)
        assert views.there["lens"].tolist() == [step] * 3 and views.there["slots"].tolist() == [[step + 1] * 2] * 2
        assert views.there["flags"].tolist() == [bool(step % 2)] * 5
        assert {name: tensor.data_ptr() for name, tensor in views.there.items()} == where
        if step:
            assert (views.here[turns[-2]]["lens"] == step - 1).all()
    assert turns[:4] == [1, 0, 1, 0]
    assert all(address % ALIGNMENT == where["lens"] % ALIGNMENT for address in where.values())


def test_fields_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=f"a layout ends at byte {3 * ALIGNMENT} of a block of {3 * ALIGNMENT - 1}"):
        Staging(3 * ALIGNMENT - 1, torch.device("cpu")).views(FIELDS)


def test_fields_may_end_where_others_begin_and_the_device_may_have_more():
    end = 5 * ALIGNMENT
    staging = Staging(end, torch.device("cpu"), more=32)
    late = staging.views(FIELDS, end=end)
    assert (late.start, late.end, staging.nbytes) == (2 * ALIGNMENT, end, end + 32)


def test_work_is_repeated_into_its_first_results_wherever_they_are():
    x = torch.zeros(2)
    (made, (other, numbers)), again = repeatable(lambda: (x + 1, ({"twice": x * 2}, 7)), torch.device("cpu"))
    x.fill_(3)
    again()
    assert made.tolist() == [4, 4] and other["twice"].tolist() == [6, 6] and numbers == 7
