"""The order of a step and its regions: laws against plain loops, in every mode."""

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from portable import Batch
from portable.order import DECODE, LONG_EXTEND, PAD, PREFILL, SHORT_EXTEND, kinds, order

MODES = list(itertools.product((1, 2, 4), (False, True), (False, True)))  # threshold, uniform, short as decodes
PER_MODE = -(-1000 // len(MODES))
REGIONS = ("decodes", "short_extends", "long_extends", "prefills", "pads")

rows = st.lists(st.tuples(st.integers(0, 6), st.sampled_from([0, 0, 1, 7, 30]), st.booleans()), max_size=14)
modes = st.tuples(st.integers(1, 4), st.booleans())


def kind_of(q, context, prefilling, threshold, short_as_decodes):
    if q == 0:
        return PAD
    if context == 0:
        return PREFILL
    if q > threshold:
        return LONG_EXTEND
    return SHORT_EXTEND if prefilling and not short_as_decodes else DECODE


def kinds_of(batch_rows, threshold, uniform, short_as_decodes):
    found, length, broken = [], None, False
    for q, context, prefilling in batch_rows:
        kind = kind_of(q, context, prefilling, threshold, short_as_decodes)
        if uniform and kind == DECODE:
            length = q if length is None else length
            broken = broken or q != length
            kind = SHORT_EXTEND if broken else DECODE
        found.append(kind)
    return found


def regions_of(batch_rows, found):
    """(requests, tokens) of each region of rows whose kinds ascend."""
    counts, current = [[0, 0] for _ in REGIONS], DECODE
    last = max((i for i, (q, *_) in enumerate(batch_rows) if q), default=-1)
    for i, ((q, *_), kind) in enumerate(zip(batch_rows, found, strict=True)):
        current = PAD if i > last else current if kind == PAD else kind
        counts[current][0] += 1
        counts[current][1] += q
    return [tuple(count) for count in counts]


def columns(batch_rows):
    q, context, prefilling = zip(*batch_rows, strict=True) if batch_rows else ((), (), ())
    return np.array(q, np.int32), np.array(context, np.int32), np.array(prefilling, bool)


def batch_of(batch_rows):
    q, context, prefilling = columns(batch_rows)
    return Batch.from_lens(q, q + context, is_prefilling=prefilling)


def random_ordered_rows(rng, threshold, short_as_decodes):
    """Ordered requests, rows without tokens strewn among them, and a pad or two behind; stale flags and lengths."""
    live = [
        (int(rng.integers(1, 7)), int(rng.choice([0, 1, 9, 40])), bool(rng.integers(2)))
        for _ in range(rng.integers(0, 12))
    ]
    if rng.integers(2):  # as long as each other, as a verify step has them
        live = [(min(q, threshold), c, p) if c else (q, c, p) for q, c, p in live]
    live.sort(key=lambda row: kind_of(*row, threshold, short_as_decodes))
    for _ in range(rng.integers(0, 3)):
        live.insert(int(rng.integers(0, len(live) + 1)), (0, int(rng.integers(0, 9)), bool(rng.integers(2))))
    return live + [(0, int(rng.integers(0, 9)), True)] * int(rng.integers(0, 3))


@pytest.mark.parametrize(("threshold", "uniform", "short_as_decodes"), MODES)
def test_split_equals_the_loop_on_random_ordered_batches(threshold, uniform, short_as_decodes):
    rng = np.random.default_rng(threshold)
    for _ in range(PER_MODE):
        batch_rows = random_ordered_rows(rng, threshold, short_as_decodes)
        batch = batch_of(batch_rows)
        mode = {"uniform": uniform, "short_extends_as_decodes": short_as_decodes}
        found = kinds_of(batch_rows, threshold, uniform, short_as_decodes)
        assert batch.kinds(threshold, **mode).tolist() == found
        split = batch.split(threshold, **mode)
        assert batch.is_ordered(threshold, **mode)
        regions = [getattr(split, name) for name in REGIONS]
        assert [(r.num_reqs, r.num_tokens) for r in regions] == regions_of(batch_rows, found), batch_rows
        for this, after in itertools.pairwise(regions):
            assert this.requests.stop == after.requests.start and this.tokens.stop == after.tokens.start
        numbers = [n for r in regions for s in (r.requests, r.tokens) for n in (s.start, s.stop)]
        assert {type(n) for n in numbers} == {int}
        extends = split.extends
        assert extends.num_reqs == split.short_extends.num_reqs + split.long_extends.num_reqs
        assert extends.num_tokens == split.short_extends.num_tokens + split.long_extends.num_tokens


@given(rows, modes, st.booleans())
def test_a_batch_splits_or_says_which_request_is_out_of_place(batch_rows, mode, uniform):
    threshold, short_as_decodes = mode
    batch, mode = batch_of(batch_rows), {"uniform": uniform, "short_extends_as_decodes": short_as_decodes}
    live = [(i, k) for i, k in enumerate(kinds_of(batch_rows, threshold, uniform, short_as_decodes)) if k != PAD]
    late = [i for place, (i, k) in enumerate(live) if any(k < before for _, before in live[:place])]
    assert batch.is_ordered(threshold, **mode) is not bool(late)
    if late:
        with pytest.raises(ValueError, match=rf"not ordered: request {late[0]} \("):
            batch.split(threshold, **mode)
    else:
        batch.split(threshold, **mode)


def test_the_error_names_the_kinds():
    with pytest.raises(ValueError, match=r"request 1 \(decode\) stands behind a prefill"):
        Batch.from_lens([5, 1], [5, 33]).split()


def cycles(permutation):
    seen, count = set(), 0
    for start in range(len(permutation)):
        count += start not in seen
        while start not in seen:
            seen.add(start)
            start = permutation[start]
    return count


def ordered(batch_rows, threshold=1, short_as_decodes=True):
    q, context, prefilling = columns(batch_rows)
    return order(
        q, context, threshold=threshold, is_prefilling=prefilling, short_extends_as_decodes=short_as_decodes
    ).tolist()


@given(rows, modes)
def test_order_is_a_permutation_that_sorts_and_moves_only_what_is_misplaced(batch_rows, mode):
    permutation = ordered(batch_rows, *mode)
    found = [kind_of(*row, *mode) for row in batch_rows]
    assert sorted(permutation) == list(range(len(batch_rows)))
    assert [found[i] for i in permutation] == sorted(found)
    assert all(i == p for i, p in enumerate(permutation) if found[i] == sorted(found)[i])
    reordered = [batch_rows[i] for i in permutation]
    assert ordered(reordered, *mode) == list(range(len(batch_rows)))
    threshold, short_as_decodes = mode
    for uniform in (False, True):  # whatever `order` gives, `split` takes
        batch_of(reordered).split(threshold, uniform=uniform, short_extends_as_decodes=short_as_decodes)


@given(rows, modes)
def test_order_is_that_of_the_batch_and_changes_nothing(batch_rows, mode):
    q, context, prefilling = columns(batch_rows)
    before = q.tobytes(), context.tobytes(), prefilling.tobytes()
    order(q, context, threshold=mode[0], is_prefilling=prefilling, short_extends_as_decodes=mode[1])
    assert (q.tobytes(), context.tobytes(), prefilling.tobytes()) == before


ROW_OF = {DECODE: (1, 7, False), SHORT_EXTEND: (1, 7, True), LONG_EXTEND: (5, 7, False), PREFILL: (3, 0, True)}
ROW_OF[PAD] = (0, 4, True)


def fewest_swaps(arrangement):
    """Of every arrangement of these kinds, by breadth first search from the sorted one."""
    start = tuple(sorted(arrangement))
    distance, front = {start: 0}, [start]
    while front:
        after = []
        for state in front:
            for i, j in itertools.combinations(range(len(state)), 2):
                if state[i] != state[j]:
                    swapped = list(state)
                    swapped[i], swapped[j] = state[j], state[i]
                    if tuple(swapped) not in distance:
                        distance[tuple(swapped)] = distance[state] + 1
                        after.append(tuple(swapped))
        front = after
    return distance


@pytest.mark.parametrize(("kinds_used", "size"), [((DECODE, PREFILL), 8), (range(4), 5), (range(5), 5)])
def test_order_takes_as_few_swaps_as_a_search_finds(kinds_used, size):
    for multiset in itertools.combinations_with_replacement(kinds_used, size):
        for arrangement, fewest in fewest_swaps(multiset).items():
            permutation = ordered([ROW_OF[kind] for kind in arrangement], short_as_decodes=False)
            assert size - cycles(permutation) == fewest, arrangement


@given(st.lists(st.integers(0, 4), min_size=6, max_size=24))
def test_order_takes_as_few_swaps_as_the_most_cycles_allow(arrangement):
    """Larger mixes than a search reaches: the fewest swaps are the moved requests less the most disjoint cycles."""
    wants = Counter((a, b) for a, b in zip(sorted(arrangement), arrangement, strict=True) if a != b)
    rings = [ring for n in range(2, 6) for ring in itertools.permutations(range(5), n) if ring[0] == min(ring)]
    most = {frozenset(): 0}

    def search(left):
        key = frozenset(left.items())
        if key not in most:
            edge = next(iter(sorted(left)))
            most[key] = 0
            for ring in rings:
                edges = list(zip(ring, ring[1:] + ring[:1], strict=True))
                if edge in edges and all(left[e] for e in edges):
                    most[key] = max(most[key], 1 + search(+(left - Counter(edges))))
        return most[key]

    permutation = ordered([ROW_OF[kind] for kind in arrangement], short_as_decodes=False)
    moved = sum(wants.values())
    assert moved - (cycles(permutation) - (len(arrangement) - moved)) == moved - search(wants)


@pytest.mark.parametrize(
    ("query_lens", "contexts", "threshold", "uniform", "expected"),
    [
        ([1, 1, 7, 0, 0], [3, 4, 0, 0, 0], 1, False, {"decodes": (2, 2), "prefills": (1, 7), "pads": (2, 0)}),
        ([1, 0, 5, 3], [3, 4, 0, 0], 1, False, {"decodes": (2, 1), "prefills": (2, 8)}),
        ([0, 0, 0], [0, 0, 0], 1, False, {"pads": (3, 0)}),
        ([4, 4, 0], [9, 9, 0], 4, True, {"decodes": (2, 8), "pads": (1, 0)}),
        ([2, 2, 2, 0], [0, 0, 0, 0], 1, False, {"prefills": (3, 6), "pads": (1, 0)}),
        ([1, 0], [8, 0], 1, False, {"decodes": (1, 1), "pads": (1, 0)}),
        ([2, 2, 1, 5], [4, 4, 4, 4], 2, True, {"decodes": (2, 4), "short_extends": (1, 1), "long_extends": (1, 5)}),
        ([2, 2, 0], [4, 4, 0], 2, True, {"decodes": (2, 4), "pads": (1, 0)}),
        ([2, 1, 2], [4, 4, 4], 2, True, {"decodes": (1, 2), "short_extends": (2, 3)}),
        ([2, 1, 2], [4, 4, 4], 2, False, {"decodes": (3, 5)}),
        ([1, 5, 2], [4, 4, 0], 1, False, {"decodes": (1, 1), "long_extends": (1, 5), "prefills": (1, 2)}),
        ([], [], 1, False, {}),
    ],
)
def test_rows_without_tokens_and_uniform_steps(query_lens, contexts, threshold, uniform, expected):
    seq_lens = [q + c for q, c in zip(query_lens, contexts, strict=True)]
    split = Batch.from_lens(query_lens, seq_lens).split(threshold, uniform=uniform)
    found = {name: (r.num_reqs, r.num_tokens) for name in REGIONS if (r := getattr(split, name)).num_reqs}
    assert found == expected


def test_a_decode_kernel_gets_the_padding_where_nothing_lies_between():
    def padded(query_lens, seq_lens, threshold=1):
        return Batch.from_lens(query_lens, seq_lens).split(threshold).padded_decodes

    assert padded([4, 4, 0], [13, 13, 0], 4) == slice(0, 3)
    assert padded([1, 7, 0], [9, 7, 0]) == slice(0, 1)
    assert padded([0, 0], [0, 0]) == slice(0, 2)


def test_padding_is_padding_whatever_a_finished_request_left_in_its_row():
    computed, prompt, query_lens = np.array([9, 20, 3, 0]), np.array([5, 8, 100, 7]), np.array([1, 1, 0, 0])
    batch = Batch.from_lens(query_lens, computed + query_lens, is_prefilling=computed < prompt)
    split = batch.split(short_extends_as_decodes=False)
    assert (split.decodes.num_reqs, split.prefills.num_reqs, split.pads.num_reqs) == (2, 0, 2)
    assert split.padded_decodes == slice(0, 4)


@pytest.mark.parametrize("threshold", [1, 2, 8])
@pytest.mark.parametrize("short_as_decodes", [False, True])
def test_a_first_chunk_is_never_a_decode(threshold, short_as_decodes):
    query_lens, contexts = np.array([1, 1, 2]), np.array([0, 4, 0])
    kind = kinds(query_lens, contexts, threshold=threshold, short_extends_as_decodes=short_as_decodes)
    assert kind.tolist() == [PREFILL, DECODE, PREFILL]


def test_short_extends_are_told_apart_only_where_asked_and_known():
    batch = Batch.from_lens([1, 1, 3], [5, 9, 9], is_prefilling=[False, True, True])
    assert batch.split(2).decodes.num_reqs == 2
    apart = batch.split(2, short_extends_as_decodes=False)
    assert (apart.decodes.num_reqs, apart.short_extends.num_reqs, apart.long_extends.num_reqs) == (1, 1, 1)
    unknown = Batch.from_lens([1, 1], [5, 9]).split(short_extends_as_decodes=False)
    assert unknown.decodes.num_reqs == 2


@pytest.mark.parametrize("threshold", [0, -1])
def test_a_threshold_below_one_is_refused(threshold):
    with pytest.raises(ValueError, match=f"threshold is {threshold}; .* at least 1"):
        Batch.from_lens([1], [1]).split(threshold)
