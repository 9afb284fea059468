"""What the engine of `portable generate` makes once for a model: the pages of its layers, and MLA's weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from portable.cache import allocate_cache, token_bytes
from portable.generate_states import FAMILIES as RECURRENT
from portable.kernel import KV
from portable.layer import Layer
from portable.mla_weights import MlaWeights


def up_projections(model: Any, layers: Sequence[Layer]) -> dict[int, MlaWeights]:
    """The up-projection of each MLA layer, by its index."""
    return {
        module.layer_idx: MlaWeights.from_kv_b_proj(module.kv_b_proj, layers[module.layer_idx])
        for module in model.modules()
        if hasattr(module, "kv_b_proj") and layers[module.layer_idx].family == "mla"
    }


def allocate_caches(layers: Sequence[Layer], num_pages: int, page_size: int, device: torch.device | str) -> list[KV]:
    """The pages of each layer, or a ValueError that says how much they would take."""
    try:
        return [
            KV(torch.empty(0), None)  # its states are kept elsewhere
            if layer.family in RECURRENT
            else allocate_cache(layer, num_pages, page_size, device)
            for layer in layers
        ]
    except (MemoryError, RuntimeError) as error:
        bytes_each = sum(map(token_bytes, layers))
        raise ValueError(
            f"num_pages {num_pages} of page_size {page_size} take {num_pages * page_size * bytes_each >> 30} GiB, "
            f"which {device} does not have; ask for fewer or smaller pages"
        ) from error
