"""Peers out of PyPI's wheels, by name, version and hash, into a folder that a machine without a network can take along.

FA3 and FlashMLA (a library each, 11 and 2 MB packed) with the functions that call them, and the Triton kernels of vLLM
and aiter as files. Their packages import half of an engine; `STAND_INS` are what those few files need of it.
FlashInfer's MLA decode is compiled here (`flashinfer_stage`), and left out with a message where it cannot be.
`python ci/benchmarks/stage.py FOLDER` unpacks the libraries on the other machine: with FOLDER/site on the path, the
package that portable's adapters look for is there.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import lzma
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple


class Wheel(NamedTuple):
    """A distribution, pinned, and the files of its wheel that are wanted, as patterns."""

    version: str
    sha256: str
    platform: str
    files: tuple[str, ...]


FA3 = "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so"
FLASH_MLA = "vllm/_flashmla_C.abi3.so"
FLASHINFER = "flashinfer_mla/sm90.so"
TVM_FFI = (
    "tvm_ffi/core.cpython-312-x86_64-linux-gnu.so",
    "tvm_ffi/lib/libtvm_ffi.so",
    "tvm_ffi/lib/libtvm_ffi_testing.so",
)
LIBRARIES = {FA3: "fa3.so.xz", FLASH_MLA: "flashmla.so.xz", FLASHINFER: "flashinfer.so.xz"} | {
    file: f"{Path(file).stem}.so.xz" for file in TVM_FFI
}
VLLM_OPS = "vllm/v1/attention/ops"
AITER = "aiter/ops/triton"
MHA = (
    "mha",
    "mha_fused_bwd",
    "mha_onekernel_bwd",
    *(f"_triton_kernels/{name}" for name in ("mha", "mha_fused_bwd", "mha_onekernel_bwd")),
    *(f"utils/{name}" for name in ("core", "logger", "_triton/mha_kernel_utils", "_triton/pid_preprocessing")),
)
WHEELS = {
    "vllm": Wheel(
        "0.33.0",
        "4b6bdec4ab269990bf70d45a3c1e94c3760a27064513760193b26d6f0da883aa",
        "manylinux_2_28_x86_64",
        (
            FA3,
            FLASH_MLA,
            "vllm-0.33.0.dist-info/METADATA",
            "vllm/vllm_flash_attn/__init__.py",
            "vllm/vllm_flash_attn/flash_attn_interface.py",
            "vllm/third_party/flashmla/flash_mla_interface.py",
            *(
                f"{VLLM_OPS}/triton_{name}.py"
                for name in (
                    "unified_attention",
                    "attention_helpers",
                    "decode_attention",
                    "merge_attn_states",
                    "reshape_and_cache_flash",
                )
            ),
        ),
    ),
    "amd-aiter": Wheel(
        "0.1.7.post2.dev18",
        "fe139d74438217c35e87e3b961166bac8db2d381eadccb371da2e63615f05a31",
        "any",
        (
            f"{AITER}/unified_attention.py",
            f"{AITER}/_triton_kernels/unified_attention.py",
            f"{AITER}/utils/types.py",
            f"{AITER}/utils/device_info.py",
            f"{AITER}/configs/MI350X-MHA-DEFAULT.json",
            *(f"{AITER}/{name}.py" for name in MHA),
        ),
    ),
}
AMD_OPTION = re.compile(r"""\n\s*["'](?:waves_per_eu|matrix_instr_nonkdim|kpack)["']: *\d+,""")  # unknown elsewhere

STAND_INS = {
    "vllm/envs.py": "VLLM_BATCH_INVARIANT = False\n",
    "vllm/logger.py": "import logging\n\n\ndef init_logger(name):\n    return logging.getLogger(name)\n",
    "vllm/triton_utils/__init__.py": "import triton\nimport triton.language as tl\n\nHAS_TRITON = True\n",
    "vllm/v1/kv_cache_interface.py": """from enum import IntEnum


class KVQuantMode(IntEnum):
    NONE = 0
    FP8_PER_TENSOR = 1
    INT8_PER_TOKEN_HEAD = 2
    FP8_PER_TOKEN_HEAD = 3
    INT4_PER_TOKEN_HEAD = 4


def is_quantized_kv_cache(name):
    return name.startswith("fp8")
""",
    "vllm/model_executor/layers/quantization/utils/quant_utils.py": """import torch

FP8_DTYPE = torch.float8_e4m3fn


def get_fp8_min_max():
    return -448.0, 448.0
""",
    "vllm/platforms/__init__.py": """import torch


class Hopper:
    def __getattr__(self, name):
        return lambda *args: name in ("is_cuda", "is_cuda_alike", "has_device_capability")

    def fp8_dtype(self):
        return torch.float8_e4m3fn

    def is_device_capability_family(self, number):
        return int(number) // 10 == 9

    def num_compute_units(self, index=0):
        return torch.cuda.get_device_properties(0).multi_processor_count


current_platform = Hopper()
""",
    f"{AITER}/utils/_triton/arch_info.py": """def get_arch():
    return 'gfx950'  # whose fp8 is Hopper's, e4m3fn


def get_device():
    return 'MI350X'
""",
    f"{AITER}/_triton_kernels/flash_attn_triton_amd/__init__.py": "flash_attn_2 = None  # not asked for\n",
}


def stage(folder: Path, wheels: Path | None = None) -> None:
    """Fill `folder` with the packed libraries, `site/` and `manifest.json`; `wheels` keeps the downloads."""
    from benchmarks import flashinfer_stage  # not where folders are unpacked: this file is alone there

    site = folder / "site"
    manifest = {}
    with tempfile.TemporaryDirectory() as temporary:
        wheels = wheels or Path(temporary)
        for name, wheel in WHEELS.items():
            with zipfile.ZipFile(download(name, wheel, wheels)) as archive:
                for file in matching(archive, wheel.files):
                    put(folder, site, file, archive.read(file))
            manifest[name] = {"version": wheel.version, "sha256": wheel.sha256}
        flashinfer = flashinfer_stage.stage(folder, wheels)
    for file, text in STAND_INS.items():
        put(folder, site, file, text.encode())
    for part in [path for path in site.rglob("*") if path.is_dir() and "-" not in path.name]:
        (part / "__init__.py").touch()
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    staged = [*(f"{name} {wheel.version}" for name, wheel in WHEELS.items()), flashinfer]
    print(f"{folder}: {size / 2**20:.1f} MiB, {', '.join(staged)}")


def unpacked(folder: Path) -> Path:
    """`site/` of a staged folder, with the libraries in their packages, unpacked once."""
    if not (folder / "manifest.json").exists():
        raise FileNotFoundError(f"{folder} is no folder that python ci/bench.py attention --stage filled")
    for file, name in LIBRARIES.items():
        library = folder / "site" / file
        if not library.exists() and (folder / name).exists():
            library.parent.mkdir(parents=True, exist_ok=True)
            part = library.with_suffix(f".{os.getpid()}.part")  # parts of ci/card unpack at once
            part.write_bytes(lzma.decompress((folder / name).read_bytes()))
            part.rename(library)
    return folder / "site"


def download(name: str, wheel: Wheel, into: Path) -> Path:
    """The wheel, by pip, which checks its hash."""
    into.mkdir(parents=True, exist_ok=True)
    pattern = f"{name.replace('-', '_')}-{wheel.version}-*.whl"
    if not (found := list(into.glob(pattern))):
        wanted = into / f"{name}.txt"
        wanted.write_text(f"{name}=={wheel.version} --hash=sha256:{wheel.sha256}\n", encoding="utf-8")
        where = ["--python-version", "3.12", "--platform", wheel.platform, "--dest", str(into)]
        command = ["download", "--no-deps", "--only-binary=:all:", "--require-hashes", *where, "-r", str(wanted)]
        subprocess.run([sys.executable, "-m", "pip", "--quiet", *command], check=True)
        found = list(into.glob(pattern))
    digest = hashlib.sha256(found[0].read_bytes()).hexdigest()
    if digest != wheel.sha256:
        raise ValueError(f"{found[0].name} has sha256 {digest}; {wheel.sha256} is pinned")
    return found[0]


def matching(archive: zipfile.ZipFile, patterns: Sequence[str]) -> list[str]:
    """Its files of these names; each pattern has some."""
    names = [name for name in archive.namelist() if not name.endswith("/")]
    found = {pattern: fnmatch.filter(names, pattern) for pattern in patterns}
    if missing := [pattern for pattern, files in found.items() if not files]:
        raise ValueError(f"{archive.filename} has no {', '.join(missing)}")
    return [file for files in found.values() for file in files]


def put(folder: Path, site: Path, file: str, content: bytes) -> None:
    """A file of a wheel, where the run looks for it; a library is packed, 172 MB to 11 MB."""
    target = site / file
    if file in LIBRARIES:
        target.unlink(missing_ok=True)  # of an earlier version
        target, content = folder / LIBRARIES[file], lzma.compress(content, preset=6)
    elif file.startswith(AITER):
        content = AMD_OPTION.sub("", content.decode()).encode()
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(content)


if __name__ == "__main__":
    try:
        print(unpacked(Path(sys.argv[1])))
    except OSError as error:
        sys.exit(str(error))
