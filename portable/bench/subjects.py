"""portable's own kernels as contestants: `prepare` once for each rotation, then `run`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from portable.batch import Batch
from portable.bench.problem import Problem, Rotation
from portable.kernel import Kernel, Needs, Op, Segment
from portable.mha import plan_segments
from portable.packages import installed
from portable.platform.detect import detect
from portable.ragged import next_power_of_2
from portable.select import select
from portable.slot import run_part

Call = Callable[[], object]


def segment(problem: Problem, kernel: Kernel, rotation: int) -> Segment:
    """The whole batch as one call, whatever its mix of phases."""
    work = problem.work
    return Segment(
        kernel=kernel,
        requests=slice(0, len(work.seq_lens)),
        tokens=slice(0, sum(work.query_lens)),
        cu_seqlens_q=problem.cu_seqlens_q,
        seq_lens=problem.seq_lens,
        block_table=problem.rotations[rotation].block_table,
        page_size=work.page_size or 1,
        causal=True,
        max_query_len=problem.max_query_len,
        max_seq_len=problem.max_seq_len,
        host_query_lens=np.array(work.query_lens, np.int32),
        host_seq_lens=np.array(work.seq_lens, np.int32),
    )


def needs_of(problem: Problem) -> Needs:
    return Needs(
        page_size=problem.work.page_size,
        query_len=next_power_of_2(problem.max_query_len),
        seq_len=next_power_of_2(problem.max_seq_len),
    )


def why_not(problem: Problem, kernel: Kernel) -> tuple[str, ...]:
    return kernel.why_not(detect(str(problem.device)), problem.work.layer, needs_of(problem))


def chosen(problem: Problem, among: Sequence[Kernel], op: Op, needs: Needs) -> Kernel:
    """The kernel that `select` takes."""
    target = detect(str(problem.device))
    have = installed(target, None)
    return select(op, target, problem.work.layer, needs, installed=have, kernels=among).kernel


def planned_calls(problem: Problem, among: Sequence[Kernel]) -> Sequence[Call]:
    """What `Attention.run` does: a call for each region of the batch, decodes and extends, all over the pages."""
    work = problem.work
    made: list[Call] = []
    for turn in problem.rotations:
        batch = Batch.from_lens(
            list(work.query_lens),
            list(work.seq_lens),
            block_table=turn.block_table,
            page_size=work.page_size or 1,
            device=problem.device,
        )
        parts = plan_segments(batch, work.layer, partial(chosen, problem, among), contiguous=False, lse=False)
        made.append(partial(run_part, batch, parts, work.layer, turn.q, turn.kv, None, problem.tensors, turn.out, None))
    return made


def calls(problem: Problem, kernel: Kernel) -> Sequence[Call]:
    """One call of `run` for each rotation; what `prepare` makes is not timed, as other kernels' metadata is not."""
    made: list[Call] = []
    for number, turn in enumerate(problem.rotations):
        part = segment(problem, kernel, number)
        if kernel.prepare is not None:
            part = replace(part, prepared=kernel.prepare(part, problem.work.layer))

        made.append(partial(_run, problem, part, turn))
    return made


def _run(problem: Problem, part: Segment, turn: Rotation) -> None:
    part.kernel.run(turn.q, turn.kv, part, problem.work.layer, problem.tensors, turn.out, None)
