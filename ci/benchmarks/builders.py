"""The metadata builders of vLLM, as far as a CPU runs them: what an engine does where portable plans a step.

They are made without their constructors, which want a model and a GPU, and given the attributes that `build` reads. Of
vLLM's wheel, unpacked, no dependency is needed: what is not installed is a stand-in that nothing here calls.
"""

from __future__ import annotations

import importlib
import logging
import sys
import types
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import MISSING, dataclass, field
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import torch

from portable import Batch

# Of vLLM what is compiled, and what only a server needs; of others what is large, or tells which accelerator is there.
LEFT_OUT = tuple(
    f"vllm.{name}"
    for name in (
        *("_C", "_moe_C", "_rs", "vllm_flash_attn._", "distributed.kv_transfer", "entrypoints", "lora", "multimodal"),
        *("inputs", "outputs", "parser", "renderers", "reasoning", "tool_parsers", "v1.engine", "v1.metrics"),
        *("v1.request", "v1.structured_output"),
    )
)
LARGE = {
    *("transformers", "accelerate", "torchvision", "torchaudio", "PIL", "huggingface_hub", "safetensors", "tokenizers"),
    *("gguf", "pydantic", "pydantic_core"),
}
PLATFORMS = {
    *("libtpu", "tpu_info", "tpu_inference", "pynvml", "amdsmi", "intel_extension_for_pytorch", "torch_npu"),
    *("torch_mlu", "torch_musa", "torch_sdaa", "torch_xla", "habana_frameworks", "pathwaysutils"),
    *("_winapi", "msvcrt", "winreg", "nt"),
}
Builder = Callable[[Batch], Callable[[], object]]


class _Type(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=name)


class _Module(types.ModuleType):
    """A module that has every name: classes where they begin with a capital."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made: Any = MagicMock(name=name)
        if name[:1].isupper():
            body = {"__init__": lambda *a, **k: None, "__class_getitem__": classmethod(lambda cls, item: cls)}
            made = _Type(name, (), body | {"__init_subclass__": classmethod(lambda cls, **k: None)})
        setattr(self, name, made)
        return made


class _StandIns(MetaPathFinder, Loader):
    """Finds what is not installed, before anyone else looks."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        top = name.partition(".")[0]
        if top in PLATFORMS or top in sys.stdlib_module_names:
            return None
        if name.startswith(LEFT_OUT) if top == "vllm" else (top in LARGE or not _installed(top)):
            return ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        vars(module).update(__version__="0", __file__="absent")


def _installed(top: str) -> bool:
    if top in sys.modules:
        return not isinstance(sys.modules[top], _Module)
    return importlib.machinery.PathFinder.find_spec(top) is not None


