"""The tensors of a workload: those of `portable bench`."""

from portable.bench.problem import Pool, Problem, Rotation, build, rotations

__all__ = ["Pool", "Problem", "Rotation", "build", "rotations"]
