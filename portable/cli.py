"""The command line: each command is a module with `add_arguments(parser)` and `run(args) -> exit code`."""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

COMMANDS = {  # command -> (module, what it does); a module is imported only for its own command
    "doctor": ("portable.doctor", "what this machine has, and what of it can be used"),
    "explain": ("portable.explain_cli", "which kernel serves each operation of a layer, and why"),
    "generate": ("portable.generate_cli", "generate text with a local model"),
    "bench": ("portable.bench", "measure kernels and generation"),
    "conformance": ("portable.conformance.command", "prove every kernel of a device, feature by feature"),
    "matrix": ("portable.matrix", "the lanes of CI: workflows from them, and one report of their results"),
    "new-vendor": ("portable.new_vendor", "write a package that adds a vendor's devices and kernels"),
}
LOG_LEVELS = ("debug", "info", "warning", "error")
USER_ERROR, INTERRUPTED, PIPE_CLOSED = 2, 130, 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.

    What the user can mend is one line on stderr and exit code 2; `PORTABLE_LOG=debug` adds the traceback.

    >>> main(["--version"])
    portable ...
    0
    """
    try:
        return _run(list(sys.argv[1:] if argv is None else argv))
    except KeyboardInterrupt:
        print("portable: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader, `head` say, has left; the interpreter's own flush must not fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    except (ValueError, OSError, ImportError) as error:
        if os.environ.get("PORTABLE_LOG", "").lower() == "debug":
            traceback.print_exc()
        print(f"portable: error: {error or type(error).__name__}", file=sys.stderr)
        return USER_ERROR


def show(text: str) -> None:
    """Print a report: with colours on a terminal when rich is installed, as it is elsewhere."""
    if sys.stdout.isatty():
        try:
            console = importlib.import_module("rich.console").Console(highlight=False, soft_wrap=True)
            styled = importlib.import_module("rich.text").Text(text)
        except ImportError:
            pass
        else:
            styled.highlight_regex(r"(?m)^\S[^:\n]*:", "bold cyan")
            styled.highlight_regex(r"(?m)^ +(not|no)\b.*$", "dim")
            styled.highlight_regex(r"(?m)^ +(yes)\b", "green")
            console.print(styled)
            return
    print(text)


class _Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are ValueErrors, so that they are reported like every other."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message} (see {self.prog} --help)")


def _set_log_level(level: str) -> None:
    if level not in LOG_LEVELS:
        raise ValueError(f"PORTABLE_LOG is {level!r}; it must be one of {', '.join(LOG_LEVELS)}")
    logging.basicConfig(format="%(name)s: %(message)s")
    logging.getLogger("portable").setLevel(level.upper())


def _run(argv: list[str]) -> int:
    _set_log_level(os.environ.get("PORTABLE_LOG", "").lower() or "warning")
    chosen = next((word for word in argv if not word.startswith("-")), None)
    parser = _Parser(prog="portable", description="One attention core for LLM inference on any device.")
    parser.add_argument("--version", action="store_true", help="print the version")
    commands = parser.add_subparsers(dest="command", metavar="command")
    module = None
    for name, (path, what) in COMMANDS.items():
        command = commands.add_parser(name, help=what, description=f"{what[0].upper()}{what[1:]}.", allow_abbrev=False)
        if name == chosen:
            try:
                module = importlib.import_module(path)
            except ImportError as error:
                raise ValueError(f"command {name!r} cannot be loaded: {error}") from error
            module.add_arguments(command)
    try:
        args = parser.parse_args(argv)
    except SystemExit as done:  # --help
        return int(done.code or 0)
    if args.version:
        print(f"portable {importlib.import_module('portable').__version__}")
        return 0
    if module is None:
        parser.print_help()
        return 0
    code: int = module.run(args)
    return code