def load(folder: Path | None) -> dict[str, Builder] | None:
    """Each builder by its name here: from a batch of ours to a call that builds. None where vLLM is absent.

    Args:
        folder: an unpacked wheel; None for an installed package.
    """
    if importlib.machinery.PathFinder.find_spec("vllm", None if folder is None else [str(folder)]) is None:
        return None
    if folder is not None:
        sys.path.insert(0, str(folder))
    logging.disable(logging.CRITICAL)
    importlib.import_module("torch._dynamo")  # which asks for packages that it does without where they are absent
    sys.meta_path.insert(0, _StandIns())
    _pydantic()
    cpu = importlib.import_module("vllm.platforms.cpu").CpuPlatform()
    vars(importlib.import_module("vllm.platforms")).update(_current_platform=cpu)
    layers, found = "vllm.v1.attention.backends", importlib.import_module
    mha, mamba = found(f"{layers}.flash_attn"), found(f"{layers}.mamba2_attn")
    mla, backend = found("vllm.model_executor.layers.attention.mla_attention"), found("vllm.v1.attention.backend")
    local = found(f"{layers}.utils").make_local_attention_virtual_batches
    for name, module in tuple(sys.modules.items()):
        if name.startswith("vllm") and not isinstance(module, _Module):
            vars(module).update({"PIN_MEMORY": False} if vars(module).get("PIN_MEMORY") else {})
            vars(module).update({"gpu_sync_allowed": nullcontext} if "gpu_sync_allowed" in vars(module) else {})
    ahead = torch.zeros(4 * 1024 + 1, dtype=torch.int32)
    vars(mha).update(get_scheduler_metadata=lambda **given: ahead[: 1 + (given["batch_size"] + 3) // 4 * 16])
    eager, graph = _mha(mha.FlashAttentionMetadataBuilder, False), _mha(mha.FlashAttentionMetadataBuilder, True)
    latent, state = _mla(mla), _mamba(mamba.Mamba2AttentionMetadataBuilder)

    def of(batch: Batch) -> Any:
        return _step(backend.CommonAttentionMetadata, batch)

    def built(builder: Any) -> Builder:
        def ready(batch: Batch) -> Callable[[], object]:
            step = of(batch)
            return lambda: builder.build(0, step)

        return ready

    def chunked(batch: Batch) -> Callable[[], object]:
        step = of(batch)
        return lambda: eager.build(0, _first(local(8192, step, batch.page_size)))

    builders = {"MHA decode": eager, "MHA decode for a graph": graph, "MLA decode": latent, "MLA mixed": latent}
    builders |= {"Mamba-2 decode for a graph": state, "Mamba-2 mixed": state}
    return {name: built(builder) for name, builder in builders.items()} | {"local decode": chunked}


def _first(found: Any) -> Any:
    return found[0] if isinstance(found, tuple) else found


def _pydantic() -> None:
    """Dataclasses of a stand-in for pydantic are Python's."""
    module, classes = importlib.import_module("pydantic"), importlib.import_module("pydantic.dataclasses")

    def made(cls: Any = None, *, config: Any = None, **options: Any) -> Any:
        known = {name: value for name, value in options.items() if name in ("kw_only", "frozen", "init", "repr", "eq")}
        return (lambda of: dataclass(**known)(of)) if cls is None else dataclass(**known)(cls)

    def value(default: Any = MISSING, *, default_factory: Any = MISSING, **_: Any) -> Any:
        if default_factory is not MISSING:
            return field(default_factory=default_factory)
        return None if default is MISSING else field(default=None if default is ... else default)

    def untouched(*_: Any, **__: Any) -> Any:
        return lambda function: function

    classes.dataclass, module.dataclasses, module.Field, module.ConfigDict = made, classes, value, dict  # type: ignore[attr-defined]
    for name in ("field_validator", "model_validator", "field_serializer", "model_serializer"):
        setattr(module, name, untouched)


def _step(kind: Any, batch: Batch) -> Any:
    cu = torch.from_numpy(batch.host_cu_seqlens_q.copy())
    lens = torch.from_numpy(batch.host_seq_lens.copy())
    return kind(
        query_start_loc=cu.clone(),
        query_start_loc_cpu=cu,
        seq_lens=lens,
        num_reqs=batch.num_reqs,
        num_actual_tokens=batch.num_tokens,
        max_query_len=batch.max_query_len,
        max_seq_len=batch.max_seq_len,
        block_table_tensor=batch.block_table,
        slot_mapping=batch.slot_mapping,
        is_prefilling=torch.from_numpy(np.asarray(batch.query_lens > 1)),
        seq_lens_cpu_upper_bound=lens.clone(),
    )


def _made(cls: Any, **attributes: Any) -> Any:
    builder = cls.__new__(cls)
    vars(builder).update(attributes, device=torch.device("cpu"))
    return builder


def _mha(cls: Any, graph: bool) -> Any:
    return _made(
        cls,
        aot_schedule=True,
        aot_sliding_window=(-1, -1),
        use_full_cuda_graph=graph,
        max_cudagraph_size=1024,
        max_num_splits=32 if graph else 0,
        dcp_world_size=1,
        rswa_window=None,
        persistent_rswa_prefix_lens=None,
        mm_prefix_query_ranges_np=None,
        cache_config=SimpleNamespace(cache_dtype="auto"),
        kv_cache_dtype=torch.bfloat16,
        num_heads_q=32,
        num_heads_kv=8,
        headdim=128,
        block_size=16,
        scheduler_metadata=torch.zeros(4 * 1024 + 4, dtype=torch.int32),
        vllm_config=SimpleNamespace(),
    )


def _mla(module: Any) -> Any:
    return _made(
        module.MLACommonMetadataBuilder,
        metadata_cls=module.MLACommonMetadata,
        use_pcp=False,
        reorder_batch_threshold=1,
        non_causal_multi_token_decode=False,
        dcp_world_size=1,
        dcp_local_block_size=1,
        dcp_virtual_block_size=1,
        cp_kv_cache_interleave_size=1,
        page_size=64,
        num_heads=16,
        num_q_heads=16,
        chunked_prefill_workspace_size=64 * 1024,
        chunked_prefill_workspace=torch.empty(1, 576),
        dcp_manager=None,
        q_data_type=torch.bfloat16,
        model_config=SimpleNamespace(dtype=torch.bfloat16, get_head_size=lambda: 576),
        _prefill_backend=SimpleNamespace(get_name=lambda: "FLASH_ATTN", prepare_metadata=lambda step: None),
        vllm_config=SimpleNamespace(attention_config=SimpleNamespace(trtllm_ragged_backend="")),
        is_fp8_kvcache=False,
        compilation_config=SimpleNamespace(),
    )


def _mamba(cls: Any) -> Any:
    cache = SimpleNamespace(mamba_cache_mode="none", enable_prefix_caching=False, use_replayssm=False)
    parallel = SimpleNamespace(decode_context_parallel_size=1)
    return _made(
        cls,
        chunk_size=256,
        checkpoint_builder=SimpleNamespace(build=lambda *_: None),
        reorder_batch_threshold=1,
        vllm_config=SimpleNamespace(
            cache_config=cache, speculative_config=None, parallel_config=parallel, num_hash_lookahead_tokens=0
        ),
        kv_cache_spec=SimpleNamespace(block_size=4096, num_prefill_checkpoint_blocks=0, num_speculative_blocks=0),
        speculative_config=None,
        compilation_config=SimpleNamespace(cudagraph_mode=SimpleNamespace(has_full_cudagraphs=lambda: True)),
        num_spec_tokens=0,
        use_spec_decode=False,
        use_replayssm=False,
        replayssm_buffer_len=0,
        use_flashinfer_replayssm=False,
        decode_cudagraph_max_bs=1024,
        state_indices_tensor_d=torch.empty(1024, 1, dtype=torch.int32),
        layer_names=["layer"],
    )
