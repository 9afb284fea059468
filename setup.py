"""The package map: `backends/` and `platform/` at the root ship as `portable.backends` and `portable.platform`.

It is computed from the folders and not from the symlinks in `portable/`, which an archive may lose.

With PORTABLE_OBJECTS in the environment (arguments of ci/build_objects.py; "" for all), the C++ kernels' objects for
AMD are compiled into the wheel. That takes the packages of the extra `test`, so the build is not isolated.
"""

import os
import shlex
import subprocess
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOTS = {"portable": "portable", "portable.backends": "backends", "portable.platform": "platform"}
DATA = ["py.typed", "*.html", "*.cu", "*.h", "*.hip", "*.co", "*.json", "*.toml"]

package_dir = {
    ".".join((name, *folder.relative_to(root).parts)): folder.as_posix()
    for name, root in ROOTS.items()
    # rglob enters no symlinked folder
    for folder in sorted({file.parent for glob in ("*.py", *DATA) for file in Path(root).rglob(glob)})
}


class BuildPy(build_py):  # type: ignore[misc]
    """Modules and data, then objects."""

    def run(self) -> None:
        super().run()
        if (arguments := os.environ.get("PORTABLE_OBJECTS")) is not None:
            into = Path(self.build_lib, "portable", "backends", "hip", "objects").absolute()
            command = [sys.executable, "ci/build_objects.py", "--into", str(into), *shlex.split(arguments)]
            subprocess.run(command, check=True)


setup(
    packages=list(package_dir),
    package_dir=package_dir,
    package_data={"": DATA},
    include_package_data=False,
    cmdclass={"build_py": BuildPy},
)
