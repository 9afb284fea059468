"""The contract of what changes persistent metadata on the device: whole numbers, all of which are looked at."""

from __future__ import annotations

import numpy as np
import torch

from portable.conformance.cells import Case
from portable.conformance.inputs import seed_of, unchanged
from portable.conformance.measure import Departure
from portable.conformance.move_faults import cells_wrongly, explaining, steps_wrongly
from portable.kernel import Kernel, Op

CELLS = 1500  # of a table
MOST = 40  # tokens of a request


def check(kernel: Kernel, case: Case, device: str) -> None:
    """Raise AssertionError where the kernel departs from the contract."""
    (check_refresh if case.op is Op.REFRESH else check_advance)(kernel, case, device)


def check_refresh(kernel: Kernel, case: Case, device: str) -> None:
    """Every cell of the table afterwards: entries whose place is before or behind it change nothing."""
    random, count = np.random.default_rng(seed_of(case)), case.parts
    index = torch.from_numpy(random.permutation(CELLS)[:count])
    if case.slots == "past_the_end":
        index[::2] += CELLS
    elif case.slots != "all":
        index[:: 3 if case.slots == "holes" else 1] = -1
    pages, cells = (torch.from_numpy(random.integers(0, 2**31, n, dtype=np.int32)) for n in (count, CELLS))
    want = cells.clone()
    for at, page in zip(index.tolist(), pages.tolist(), strict=True):
        if 0 <= at < CELLS:
            want[at] = page
    at, new, now = index.to(device), pages.to(device), cells.clone().to(device)
    with unchanged(at, new):
        kernel.run(at, new, now)
    if not torch.equal(now.cpu(), want):
        faults = cells_wrongly(cells, index.tolist(), pages.tolist())
        kinds = explaining(faults, lambda wrong: torch.equal(wrong, now.cpu()))
        raise Departure(f"{int((now.cpu() != want).sum())} cells of the table are wrong", *kinds)


def check_advance(kernel: Kernel, case: Case, device: str) -> None:
    """Lengths, slots and positions afterwards; requests without keys, and full ones, get no slot and stay."""
    random, count, page_size = np.random.default_rng(seed_of(case)), case.parts, case.page_size or 1
    lens = torch.from_numpy(random.integers(0, MOST + 1, count, dtype=np.int32))
    lens[:2] = torch.tensor([MOST, 0][:count])
    width = -(-MOST // page_size) + 5 * case.strided
    # pages so far that their slots are past 2**31
    table = torch.from_numpy(random.integers(0, 2**31, (count, width), dtype=np.int32))
    table = table[:, : -(-MOST // page_size)].to(device)
    before, slots = torch.full((count,), -7), torch.full((count,), -5, device=device)
    positions = before.clone().to(device) if case.lse else None
    now, wanted = lens.clone().to(device), []
    for length, row in zip(lens.tolist(), table.tolist(), strict=True):
        grows = 0 < length < MOST
        slot = row[length // page_size] * page_size + length % page_size if grows else -1
        wanted.append((length + grows, slot, length if grows else -7))
    with unchanged(table):
        kernel.run(now, table, slots, positions, page_size, MOST)
    want_lens, want_slots, want_positions = (list(each) for each in zip(*wanted, strict=True))
    got = now.tolist(), slots.tolist(), None if positions is None else positions.tolist()
    if got != (want_lens, want_slots, None if positions is None else want_positions):
        given = (
            lens.tolist(),
            table.tolist(),
            page_size,
            MOST,
            [-5] * count,
            None if positions is None else [-7] * count,
        )
        kinds = explaining(steps_wrongly(*given), lambda wrong: wrong == got)
        wrong = "a length" if got[0] != want_lens else "a slot" if got[1] != want_slots else "a position"
        raise Departure(f"{wrong} is wrong", *kinds)
