"""`portable doctor`: what this machine has, what of it can be used, and why the rest cannot."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from portable import plugins
from portable.explain import spell_target
from portable.kernel import ATTENTION, Kernel
from portable.packages import Package, VendorPackage, inspect, installed, known_packages, why_closed
from portable.select import Request, Verdict, check_request, requested_from_env, why_not_here
from portable.sets import listed

if TYPE_CHECKING:
    from portable.platform.target import Target

SCHEMA = 1
VARIABLES = {
    "PORTABLE_BACKEND": "forces kernels: a provider or kernel name, or op=name,...",
    "PORTABLE_CACHE_DIR": "where converted models and compiled kernels are kept",
    "PORTABLE_DEBUG": "1: the C++ write and gather of a cache end a launch at a slot or page past its end",
    "PORTABLE_DEVICE": "the device when none is named",
    "PORTABLE_LOG": "what is reported on stderr: debug, info, warning or error",
    plugins.VARIABLE: "the plug-ins that may load; empty: none",
}


def report(environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Everything that `portable doctor` prints, as plain values: what cannot be found out is null, with the problem.

    The keys are `schema`, `problems`, `target`, `arch`, `absent`, `versions`, `packages`, `environment`, `plugins`,
    `kernels` and `cache_dir`. No device is opened where detection does not open it.
    """
    problems: dict[str, str] = {}

    def attempt(name: str, find: Callable[[], Any], default: Any = None) -> Any:
        try:
            return find()
        except Exception as error:  # one broken part must not hide the others
            problems[name] = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            return default

    target: Target | None = attempt("target", _target)
    request: Request | None = attempt("backend", partial(_request, environ))
    found = {
        "schema": SCHEMA,
        "target": None if target is None else asdict(target),
        "arch": None if target is None else attempt("arch", partial(_arch, target)),
        "absent": attempt("absent", _absent, {}),
        "versions": _versions(),
        "packages": {package.name: _package(package, target, request) for package in known_packages()},
        "environment": attempt("environment", partial(_environment, environ), {}),
        "kernels": attempt("kernels", partial(_kernels, target, request), []),
        # after the kernels, whose look-up loads plug-ins
        "plugins": {group: attempt(group, partial(_plugins, group, environ), []) for group in plugins.GROUPS},
        "cache_dir": attempt("cache_dir", _cache_dir),
    }
    if lost := plugins.unknown(environ):
        problems[plugins.VARIABLE] = f"no plug-in is named {', '.join(map(repr, lost))}"
    return {**found, "problems": problems}


def render(found: Mapping[str, Any]) -> str:
    """A report as text for people."""
    return "\n".join(_lines(found))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `portable doctor`."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print the report."""
    from portable.cli import show

    found = report()
    if args.json:
        print(json.dumps(found, indent=2, sort_keys=True))
    else:
        show(render(found))
    return 0


def _target() -> Target:
    from portable.platform.detect import detect

    return detect()


def _request(environ: Mapping[str, str]) -> Request | None:
    from portable.attention import load_kernels

    request = requested_from_env(environ)
    if request is not None:
        check_request(request, load_kernels())
    return request


def _absent() -> dict[str, str]:
    from portable.platform.detect import absent

    return absent()


def _arch(target: Target) -> dict[str, Any] | None:
    from portable.platform.detect import vendors

    facts = vendors()[target.vendor].ARCHS.get(target.arch)
    return None if facts is None else asdict(facts)


def _versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {
        "portable": importlib.import_module("portable").__version__,
        "python": platform.python_version(),
        "os": platform.platform(),
    }
    for name in ("torch", "triton", "numpy", "transformers", "rich"):
        package = installed().get(name)
        versions[name] = None if package is None else package.version
    return {**versions, "torch": importlib.import_module("torch").__version__}  # its metadata may lack the build


def _package(package: VendorPackage, target: Target | None, request: Request | None) -> dict[str, Any]:
    """Whether a package can be used; `usable` is null where it is not imported because nothing here would use it."""
    here = inspect(package)
    if here is None:
        return {"version": None, "usable": False, "problem": "it is not installed"}
    if here.version is not None and (closed := why_closed(package, target, request)):
        return {"version": here.version, "usable": None, "problem": closed}
    return {"version": here.version, "usable": here.problem is None, "problem": here.problem}


def _environment(environ: Mapping[str, str]) -> dict[str, dict[str, str | None]]:
    """The variables of portable, and the set ones of vendors: value and meaning."""
    from portable.platform.detect import vendors
    from portable.platform.visibility import VARIABLES as VISIBILITY

    meanings = dict.fromkeys(VISIBILITY, "which devices this process sees, in which order")
    for name, vendor in vendors().items():
        meanings |= dict.fromkeys(getattr(vendor, "ENVIRONMENT", ()), f"changes what {name} devices are taken for")
    for package in known_packages():
        if package.switch:
            meanings[package.switch[0]] = f"{package.switch[1]}: {package.name} does without {package.extension}"
    for name in environ:
        if name.startswith("PORTABLE_"):
            meanings[name] = "not a variable of portable; is it misspelt?"
    meanings |= VARIABLES
    return {
        name: {"value": environ.get(name), "meaning": meaning}
        for name, meaning in sorted(meanings.items())
        if name in environ or name in VARIABLES
    }


