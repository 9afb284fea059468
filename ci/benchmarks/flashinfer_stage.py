"""FlashInfer's MLA decode for Hopper, compiled where it is staged: its wheel has sources, a card's machine no network.

One module of the "fa3" backend, in each measured row the faster of the two: from the wheel's sources with its flags, by
nvcc of PyPI's wheels, which needs a C++ compiler and no GPU. It takes 2 minutes, once for these pins and flags, and is
260 KB. tvm-ffi loads it: FlashInfer's Python is 94 MB, and writes sources into a cache before it loads a module.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import tempfile
import zipfile
from pathlib import Path

from benchmarks.stage import FLASHINFER, LIBRARIES, TVM_FFI, Wheel, download, matching, put

SIGNATURE = "flashinfer_mla/batch_mla_sm90_binding.cu"  # staged: what the calls are held against
DATA, CUDA = "flashinfer/data", "nvidia/cu13"
SOURCES = tuple(f"{DATA}/csrc/batch_mla_sm90_{part}.cu" for part in ("plan", "run", "binding"))
HEADERS = (
    *(f"{DATA}/{part}" for part in ("cccl/cub", "cccl/libcudacxx/include", "cccl/thrust")),
    *(f"{DATA}/{part}" for part in ("include", "cutlass/include")),
)
TVM_HEADERS = ("tvm_ffi/include", "tvm_ffi/3rdparty/dlpack/include")
PYTHON = Wheel(
    "0.1.15.post2",
    "059eed9bfc94bcd41650fb8eefde74040a1bc7e7b1a6f0a8ff897b02b118875b",
    "manylinux_2_28_x86_64",
    ("tvm_ffi/*.py", *TVM_FFI),
)
INPUTS = {
    "flashinfer-python": Wheel(
        "0.7.2.post1",
        "bfdc18b9e1e4d8d0730fe4343dc0e284cd0c160086de80f99888bc4867922d49",
        "any",
        (
            *SOURCES,
            *(f"{DATA}/csrc/{name}" for name in ("batch_mla_config.jinja", "tvm_ffi_utils.h")),
            *(f"{part}/*" for part in HEADERS),
        ),
    ),
    "apache-tvm-ffi": PYTHON._replace(files=tuple(f"{part}/*" for part in TVM_HEADERS)),
    "nvidia-cuda-nvcc": Wheel(
        "13.0.88",
        "56fe502eb77625a12f25172caa3cdddb4e4c8ba2c8c17dba44b164761b380f03",
        "manylinux2014_x86_64",
        (f"{CUDA}/*",),
    ),
    "nvidia-nvvm": Wheel(
        "13.0.88",
        "c5f41ffeb6466944a026dfa5317d7d85355c119bbec279205d22f1869d1054e0",
        "manylinux2010_x86_64",
        (f"{CUDA}/nvvm/*",),
    ),
    "nvidia-cuda-crt": Wheel(
        "13.0.88",
        "2c8043c7c9e02492716426e9919fc78d2c5b3b2a7a768a88e952676b08aa55a4",
        "manylinux2014_x86_64",
        (f"{CUDA}/*",),
    ),
    "nvidia-cuda-runtime": Wheel(
        "13.0.96",
        "7f82250d7782aa23b6cfe765ecc7db554bd3c2870c43f3d1821f1d18aebf0548",
        "manylinux2014_x86_64",
        (f"{CUDA}/*",),
    ),
}
CONFIG = {
    **dict.fromkeys(("dtype_q", "dtype_kv", "dtype_o"), "nv_bfloat16"),
    "dtype_idx": "int32_t",
    "head_dim_ckv": "512",
    "head_dim_kpe": "64",
}
FLAGS = (
    *("-w", "-shared", "-std=c++17", "-O3", "-use_fast_math", "-gencode=arch=compute_90a,code=sm_90a", "-DNDEBUG"),
    *("--expt-relaxed-constexpr", "-static-global-template-stub=false", "-Xcompiler=-fPIC"),
    *("-Xfatbin=-compress-all", "--compress-mode=size", "-DCUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED"),
    *(f"-DFLASHINFER_ENABLE_{name}" for name in ("F16", "BF16", "FP8_E4M3", "FP8_E5M2", "FP8_E8M0", "FP4_E2M1")),
    *("--cudart=none", "--cudadevrt=none", "-Xlinker=-l:libcudart.so.13"),  # PyTorch has loaded it
)


def stage(folder: Path, wheels: Path) -> str:
    """Put the module and tvm-ffi into a folder of staged peers; says what is there now."""
    pins = {name: {"version": wheel.version, "sha256": wheel.sha256} for name, wheel in INPUTS.items()}
    build = hashlib.sha256(json.dumps([pins, SOURCES, HEADERS, CONFIG, FLAGS]).encode()).hexdigest()
    record, site = folder / "flashinfer.json", folder / "site"
    said = f"flashinfer-python {INPUTS['flashinfer-python'].version}"
    if record.exists() and json.loads(record.read_text(encoding="utf-8"))["build"] == build:
        return said
    for old in (record, folder / LIBRARIES[FLASHINFER], site / FLASHINFER):
        old.unlink(missing_ok=True)
    try:
        with tempfile.TemporaryDirectory() as temporary:
            library = compiled(Path(temporary), wheels)
            put(folder, site, FLASHINFER, library.read_bytes())
            put(folder, site, SIGNATURE, (Path(temporary) / SOURCES[-1]).read_bytes())
        with zipfile.ZipFile(download("apache-tvm-ffi", PYTHON, wheels)) as archive:
            for file in matching(archive, PYTHON.files):
                put(folder, site, file, archive.read(file))
    except (OSError, subprocess.CalledProcessError) as error:
        return f"no flashinfer: {str(error)[:200]}"
    record.write_text(json.dumps({"build": build, **pins}, indent=2) + "\n", encoding="utf-8")
    return said


def compiled(work: Path, wheels: Path) -> Path:
    """The library, by a compiler that is unpacked beside the sources."""
    for name, wheel in INPUTS.items():
        with zipfile.ZipFile(download(name, wheel, wheels)) as archive:
            archive.extractall(work, matching(archive, wheel.files))
    for program in (*(work / CUDA / "bin").iterdir(), work / CUDA / "nvvm/bin/cicc"):
        program.chmod(0o755)  # what a zip does not say
    config = (work / DATA / "csrc/batch_mla_config.jinja").read_text(encoding="utf-8")
    config = re.sub(r"{{ (\w+) }}", lambda found: CONFIG[found[1]], config)
    (work / DATA / "csrc/batch_mla_sm90_config.inc").write_text(config, encoding="utf-8")
    include = [f"-I{part}" for part in (*HEADERS, f"{DATA}/csrc", *TVM_HEADERS)]
    command = [f"{CUDA}/bin/nvcc", *FLAGS, f"-L{CUDA}/lib", *include, *SOURCES, "-o", "mla.so"]
    subprocess.run(command, cwd=work, check=True)
    return work / "mla.so"
