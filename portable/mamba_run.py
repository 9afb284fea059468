"""`Mamba`: recurrent-state layers, planned once a step, then run with tensors only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import numpy.typing as npt
import torch

from portable import ops
from portable.arguments import at_least, checked, named
from portable.attention import Kernels
from portable.batch import Batch
from portable.cache import StatePools
from portable.kernel import Needs, Op
from portable.layer import Layer, check_family
from portable.lengths import as_array
from portable.mamba import MambaPlan, Mode
from portable.mamba_copies import Pairs
from portable.mamba_memory import StateMemory
from portable.mamba_places import Table
from portable.mamba_slot import MambaSlot
from portable.platform.detect import detect
from portable.ragged import cu_from_lens
from portable.select import Choice, requested_by
from portable.sizes import Size
from portable.states import SsmTensors
from portable.upload import upload

if TYPE_CHECKING:
    from portable.explain import Explanation


class Mamba:
    """All the Mamba-1 or Mamba-2 layers of a model that share one `Layer`.

    Args:
        layer: what the layers have in common, by `Layer.mamba1` or `Layer.mamba2`.
        device: a torch device or its name, or None for the best of this machine (`PORTABLE_DEVICE`).
        mode, block_size: what the columns of the tables of state slots are: see `portable.mamba`.
        num_draft: tokens to verify per request at most.
        max_reqs, max_tokens: the largest step that will be planned.
        backend: a provider or kernel name to use, or "op=name,..."; None for `PORTABLE_BACKEND` or the best.

    Raises:
        UnsupportedError: no kernel serves this layer on this device; the message lists every reason.

    >>> from portable import allocate_states
    >>> layer = Layer.mamba2(num_heads=2, head_dim=4, state_dim=8, dtype=torch.float32)
    >>> mamba, pools = Mamba(layer, device="cpu"), allocate_states(layer, num_slots=4, device="cpu")
    >>> plan = mamba.plan(Batch.from_lens([5], [5]), [[3]])
    >>> xbc = mamba.conv(torch.randn(5, layer.conv_channels), pools.conv, plan, torch.randn(layer.conv_channels, 4))
    >>> x, b, c = xbc.split([8, 8, 8], -1)
    >>> tensors = SsmTensors(-torch.rand(2), dt_bias=torch.zeros(2))
    >>> out = mamba.run(x.view(5, 2, 4), torch.randn(5, 2), b.view(5, 1, 8), c.view(5, 1, 8), pools.ssm, plan, tensors)
    >>> out.shape, pools.ssm.flatten(1).any(1).tolist()
    (torch.Size([5, 2, 4]), [False, False, False, True])
    """

    @checked
    def __init__(
        self,
        layer: Layer,
        *,
        device: torch.device | str | None = None,
        mode: Mode = "none",
        block_size: int | None = None,
        num_draft: int = 0,
        max_reqs: int = 256,
        max_tokens: int = 8192,
        backend: str | None = None,
    ) -> None:
        check_family(layer, "Mamba")
        if mode not in get_args(Mode):
            raise ValueError(f"mode is {mode!r}; it must be one of {', '.join(map(repr, get_args(Mode)))}")
        at_least(1, max_reqs=max_reqs, max_tokens=max_tokens)
        at_least(0, num_draft=num_draft)
        if mode != "none" or block_size is not None:
            at_least(1, block_size=block_size or 0)
        self.layer, self.mode, self.block_size, self.num_draft = layer, mode, block_size, num_draft
        self.max_reqs, self.max_tokens = max_reqs, max_tokens
        self.target = detect(device)
        self.device = torch.device(self.target.device)
        self._kernels = Kernels(self.target, layer, requested_by(backend))
        self._slots: dict[int, MambaSlot] = {}
        usual = {"conv1d": Op.CONV1D, "decode": Op.STATE_UPDATE, "prefill": Op.SSD, "copy": Op.STATE_COPY}
        self.choices: Mapping[str, Choice] = {name: self._kernels.choice(op, Needs()) for name, op in usual.items()}

    def __repr__(self) -> str:
        return f"Mamba({self.layer.brief}, {self.device})"

    def explain(self) -> Explanation:
        """Every choice with its reasons; print it."""
        return self._kernels.explain()

    @checked
    def warmup(
        self, *, tensors: SsmTensors | None = None, gated: bool | None = None, bias: bool | None = None,
        conv_dtype: torch.dtype | None = None,
    ) -> int:  # fmt: skip
        """Compile all that steps of this object's limits launch, and load it for the life of the process.

        A graph can be captured afterwards: what is cold then is a RuntimeError.

        Args:
            tensors: the like of those to come; None: A, D and a bias of dt, in float32.
            gated, bias: whether `run` will be given z, and `conv` a bias; None: either way.
            conv_dtype: of the pool of inputs; None: the layer's.

        Returns:
            The number of kernels that were compiled, or read from disk.

        >>> Mamba(Layer.mamba2(num_heads=2), device="cpu").warmup()  # nothing is compiled there
        0
        """
        from portable import mamba_warmup

        given: Any = mamba_warmup.example(self.layer) if tensors is None else tensors
        return self._kernels.warm(
            mamba_warmup.needs(),
            mamba_warmup.steps(self.max_reqs, self.max_tokens, self.num_draft),
            (mamba_warmup.pages(self.layer, conv_dtype or self.layer.dtype),),
            given,
            (False,),
            mamba_warmup.launches(
                self.num_draft, *((True, False) if each is None else (each,) for each in (gated, bias))
            ),
        )

    @named
    def plan(
        self,
        batch: Batch,
        table: Table | Sequence[Sequence[int]] | None = None,
        *,
        num_accepted: npt.ArrayLike | torch.Tensor | None = None,
        running: npt.ArrayLike | None = None,
        checkpoints: npt.ArrayLike | None = None,
        pad_to: int | Size | None = None,
        slot: int = 0,
    ) -> MambaPlan:
        """Host work for one step, shared by all layers: see `plan_mamba`. It lives until the next one on its slot.

        Args:
            pad_to: what a step of decodes is padded to for a graph, see `Attention.plan`; an int is so many requests
                of up to 1 + num_draft new tokens. The batch may be on the host.

        Raises:
            ValueError: what `plan_mamba` refuses; a step that is larger than this object was made for, on another
                device, or padded with prefills in it.
        """
        if batch.num_reqs > self.max_reqs or batch.num_tokens > self.max_tokens:
            reqs, tokens = ("requests", batch.num_reqs, self.max_reqs), ("tokens", batch.num_tokens, self.max_tokens)
            name, value, limit = reqs if batch.num_reqs > self.max_reqs else tokens
            raise ValueError(f"the batch has {value} {name}, above the {limit} that this Mamba was made for")
        if batch.device != self.device and (pad_to is None or batch.device.type != "cpu"):
            raise ValueError(f"the batch is on {batch.device}; this Mamba runs on {self.device}")
        options = {
            "mode": self.mode,
            "block_size": self.block_size,
            "num_draft": self.num_draft,
            "num_accepted": num_accepted,
            "running": running,
            "checkpoints": checkpoints,
        }
        found = as_array("table", table) if isinstance(table, Sequence) else table
        if pad_to is None:
            return self._slot(slot).renew(batch, found, **options)
        queries = 1 + self.num_draft
        if not isinstance(pad_to, Size):
            pad_to = _size(pad_to, queries)
        pad_to.check_within("Mamba", self.max_reqs, self.max_tokens)
        with ops.on_device(self.device):
            return self._slot(slot).renew_padded(batch, pad_to, found, **options)

    @named
    def with_group(self, plan: MambaPlan, table: Table, *, slot: int) -> MambaPlan:
        """The step of a plan on the states of another group with the same block size, as the plan of another slot."""
        self._check_current(plan)
        if plan is self._slot(slot).plan:
            raise ValueError(f"slot {slot} holds the plan itself; give the other group a slot of its own")
        source = next(each for each in self._slots.values() if each.plan is plan)
        return self._slot(slot).adopt(source, table)

    @named
    def conv(
        self,
        x: torch.Tensor,
        pool: torch.Tensor,
        plan: MambaPlan,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        silu: bool = True,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The causal convolution of one layer, from the inputs that the pool kept, and keep the last ones.

        Args:
            x: [T, C] the new tokens' inputs, packed in batch order: x alone, or x, B and C side by side in Mamba-2.
            pool: [slots, W - 1, C], written in place.
            weight, bias: [C, W] and [C].
            silu: of the result.
            out: [T, C] to write into.
        """
        self._check_current(plan)
        out = x.new_empty(x.shape) if out is None else out
        ops.state_conv(x, weight, bias, pool, out, silu, plan.handle)
        return out

    @named
    def run(
        self,
        x: torch.Tensor,
        dt: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor,
        pool: torch.Tensor,
        plan: MambaPlan,
        tensors: SsmTensors,
        *,
        z: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """One layer: the new tokens through their requests' states, for the step that `plan` holds.

        Args:
            x: [T, H, P], packed in batch order; P is 1 in Mamba-1, with a head per channel.
            dt: [T, H], before its bias and softplus.
            b, c: [T, G, N].
            pool: [slots, H, P, N], written in place.
            tensors: A, D, the bias of dt and its limits.
            z: [T, H, P]; the result is multiplied with silu(z).
            out: [T, H, P] to write into.
        """
        self._check_current(plan)
        out = x.new_empty(x.shape) if out is None else out
        a, d, dt_bias, softplus, (least, most) = tensors
        ops.state_scan(x, dt, b, c, z, pool, a, d, dt_bias, softplus, least, most, out, plan.handle)
        return out

    @named
    def copy(self, *groups: tuple[Sequence[StatePools], Pairs]) -> None:
        """The pairs of `plan_state_copies` of some groups of states, each in all its pools, by one launch if any.

        Groups may be of other layers, with types, tables and block sizes of their own. What follows one step and what
        goes before the next may be one list of pairs: they are copied in its order.

        Raises:
            ValueError: a pool that is on another device or has no such slot.

        >>> from portable import allocate_states
        >>> layer = Layer.mamba2(num_heads=2, head_dim=4, state_dim=8)
        >>> mamba, one, two = Mamba(layer, device="cpu"), *(allocate_states(layer, 4, "cpu") for _ in range(2))
        >>> one.ssm[3], two.ssm[0] = 3, 5
        >>> mamba.copy(([one], np.array([[3, 1]])), ([two], np.array([[0, 1], [1, 2]])))
        >>> one.ssm[:, 0, 0, 0].tolist(), two.ssm[:, 0, 0, 0].tolist()
        ([0.0, 3.0, 0.0, 3.0], [5.0, 5.0, 5.0, 0.0])
        """
        lists, pools = [], []
        for layers, pairs in groups:
            lists.append(np.asarray(pairs, np.int64).reshape(-1, 2))
            pools.append([pool for pair in layers for pool in pair])
            most = int(lists[-1].max(initial=-1))
            for pool in pools[-1]:
                if pool.device != self.device:
                    raise ValueError(f"a pool is on {pool.device}; this Mamba runs on {self.device}")
                if most >= pool.shape[0]:
                    raise ValueError(f"a pool has {pool.shape[0]} slots; its group copies slot {most}")
        cu_copies = cu_from_lens(np.array([len(each) for each in lists], np.int32))
        if cu_copies[-1]:
            copies = upload((np.concatenate(lists), cu_copies), self.device)
            self.choices["copy"].kernel.run(pools, *copies)

    def workspace_bytes(self) -> int:
        """Bytes of the device that padded plans hold, beside the states.

        >>> mamba = Mamba(Layer.mamba2(num_heads=2), device="cpu")
        >>> plan = mamba.plan(Batch.from_lens([1], [5]), [[0]])
        >>> mamba.workspace_bytes()  # it was not padded
        0
        """
        return sum(slot.nbytes for slot in self._slots.values())

    def _slot(self, slot: int) -> MambaSlot:
        if slot not in self._slots:
            at_least(0, slot=slot)
            self._slots[slot] = MambaSlot(self.layer, self._kernels, self._memory)
        return self._slots[slot]

    def _memory(self) -> StateMemory:
        return StateMemory(self.device, self.max_reqs, self.max_tokens, 1 + self.num_draft, self._collect)

    def _collect(self, *arguments: Any) -> None:
        self._kernels(Op.COLLECT, Needs()).run(*arguments)

    def _check_current(self, plan: MambaPlan) -> None:
        if torch.compiler.is_compiling():
            return
        if not any(slot.plan is plan for slot in self._slots.values()):
            raise ValueError("plan is stale or another object's: a plan lives until the next plan() on its slot")


@cache
def _size(reqs: int, queries: int) -> Size:
    """Of so many requests with up to so many new tokens."""
    at_least(1, pad_to=reqs)
    return Size(reqs, queries, reqs * queries if queries > 1 else None)
