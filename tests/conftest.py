"""What every test runs under: uninitialised memory that cannot pass for data, fixed seeds, a guard against syncs."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import hypothesis
import pytest
import torch

hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, max_examples=50)
hypothesis.settings.load_profile("ci")

# Each waits for the device, or would on a GPU; `.numpy()` does not on the CPU tensors that hold host twins.
SYNCS = ("item", "tolist", "cpu", "nonzero", "__bool__", "__int__", "__float__", "__index__")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("device"):
                item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture(autouse=True)
def poison() -> Iterator[None]:
    """Fills what torch.empty and its kin return: floats (fp8 too) with NaN, integers with their maximum."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session")
def no_sync() -> Callable[[], AbstractContextManager[None]]:
    """`with no_sync():` makes whatever moves a tensor's value to the host an error, on CPU tensors too."""

    @contextmanager
    def guard() -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            for name in SYNCS:

                def refuse(*args: object, name: str = name, **kwargs: object) -> None:
                    raise AssertionError(f"Tensor.{name} waits for the device where nothing may")

                patch.setattr(torch.Tensor, name, refuse)
            yield

    return guard


@pytest.fixture
def unpinned(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Uploads without a pinned allocator, and what was asked of it; the meta device stands for one that is far."""
    upload, asked = importlib.import_module("portable.upload"), []
    stage = upload.stage

    def without(arrays: object, *, pin_memory: bool) -> object:
        asked.append(pin_memory)
        return stage(arrays, pin_memory=False)

    monkeypatch.setattr(upload, "stage", without)
    return asked
