"""What the plan of a step that is padded to a size tells about it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from portable.batch import Batch
from portable.kernel import GraphLevel, Kernel
from portable.lengths import counted
from portable.sizes import Size


class Padded(NamedTuple):
    """What a plan knows beside the padded step."""

    step: Batch  # as it was given
    size: Size
    baked: Mapping[str, int]


class Planned:
    """The facts that plans of every kind have."""

    __slots__ = ()

    def __repr__(self) -> str:
        own: Any = self
        padded = self._padded
        step: Batch = padded.step if padded else own.batch
        words = [counted(step.num_reqs, step.num_tokens), f"page {step.page_size}"]
        words += [f"{len(own.parts)} parts"] if len(own.parts) > 1 else []
        words += [f"padded to {padded.size}"] if padded else []
        return f"{type(self).__name__}({', '.join(words)})"

    @property
    def size(self) -> Size | None:
        """What the step was padded to."""
        padded = self._padded
        return padded.size if padded else None

    @property
    def baked(self) -> Mapping[str, int]:
        """Numbers of the host that a graph captured with this plan freezes: the most that a step of the size has."""
        padded = self._padded
        return padded.baked if padded else {}

    @property
    def num_tokens(self) -> int:
        """Tokens of the step that are not padding."""
        own: Any = self
        padded = self._padded
        return padded.step.num_tokens if padded else own.batch.num_tokens

    @property
    def level(self) -> GraphLevel:
        """The least that its kernels declare: what may be captured."""
        own: Any = self
        kernels: tuple[Kernel, ...] = own.kernels
        return min((kernel.caps.graph_level for kernel in kernels), default=GraphLevel.ALWAYS)

    @property
    def _padded(self) -> Padded | None:
        found: Padded | None = getattr(self, "padded", None)
        return found
