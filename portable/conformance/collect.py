"""The contract of what brings an engine's tensors into persistent metadata: whole numbers, all looked at."""

from __future__ import annotations

import numpy as np
import torch

from portable.conformance.cells import Case
from portable.conformance.inputs import seed_of, unchanged
from portable.conformance.measure import require
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

    want = np.full((count, columns), PAD)
    taken = np.ones(count, int)
    if accepted is not None:
        taken[: accepted.size] = accepted.clip(1, MOST)
    for i in range(count):
        row, start = i if rows is None else int(rows[i]), (0 if first is None else int(first[i])) + int(taken[i]) - 1
        found = table[row, :WIDTH][start : start + columns] if row >= 0 else table[0, :0]
        want[i, : found.size] = found

    def there(array: np.ndarray | None) -> torch.Tensor | None:
        return None if array is None else torch.from_numpy(array.copy()).to(device)

    given, at, begin, counts = torch.from_numpy(table).to(device)[:, :WIDTH], there(rows), there(first), there(accepted)
    whole = torch.full((count, columns + 2 * case.strided), -5, dtype=torch.int32, device=device)
    kept = None if counts is None else torch.full((len(counts) + 1,), -5, dtype=torch.int32, device=device)
    sources = [there(each) for each in lists]
    copies = [
        (each, torch.zeros(len(each) + 1, dtype=each.dtype, device=device)) for each in sources if each is not None
    ]
    with unchanged(given, at, begin, counts, *sources):
        pairs = [(source, target[: len(source)]) for source, target in copies]
        cells = whole[:, :columns]
        kernel.run(given, at, begin, cells, PAD, counts, MOST, None if kept is None else kept[:-1], pairs)
    wrong = int((whole[:, :columns].cpu().numpy() != want).sum())
    require(not wrong, f"{wrong} of {want.size} cells are wrong")
    require(bool((whole[:, columns:] == -5).all()), "what lies between the rows of cells was written")
    if kept is not None and accepted is not None:
        right = [*taken[: accepted.size].tolist(), -5]
        require(kept.tolist() == right, "a count of accepted tokens is wrong")
    for source, target in copies:
        whole_list = torch.cat([source, torch.zeros(1, dtype=source.dtype, device=device)])
        require(torch.equal(target, whole_list), f"a copied list of {source.dtype} is wrong")


def rows_of(random: np.random.Generator, count: int) -> np.ndarray:
    """As many truths."""
    return random.random(count) < 0.5
