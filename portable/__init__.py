"""Attention for LLM inference, the same call on every vendor's GPU and on a CPU.

layer = portable.Layer.gqa(num_heads=32, num_kv_heads=8, head_dim=128)
attn = portable.Attention(layer, page_size=16)
plan = attn.plan(portable.Batch.from_lens(...))
attn.write(k, v, cache, plan)
out = attn.run(q, cache, plan, k=k, v=v).out
"""

from portable.attention import Attention, available_kernels
from portable.batch import Batch
from portable.cache import allocate_cache
from portable.copies import copy_pages
from portable.kernel import KV, AttnOut, Kernel, KernelCaps, Needs, Op
from portable.layer import Layer, LayerTensors, UnsupportedError
from portable.merge import merge_states
from portable.order import Split
from portable.platform.detect import describe, detect
from portable.platform.target import Target
from portable.select import Choice, select

__version__ = "0.1.0"

__all__ = [
    "KV",
    "Attention",
    "AttnOut",
    "Batch",
    "Choice",
    "Kernel",
    "KernelCaps",
    "Layer",
    "LayerTensors",
    "Needs",
    "Op",
    "Split",
    "Target",
    "UnsupportedError",
    "allocate_cache",
    "available_kernels",
    "copy_pages",
    "describe",
    "detect",
    "merge_states",
    "select",
]