def _plugins(group: str, environ: Mapping[str, str]) -> list[dict[str, Any]]:
    names = ("name", "value", "distribution", "allowed", "state", "problem")
    return [{name: getattr(plugin, name) for name in names} for plugin in plugins.listed(group, environ)]


def _kernels(target: Target | None, request: Request | None) -> list[dict[str, Any]]:
    from portable.attention import load_kernels, verdicts_on

    if target is None:
        load_kernels()  # for what becomes of the plug-ins
        return []
    packages = installed(target, request)
    verdicts = verdicts_on(target, packages)
    return [_kernel(kernel, target, packages, verdicts) for kernel in load_kernels()]


def _kernel(kernel: Kernel, target: Target, packages: Mapping[str, Package], verdict: Verdict) -> dict[str, Any]:
    caps = kernel.caps
    reasons = why_not_here(kernel, target, packages, verdict)
    return {
        "name": kernel.name,
        "provider": caps.provider,
        "plugin": kernel.plugin,
        "op": str(caps.op),
        "usable": not reasons,
        "reasons": list(reasons),
        "dtypes": listed(caps.dtypes).removeprefix("one of "),
        "features": sorted(caps.features) if caps.op in ATTENTION else [],
        "graph": caps.graph_level.name,
    }


def _cache_dir() -> str:
    from portable.cache_dir import cache_dir

    return str(cache_dir())


def _lines(found: Mapping[str, Any]) -> Iterator[str]:
    if found["target"] is None:
        yield "device: none"
    else:
        from portable.platform.target import Target

        target, arch = Target(**found["target"]), found["arch"] or {}
        yield f"device: {spell_target(target)}"
        yield from _table(
            [
                ("torch device", target.device),
                ("built for", target.runtime or "the CPU"),
                ("family", f"{target.family}, matrix instructions {target.matrix or 'none'}"),
                ("wave", f"{target.wave_size} lanes, {target.shared_memory} bytes of shared memory"),
                ("memory", "unknown" if target.memory is None else f"{target.memory / 2**30:.1f} GiB"),
                ("graphs", "yes" if arch.get("graphs", target.graphs) else "no"),
            ]
        )
    for title, rows in (
        ("problems", found["problems"].items()),
        ("not here", found["absent"].items()),
        ("versions", ((name, version or "not installed") for name, version in found["versions"].items())),
        ("environment", _environment_rows(found["environment"])),
    ):
        yield from _titled(title, [(str(name), str(value)) for name, value in rows])
    yield from _titled("packages", [_verdict(name, found["packages"][name]) for name in sorted(found["packages"])])
    brought = [_plugin_row(group, plugin) for group, each in found["plugins"].items() for plugin in each]
    yield from _titled("plug-ins", brought)
    yield from _titled("kernels", _kernel_rows(found["kernels"]))
    yield from _titled("cache", [("folder", str(found["cache_dir"]))])


def _environment_rows(environment: Mapping[str, Mapping[str, str | None]]) -> list[tuple[str, str]]:
    return [
        (name, f"{'unset' if e['value'] is None else repr(e['value'])}: {e['meaning']}")
        for name, e in environment.items()
    ]


def _verdict(name: str, package: Mapping[str, Any]) -> tuple[str, ...]:
    mark = {True: "yes", False: "no", None: "not used"}[package["usable"]]
    return (mark, name, package["version"] or "-", package["problem"] or "")


def _plugin_row(group: str, plugin: Mapping[str, Any]) -> tuple[str, ...]:
    mark = {"loaded": "yes", "left out": "no"}.get(plugin["state"], "not used")
    why = "PORTABLE_PLUGINS leaves it out" if plugin["state"] == "not allowed" else plugin["problem"] or plugin["state"]
    said = (plugin["name"], plugin["distribution"] or plugin["value"], why)
    return (mark, group, *map(plugins.printable, said))


def _kernel_rows(kernels: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Each that can be used, then those that cannot: a row for all of a provider that have one reason."""
    rows: list[tuple[str, ...]] = []
    others: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for kernel in kernels:
        if kernel["usable"]:
            able = ", ".join((kernel["dtypes"], *kernel["features"], f"graph {kernel['graph']}"))
            rows.append(("yes", kernel["op"], kernel["name"], able))
        else:
            others.setdefault((kernel["provider"], "; ".join(kernel["reasons"])), []).append(kernel)
    for (_, reasons), (first, *more) in others.items():
        op = first["op"] if all(each["op"] == first["op"] for each in more) else "several"
        rows.append(("no", op, f"{first['name']} and {len(more)} more" if more else first["name"], reasons))
    return rows


def _titled(title: str, rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    if rows:
        yield from ("", f"{title}:")
        yield from _table(rows)


def _table(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield f"    {'  '.join(cells)}".rstrip()
