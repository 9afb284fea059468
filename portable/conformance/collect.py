"""The contract of what brings an engine's tensors into persistent metadata: whole numbers, all looked at."""

from __future__ import annotations

import numpy as np
import torch

from portable.conformance.cells import Case
from portable.conformance.collect_faults import FRESH, Answer, Step, collected_wrongly
from portable.conformance.inputs import seed_of, unchanged
from portable.conformance.measure import NOT_ITS_OWN, Departure, require
from portable.conformance.move_faults import explaining
from portable.kernel import Kernel

PAD, WIDTH, MOST = -7, 21, 4


def check_collect(kernel: Kernel, case: Case, device: str) -> None:
    """Every cell, count and copy afterwards, and what lies between and behind them."""
    random, count, columns = np.random.default_rng(seed_of(case)), case.parts, case.page_size or 1
    kinds = np.int64 if case.same_pool else np.int32
    table = random.integers(0, 2**31, (count + 3, WIDTH + 6), dtype=kinds)
    rows = first = accepted = None
    if case.slots != "all":
        rows = random.integers(0, count + 3, count, dtype=np.int32)
        rows[:: 3 if case.slots == "holes" else count + 1] = -1
        reach = WIDTH + columns if case.slots == "past_the_end" else max(1, WIDTH - columns - MOST)
        first = random.integers(0, reach, count, dtype=np.int32)
    if case.lse:
        accepted = random.integers(-1, MOST + 3, max(1, count // 2)).astype(np.int32 if case.strided else np.int64)
    lists = (
        random.integers(0, 2**31, count, dtype=np.int32),
        random.integers(-1, 2**40, count // 2),
        rows_of(random, count),
    )

    step = Step(
        table,
        WIDTH,
        np.arange(count) if rows is None else rows.astype(np.int64),
        np.zeros(count, np.int64) if first is None else first.astype(np.int64),
        None if accepted is None else accepted.astype(np.int64),
        MOST,
        PAD,
        columns,
    )

    def there(array: np.ndarray | None) -> torch.Tensor | None:
        return None if array is None else torch.from_numpy(array.copy()).to(device)

    given, at, begin, counts = torch.from_numpy(table).to(device)[:, :WIDTH], there(rows), there(first), there(accepted)
    whole = torch.full((count, columns + 2 * case.strided), FRESH, dtype=torch.int32, device=device)
    kept = None if counts is None else torch.full((len(counts) + 1,), FRESH, dtype=torch.int32, device=device)
    sources = [there(each) for each in lists]
    copies = [
        (each, torch.zeros(len(each) + 1, dtype=each.dtype, device=device)) for each in sources if each is not None
    ]
    with unchanged(given, at, begin, counts, *sources):
        pairs = [(source, target[: len(source)]) for source, target in copies]
        cells = whole[:, :columns]
        kernel.run(given, at, begin, cells, PAD, counts, MOST, None if kept is None else kept[:-1], pairs)
    got = whole[:, :columns].cpu().numpy(), None if kept is None else kept[:-1].cpu().numpy()
    if message := departure(got, (step.cells(), step.kept)):
        raise Departure(message, *explaining(collected_wrongly(step), lambda wrong: not departure(got, wrong)))
    require(bool((whole[:, columns:] == FRESH).all()), "what lies between the rows of cells was written", NOT_ITS_OWN)
    require(kept is None or int(kept[-1]) == FRESH, "what lies behind the kept counts was written", NOT_ITS_OWN)
    for source, target in copies:
        check_copy(source, target)


def departure(got: Answer, want: Answer) -> str:
    """What of an answer is another one's; empty where nothing is."""
    if wrong := int((got[0] != want[0]).sum()):
        return f"{wrong} of {want[0].size} cells are wrong"
    same = got[1] is None or want[1] is None or np.array_equal(got[1], want[1])
    return "" if same else "a count of accepted tokens is wrong"


def check_copy(source: torch.Tensor, target: torch.Tensor) -> None:
    """A list was copied, and what is behind it in the target is as it was."""
    got = target[:-1]
    require(bool(target[-1] == 0), f"what lies behind a copied list of {source.dtype} was written", NOT_ITS_OWN)
    if torch.equal(got, source):
        return
    same = int((got == source).long().cumprod(0).sum())  # elements before the first that differs
    kinds = () if got[same:].any() else ("the end of a list not copied" if source[:same].any() else "lists not copied",)
    raise Departure(f"a copied list of {source.dtype} is wrong", *kinds)


def rows_of(random: np.random.Generator, count: int) -> np.ndarray:
    """As many truths."""
    return random.random(count) < 0.5
