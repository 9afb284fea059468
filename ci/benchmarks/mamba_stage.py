"""mamba_ssm's Triton kernels out of PyPI's source archive, pinned: python ci/benchmarks/mamba_stage.py DIR

The package imports its CUDA extension; the files of `FILES` are pure Python. einops, which they import, comes along.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

NAME, VERSION = "mamba_ssm", "2.3.2.post1"
SHA256 = "104cc47e9101e5401a675fa2b784f2952b9b037f3b1dd83b5ac544394e95d028"
FILES = (
    *(
        f"mamba_ssm/ops/triton/{name}.py"
        for name in (
            "k_activations",
            "layernorm_gated",
            "selective_state_update",
            "softplus",
            "ssd_bmm",
            "ssd_chunk_scan",
            "ssd_chunk_state",
            "ssd_combined",
            "ssd_state_passing",
        )
    ),
    "mamba_ssm/utils/determinism.py",
    "mamba_ssm/utils/torch.py",
)


def stage(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        download = [sys.executable, "-m", "pip", "--quiet", "download", "--no-deps", "--dest", temporary]
        source = ["--no-binary=:all:", "--no-build-isolation", f"{NAME}=={VERSION}"]
        subprocess.run([*download, *source], check=True, env={**os.environ, "MAMBA_SKIP_CUDA_BUILD": "TRUE"})
        subprocess.run([*download, "--only-binary=:all:", "einops"], check=True)
        path = Path(temporary) / f"{NAME}-{VERSION}.tar.gz"
        if (digest := hashlib.sha256(path.read_bytes()).hexdigest()) != SHA256:
            raise ValueError(f"{path.name} has sha256 {digest}; {SHA256} is pinned")
        with tarfile.open(path) as archive:
            for file in FILES:
                member = archive.extractfile(f"{NAME}-{VERSION}/{file}")
                assert member is not None, file
                (folder / file).parent.mkdir(parents=True, exist_ok=True)
                (folder / file).write_bytes(member.read())
        for part in ("", "ops", "ops/triton", "utils"):
            (folder / NAME / part / "__init__.py").touch()
        with zipfile.ZipFile(next(Path(temporary).glob("einops-*.whl"))) as wheel:
            wheel.extractall(folder)


if __name__ == "__main__":
    stage(Path(sys.argv[1]))
