"""The kit in a package's own tests: `pytest --conformance acme.paged`, or the fixture `conformance`.

Installed as the plug-in `portable-conformance` of pytest. The flag adds a test for each kernel that the name stands for
(a kernel or a provider; "all": what the device offers), on `--conformance-device`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

HELP = "test a kernel or provider with the conformance kit of portable; all: every one that the device offers"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("portable", "conformance of kernels")
    group.addoption("--conformance", action="append", default=[], metavar="NAME", help=HELP)
    group.addoption("--conformance-device", metavar="DEVICE", help="a device, or emulated:ARCH (default: the best)")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """The tests of the flag, behind the package's own."""
    names, device = config.getoption("--conformance"), config.getoption("--conformance-device")
    if names:
        items += list(KernelTests.from_parent(session, name="conformance", names=names, device=device).collect())


class KernelTests(pytest.Collector):
    """A test for each kernel."""

    def __init__(self, *, names: Sequence[str], device: str | None, **more: Any) -> None:
        super().__init__(**more)
        self.names, self.device = names, device

    def collect(self) -> Iterator[pytest.Item]:
        from portable.conformance.command import offered
        from portable.platform.detect import detect

        chosen = None if "all" in self.names else self.names
        try:
            kernels, _ = offered(detect(self.device), chosen)
        except ValueError as error:
            raise pytest.UsageError(str(error)) from error
        for kernel in kernels:
            yield KernelTest.from_parent(self, name=kernel.name, kernel=kernel.name, device=self.device)


class KernelTest(pytest.Item):
    """Every cell of one kernel."""

    def __init__(self, *, kernel: str, device: str | None, **more: Any) -> None:
        super().__init__(**more)
        self.kernel, self.device = kernel, device

    def runtest(self) -> None:
        prove(self.kernel, self.device)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        return str(excinfo.value) if isinstance(excinfo.value, AssertionError) else super().repr_failure(excinfo)

    def reportinfo(self) -> tuple[Any, int | None, str]:
        return self.path, None, f"conformance of {self.kernel}"


@pytest.fixture
def conformance() -> Callable[..., dict[str, Any]]:
    """`conformance("acme.paged", device="cpu")` runs the kit on a kernel, fails with what is wrong, or returns the
    report."""
    return prove


def prove(name: str, device: str | None = None, mode: str = "quick") -> dict[str, Any]:
    """The report of a kernel or provider; an AssertionError with the failures where there are any.

    Raises:
        ValueError: no kernel has the name, or it cannot run on the device.
    """
    from portable.conformance import report
    from portable.conformance.command import conform, offered
    from portable.platform.detect import detect

    target = detect(device)
    kernels, not_offered = offered(target, [name])
    found = conform(kernels, target, mode, not_offered)
    if found["counts"]["failed"] or not found["complete"]:
        raise AssertionError(report.text(found))
    return found
