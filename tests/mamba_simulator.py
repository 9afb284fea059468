"""An engine of recurrent states with no model: a rolling hash of a sequence's tokens plays its state.

Requests are admitted onto cached prefixes, read their prompts in chunks, decode with drafts of which some are accepted,
and are preempted and resumed; forks share prefixes. Plans and copies are carried out on pools of hashes, slot by slot,
by the rules that kernels follow, and every read, every write and every checkpoint is checked.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from portable.batch import Batch
from portable.layer import Layer
from portable.mamba import Mode, plan_mamba
from portable.mamba_copies import Moves, RunningStates, plan_state_copies
from portable.order import order

NULL = 0  # the slot behind columns without a state
PRIME = (1 << 31) - 1
START = 12345


def absorb(state: int, token: int) -> int:
    return (state * 48271 + token + 1) % PRIME


def state_of(tokens: list[int]) -> int:
    state = START
    for token in tokens:
        state = absorb(state, token)
    return state


class Request:
    def __init__(self, tokens: list[int], goal: int) -> None:
        self.tokens, self.prompt, self.goal = tokens, len(tokens), goal
        self.computed, self.row = 0, -1


class Group:
    """A pool of states, the slots of each request in it, and the checkpoints of prefixes."""

    def __init__(self, rng: np.random.Generator, mode: Mode, block: int, drafts: int, rows: int, slots: int) -> None:
        self.rng, self.mode, self.block, self.drafts = rng, mode, block, drafts
        self.pool = -rng.integers(1, PRIME, slots)  # what no sequence hashes to
        self.free = list(range(slots - 1, NULL, -1))
        self.table = np.full((rows, 200 if mode != "none" else 1 + drafts), NULL)
        self.columns = [0] * rows
        self.states = None if mode == "none" else RunningStates(rows, block_size=block, mode=mode, num_draft=drafts)
        self.accepted = np.ones(rows, np.int32)  # in the mode "none"
        self.cached: dict[tuple[int, ...], int] = {}  # prefix -> slot
        self.users: dict[int, int] = {}  # of cached slots
        self.layer = Layer.mamba2(num_heads=1, head_dim=1, state_dim=1, chunk=int(rng.choice([1, 2, 3, 4, 8])))

    def hits(self, tokens: list[int]) -> set[int]:
        """Lengths of proper prefixes that have a checkpoint."""
        ends = range(self.block, len(tokens), self.block) if self.mode != "none" else ()
        return {0} | {end for end in ends if tuple(tokens[:end]) in self.cached}

    def admit(self, request: Request, hit: int) -> None:
        row, self.columns[request.row] = request.row, hit // self.block
        if hit:
            slot = self.cached[tuple(request.tokens[:hit])]
            self.table[row, hit // self.block - 1] = slot
            self.users[slot] += 1
        self.accepted[row] = 1

    def need(self, row: int, seq_len: int) -> list[int]:
        """Columns without a slot that a step up to this length needs."""
        if self.mode == "none":
            return list(range(self.columns[row], 1 + self.drafts))
        return list(range(self.columns[row], -(-seq_len // self.block) + self.drafts))

    def room(self) -> int:
        return len(self.free) + sum(not users for users in self.users.values())

    def grow(self, row: int, seq_len: int) -> None:
        for column in self.need(row, seq_len):
            if not self.free:  # forget the prefix that was cached first and that nobody uses
                prefix, slot = next((p, s) for p, s in self.cached.items() if not self.users[s])
                del self.cached[prefix], self.users[slot]
                self.pool[slot] = -7
                self.free.append(slot)
            self.table[row, column] = self.free.pop()
            self.columns[row] = column + 1

    def drop(self, row: int, columns: slice) -> None:
        for slot in set(self.table[row, columns].tolist()) - {NULL}:
            if slot in self.users:
                self.users[slot] -= 1
            else:
                self.pool[slot] = -3  # the next owner must not read what was left
                self.free.append(slot)
        self.table[row, columns] = NULL

    def release(self, row: int) -> None:
        self.drop(row, slice(0, None))
        self.columns[row] = 0

    def store(self, slot: int, state: int) -> None:
        assert slot > NULL and slot not in self.users, f"slot {slot} is shared, and written"
        assert (self.table == slot).sum() == 1, f"slot {slot} belongs to several requests or none"
        self.pool[slot] = state

    def copy(self, moves: Moves) -> None:
        pairs = plan_state_copies(moves, self.table).tolist()
        for source, target in pairs:
            self.store(target, int(self.pool[source]))

    def compute(self, batch: Batch, requests: list[Request], tokens: list[list[int]]) -> None:
        rows = [request.row for request in requests]
        running = None if self.states is None else self.states.running[rows]
        accepted = self.accepted if self.states is None else self.states.accepted
        plan = plan_mamba(
            batch, self.layer, self.table[rows], mode=self.mode, block_size=self.block, num_draft=self.drafts,
            num_accepted=accepted[rows], running=running,
        )  # fmt: skip
        if (decode := plan.decode) is not None:
            for i, (slot, slots) in enumerate(
                zip(decode.initial_indices.tolist(), decode.state_indices.tolist(), strict=True)
            ):
                state = self.read(slot, requests[i])
                for j, token in enumerate(tokens[i]):
                    state = absorb(state, token)
                    self.store(slots[j], state)
                assert all(slot == -1 for slot in slots[len(tokens[i]) :])
        if (prefill := plan.prefill) is not None:
            first, edges = prefill.requests.start, list(pairwise(prefill.cu_chunks.tolist()))
            starts, initial = prefill.cu_seqlens_q.tolist(), prefill.initial_indices.tolist()
            stores = zip(edges, prefill.chunk_requests.tolist(), prefill.chunk_state_indices.tolist(), strict=True)
            state, at = START, -1
            for (a, b), row, slot in stores:
                request = requests[first + row]
                if row != at:
                    has = prefill.has_initial[row]
                    state, at = self.read(initial[row], request) if has else START, row
                    assert bool(has) == (request.computed > 0)
                for token in tokens[first + row][a - starts[row] : b - starts[row]]:
                    state = absorb(state, token)
                if slot != -1:
                    self.store(slot, state)
                if b == starts[row + 1]:
                    assert slot == prefill.state_indices[row]

    def read(self, slot: int, request: Request) -> int:
        assert self.pool[slot] == state_of(request.tokens[: request.computed]), "a request goes on from another state"
        return int(self.pool[slot])

    def publish(self, request: Request, before: int, decoded: bool) -> Iterator[int]:
        """Check every block end that has a state after a step; some become checkpoints for others."""
        if self.mode == "none":
            return
        last = request.computed // self.block
        first = before // self.block if self.mode == "all" and not decoded else max(last - 1, before // self.block)
        for column in range(first, last):
            slot, prefix = int(self.table[request.row, column]), tuple(request.tokens[: (column + 1) * self.block])
            assert self.pool[slot] == state_of(list(prefix)), "a checkpoint is not of exactly its tokens"
            yield column
            if prefix not in self.cached and self.rng.random() < 0.7:
                self.cached[prefix], self.users[slot] = slot, 1


def simulate(seed: int, steps: int = 14) -> dict[str, int]:
    """One random schedule; counts of what happened in it."""
    rng = np.random.default_rng(seed)
    rows, drafts = int(rng.integers(1, 5)), int(rng.integers(0, 4))
    mode: Mode = ("none", "align", "all", "align", "all")[seed % 5]
    blocks = [int(rng.choice([1, 2, 3, 4, 8])) for _ in range(1 + (seed % 2))]
    groups = [Group(rng, mode, block, drafts, rows, int(rng.integers(160, 240))) for block in blocks]
    free_rows, running, waiting = list(range(rows)), [], []  # type: ignore[var-annotated]
    resumed: list[int] = []
    history = [rng.integers(0, 9, 40).tolist()]
    seen = {"steps": 0, "copies": 0, "checkpoints": 0, "hits": 0, "preemptions": 0, "rejections": 0, "forks": 0}
    for _ in range(steps):
        while len(waiting) + len(running) < rows + 1:
            known = history[rng.integers(len(history))]
            prompt = known[: rng.integers(1, min(len(known), 30) + 1)] + rng.integers(0, 9, rng.integers(0, 4)).tolist()
            seen["forks"] += 1
            waiting.append(Request(prompt, len(prompt) + int(rng.integers(1, 12))))
        finished: list[int] = []
        preempted: list[int] = []
        for request in list(running):
            if len(request.tokens) >= request.goal or rng.random() < 0.06:
                running.remove(request)
                for group in groups:
                    group.release(request.row)
                free_rows.append(request.row)
                if len(request.tokens) >= request.goal:
                    finished.append(request.row)
                else:  # without a word where it is forced: the request is among the resumed ones later
                    seen["preemptions"] += 1
                    if rng.random() < 0.5:
                        preempted.append(request.row)
                    waiting.insert(0, request)
                request.row, request.computed = -1, 0
        while waiting and free_rows:
            request = waiting.pop(0)
            request.row = free_rows.pop(int(rng.integers(len(free_rows))))
            hit = max(set.intersection(*(group.hits(request.tokens) for group in groups)))
            request.computed = hit if rng.random() < 0.8 else 0
            seen["hits"] += request.computed > 0
            for group in groups:
                group.admit(request, request.computed)
            resumed.append(request.row)
            running.append(request)
        step: list[tuple[Request, list[int], int]] = []
        for request in running:
            pending = len(request.tokens) - request.computed
            guess: list[int] = []
            if pending == 1 and request.computed >= request.prompt:
                guess = rng.integers(0, 9, rng.integers(0, drafts + 1)).tolist()
            new = 0 if rng.random() < 0.1 else int(rng.integers(1, pending + 1)) if pending > 1 else 1
            length = request.computed + new + (len(guess) if new else 0)
            if not new or any(len(group.need(request.row, length)) > group.room() for group in groups):
                continue
            for group in groups:
                group.grow(request.row, length)
            ids = request.tokens[request.computed : request.computed + new] + guess
            step.append((request, ids, len(guess)))
        if not step:
            continue
        q = np.array([len(ids) for _, ids, _ in step], np.int32)
        c = np.array([request.computed for request, _, _ in step], np.int32)
        reading = np.array([request.computed + len(ids) - d < request.prompt or (not d and len(ids) > 1)
                            for request, ids, d in step])  # fmt: skip
        by = order(q, c, threshold=1 + drafts, is_prefilling=reading, short_extends_as_decodes=False)
        step, q, c, reading = [step[i] for i in by], q[by], c[by], reading[by]
        requests, tokens = [request for request, _, _ in step], [ids for _, ids, _ in step]
        which, guesses = [request.row for request in requests], np.array([d for _, _, d in step])
        batch = Batch.from_lens(q, c + q, is_prefilling=reading)
        kept = np.array([int(rng.integers(1, d + 2)) for d in guesses])
        for group in groups:
            if group.states is not None:
                group.states.forget(finished, preempted, resumed)
                moves = group.states.before(which, c, q)
                seen["copies"] += moves.rows.size
                group.copy(moves)
            group.compute(batch, requests, tokens)
            if group.states is not None:
                moves = group.states.after(which, c, q, guesses, kept)
                seen["copies"] += moves.rows.size
                group.copy(moves)
            else:
                group.accepted[which] = kept
        resumed.clear()
        for request, ids, d in step:
            count = int(kept[which.index(request.row)])
            before, decoded = request.computed, bool(d)
            if d:
                seen["rejections"] += count <= d
                request.tokens += ids[1:count]
            request.computed += len(ids) - d + count - 1
            if request.computed == len(request.tokens):
                request.tokens.append(int(rng.integers(0, 9)))
            for group in groups:
                seen["checkpoints"] += len(list(group.publish(request, before, decoded)))
            for group in groups:
                if group.states is not None:  # columns that nothing will read again
                    group.drop(
                        request.row,
                        slice(0, min(request.computed // group.block, int(group.states.running[request.row]))),
                    )
            history.append(request.tokens[:40])
        seen["steps"] += 1
    return seen
