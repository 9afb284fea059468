"""The package map: `backends/` and `platform/` at the root ship as `portable.backends` and `portable.platform`.

It is computed from the folders and not from the symlinks in `portable/`, which an archive may lose.
"""

from pathlib import Path

from setuptools import setup

ROOTS = {"portable": "portable", "portable.backends": "backends", "portable.platform": "platform"}
DATA = ["py.typed", "*.cu", "*.h", "*.hip", "*.co", "*.json", "*.toml"]

package_dir = {
    ".".join((name, *folder.relative_to(root).parts)): folder.as_posix()
    for name, root in ROOTS.items()
    # rglob enters no symlinked folder
    for folder in sorted({file.parent for glob in ("*.py", *DATA) for file in Path(root).rglob(glob)})
}
setup(packages=list(package_dir), package_dir=package_dir, package_data={"": DATA}, include_package_data=False)
