"""Attention for LLM inference, the same call on every vendor's GPU and on a CPU.

layer = portable.Layer.gqa(num_heads=32, num_kv_heads=8, head_dim=128)
attn = portable.Attention(layer, page_size=16)
plan = attn.plan(portable.Batch.from_lens(...))
attn.write(k, v, cache, plan)
out = attn.run(q, cache, plan, k=k, v=v).out
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from portable import merge, variants
from portable.arguments import named
from portable.attention import Attention, available_kernels
from portable.batch import Batch
from portable.block_table import BlockTable
from portable.cache import StatePools, allocate_cache, allocate_states
from portable.copies import copy_pages
from portable.kernel import KV, AttnOut, Kernel, KernelCaps, Needs, Op
from portable.layer import Layer, LayerTensors, UnsupportedError
from portable.order import Split
from portable.platform.detect import describe, detect
from portable.platform.target import Target
from portable.select import Choice, select
from portable.sizes import Size

if TYPE_CHECKING:
    from portable.graphs import Graphs
    from portable.mamba_copies import RunningStates, plan_state_copies
    from portable.mamba_run import Mamba
    from portable.mla_attention import MlaAttention
    from portable.mla_weights import MlaWeights
    from portable.states import SsmTensors

__version__ = "0.1.0"

merge_states = named(merge.merge_states)  # a kernel by itself, whose source is what was proved

__all__ = [
    "KV",
    "Attention",
    "AttnOut",
    "Batch",
    "BlockTable",
    "Choice",
    "Graphs",
    "Kernel",
    "KernelCaps",
    "Layer",
    "LayerTensors",
    "Mamba",
    "MlaAttention",
    "MlaWeights",
    "Needs",
    "Op",
    "RunningStates",
    "Size",
    "Split",
    "SsmTensors",
    "StatePools",
    "Target",
    "UnsupportedError",
    "allocate_cache",
    "allocate_states",
    "available_kernels",
    "copy_pages",
    "describe",
    "detect",
    "merge_states",
    "plan_state_copies",
    "select",
    "variants",
]

_LATER = {  # imported at their first use
    "Graphs": "graphs",
    "Mamba": "mamba_run",
    "MlaAttention": "mla_attention",
    "MlaWeights": "mla_weights",
    "RunningStates": "mamba_copies",
    "SsmTensors": "states",
    "plan_state_copies": "mamba_copies",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'portable' has no attribute {name!r}")
    return getattr(import_module(f"portable.{_LATER[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
