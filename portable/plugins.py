"""Plug-ins: installed packages that bring devices or kernels. None of them can take away what is here without it.

A plug-in is an entry point of the group `portable.platforms` (a module that describes a vendor's devices) or
`portable.kernels` (a module with `KERNELS`). All that it does is asked for through `ask`, in a thread with a time
limit: one that raises, exits, hangs or answers nonsense is left out, once reported, and listed by `portable doctor`.
"""

from __future__ import annotations

import importlib.metadata
import io
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from typing import Any, TypeVar

log = logging.getLogger("portable")

PLATFORMS, KERNELS = GROUPS = ("portable.platforms", "portable.kernels")
VARIABLE = "PORTABLE_PLUGINS"
LIMIT = 30.0  # seconds; a vendor's library that opens its driver takes 1 to 5
Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Plugin:
    """An entry point, and what became of it.

    >>> Plugin("portable.kernels", "toy", "toy.kernels", "toy 1.0", problem="it is broken").state
    'left out'
    """

    group: str
    name: str
    value: str  # what the entry point names, "package.module"
    distribution: str | None  # the package that brings it, "toy 1.0"
    allowed: bool = True  # by PORTABLE_PLUGINS
    loaded: Any = None  # what the check of its group made of it
    problem: str | None = None

    @property
    def state(self) -> str:
        """ "loaded", "not allowed", "left out" (it failed) or "not loaded" (nothing has asked for it)."""
        if not self.allowed:
            return "not allowed"
        if self.problem is not None:
            return "left out"
        return "not loaded" if self.loaded is None else "loaded"


_known: dict[tuple[str, str, str], Plugin] = {}  # by group, name and value: the last that `load` and `blame` saw


def load(group: str, check: Callable[[str, Any], Any], environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Load the plug-ins of a group that PORTABLE_PLUGINS allows: name -> what `check(name, object)` returns.

    A plug-in that cannot be imported within `LIMIT` seconds, or on which `check` raises, is reported and left out, and
    so is one that has the name of an earlier one.
    """
    found: dict[str, Any] = {}
    for point, plugin in _listed(group, environ):
        _known[plugin.group, plugin.name, plugin.value] = plugin
        if not plugin.allowed:
            continue
        if plugin.name in found:
            blame(plugin, "another plug-in has that name")
            continue
        try:
            loaded = ask(lambda point=point: check(point.name, point.load()))
        except Exception as error:
            blame(plugin, said(error))
        else:
            found[plugin.name] = loaded
            _known[plugin.group, plugin.name, plugin.value] = replace(plugin, loaded=loaded)
    return found


def listed(group: str, environ: Mapping[str, str] | None = None) -> tuple[Plugin, ...]:
    """Every plug-in of a group that is installed, by name, with its state; nothing is loaded.

    >>> all(plugin.state == "not allowed" for plugin in listed("portable.kernels", {"PORTABLE_PLUGINS": ""}))
    True
    """
    plugins = (plugin for _, plugin in _listed(group, environ))
    return tuple(
        _known.get((plugin.group, plugin.name, plugin.value), plugin) if plugin.allowed else plugin
        for plugin in plugins
    )


def blame(plugin: Plugin, problem: str) -> None:
    """Report that a plug-in is left out, and why; the same problem once."""
    key = plugin.group, plugin.name, plugin.value
    if (known := _known.get(key)) is None or known.problem != problem:
        log.warning("plug-in %r is left out of %s: %s", plugin.name, plugin.group, printable(problem))
    _known[key] = replace(plugin, loaded=None, problem=problem)


def blame_named(group: str, name: str, error: BaseException) -> None:
    """`blame` the loaded plug-in of a name for an error that it raised later."""
    for plugin in list(_known.values()):
        if (plugin.group, plugin.name) == (group, name) and plugin.allowed:
            blame(plugin, said(error))
            return


def ask(question: Callable[..., Answer], *about: object, seconds: float | None = None) -> Answer:
    """What a plug-in answers, asked in a thread of its own; one that hangs is left behind.

    Raises what it raises (an exit as a RuntimeError), and a TimeoutError after `seconds` (None: `LIMIT`). A loop in
    compiled code that never lets other threads run cannot be ended: PORTABLE_PLUGINS leaves such a plug-in out. What it
    prints meanwhile goes into the log: stdout may be a document.

    >>> ask(max, 1, 2)
    2
    """
    answers: list[Answer] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            answers.append(question(*about))
        except BaseException as error:  # an exit, too, is the plug-in's and not the caller's
            errors.append(error)

    thread = threading.Thread(target=work, name="a question to a plug-in", daemon=True)
    seconds = LIMIT if seconds is None else seconds
    with heard():
        thread.start()
        thread.join(seconds)
    if errors:
        if isinstance(errors[0], Exception):
            raise errors[0]
        raise RuntimeError(said(errors[0])) from errors[0]
    if not answers:
        raise TimeoutError(f"no answer within {seconds:g} s")
    return answers[0]


@contextmanager
def heard() -> Iterator[None]:
    """Within the block, what is printed goes into the log.

    In the main thread alone: the thread of a question that hung would put back what it found, whenever it ends.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    printed = io.StringIO()
    try:
        with redirect_stdout(printed):
            yield
    finally:
        if text := printed.getvalue().strip():
            log.info("a plug-in printed: %s", printable(text))


def said(error: BaseException) -> str:
    """An error in one line.

    >>> said(KeyError("chip"))
    "KeyError: 'chip'"
    """
    try:
        text = " ".join(str(error).split())
    except Exception as worse:
        text = f"its message cannot be read, {type(worse).__name__}"
    return printable(f"{type(error).__name__}: {text}" if text else type(error).__name__)


def printable(text: str) -> str:
    """Text from elsewhere without what a terminal obeys.

    >>> printable("\\x1b[2Jgone"), printable("größer")
    ('\\\\x1b[2Jgone', 'größer')
    """
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def cache_clear() -> None:
    """Forget what became of every plug-in."""
    _known.clear()


def unknown(environ: Mapping[str, str]) -> list[str]:
    """Names in PORTABLE_PLUGINS that no installed plug-in has.

    >>> unknown({"PORTABLE_PLUGINS": "nosuch, "})
    ['nosuch']
    """
    known = {point.name for group in GROUPS for point in importlib.metadata.entry_points(group=group)}
    return sorted({name.strip() for name in environ.get(VARIABLE, "").split(",")} - known - {""})


def _listed(group: str, environ: Mapping[str, str] | None) -> list[tuple[importlib.metadata.EntryPoint, Plugin]]:
    setting = (os.environ if environ is None else environ).get(VARIABLE)
    names = None if setting is None else {name.strip() for name in setting.split(",")}
    points = sorted(importlib.metadata.entry_points(group=group), key=lambda point: (point.name, point.value))
    return [
        (point, Plugin(group, point.name, point.value, _brought_by(point), names is None or point.name in names))
        for point in points
    ]


def _brought_by(point: importlib.metadata.EntryPoint) -> str | None:
    distribution = getattr(point, "dist", None)
    try:
        return None if distribution is None else f"{distribution.metadata['Name']} {distribution.version}"
    except Exception:  # a distribution whose metadata are gone or broken
        return None
