"""`portable new-vendor`: what it writes, and the page about it followed word by word in a fresh environment."""

import re
import sys
from pathlib import Path

import pytest
from test_packaging import ROOT, SITE_PACKAGES, build, copy_tree, run

from portable import cli, detect
from portable.new_vendor import package
from portable.new_vendor.kernels import KERNELS

HEADING = "## Add a vendor in an afternoon\n"


def commands():
    """The lines of the page's first block of code."""
    pages = (path.read_text(encoding="utf-8") for path in (ROOT / "README.md", *sorted((ROOT / "ci").glob("*.md"))))
    text = next(page.partition(HEADING)[2] for page in pages if HEADING in page)
    block = re.search(r"(?:^    .*\n)+", text, re.MULTILINE)[0]
    return [line.strip() for line in block.splitlines()]


@pytest.mark.packaging
def test_the_page_works_line_by_line_in_a_fresh_environment(tmp_path):
    """Without a network: the wheel is put where pip would put it, torch and pytest are those of this environment."""
    tree, folder = tmp_path / "tree", tmp_path / "afternoon"
    copy_tree(tree, symlinks=True)
    wheel = build("wheel", tree, tmp_path / "dist")
    made, *rest = commands()
    assert made.startswith("python -m venv afternoon") and "portable new-vendor acme" in " ".join(rest)
    (tmp_path / "base.pth").write_text("\n".join(SITE_PACKAGES) + "\n")
    script = [
        "set -ex",
        made,
        "python -m pip uninstall -q -y setuptools || true",  # Python 3.11's venv has one that is too old
        f"python -m pip install -q --no-deps --ignore-installed {wheel}",
        "cp base.pth afternoon/lib/python3*/site-packages/",
        *(line.replace("CHECKOUT", str(wheel)) for line in rest),
    ]
    (tmp_path / "page.sh").write_text("\n".join(script) + "\n")
    offline = dict(PIP_NO_INDEX="1", PIP_NO_BUILD_ISOLATION="0", PIP_DISABLE_PIP_VERSION_CHECK="1", PIP_NO_COMPILE="1")
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    here = {"PORTABLE_CACHE_DIR": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    out = run("bash", "page.sh", cwd=tmp_path, PATH=path, **offline, **here)
    assert re.search(r"yes +portable.platforms +acme +portable-acme 0.1.0 +loaded", out)
    assert re.search(r"yes +portable.kernels +acme +portable-acme 0.1.0 +loaded", out)
    assert re.search(r"yes +paged +acme.paged", out)
    assert re.search(r" 0 failed;.*\d+ passed in ", out, re.DOTALL)
    assert re.search(r"paged.*acme\.paged", out[out.rindex(" passed") :])
    inner = "import portable; print(portable.__file__)"
    assert run(folder / "bin/python", "-c", inner, cwd=tmp_path).startswith(str(folder))


def test_every_file_is_of_the_vendor_that_was_named():
    files = package("zeta")
    assert {"pyproject.toml", "portable_zeta/devices.py", "portable_zeta/kernels.py", "tests/test_zeta.py"} < set(files)
    assert not any("acme" in (path + text).lower() for path, text in files.items())
    for path, text in files.items():
        if path.endswith(".py"):
            compile(text, path, "exec")


@pytest.mark.parametrize("name", ["Zeta", "2nd", "a-b", "class", "cpu", "cuda", "rocm", "hip", "torch", "../x", ""])
def test_a_name_that_cannot_be_used_is_refused(name, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["new-vendor", name]) == 2
    assert f"name is {name!r}" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_folder_is_never_written_over(tmp_path, capsys):
    assert cli.main(["new-vendor", "zeta", "--into", str(tmp_path)]) == 0
    before = {path: path.read_text() for path in tmp_path.rglob("*.*") if path.is_file()}
    assert cli.main(["new-vendor", "zeta", "--into", str(tmp_path)]) == 2
    assert "is not empty" in capsys.readouterr().err
    assert before == {path: path.read_text() for path in tmp_path.rglob("*.*") if path.is_file()}


def test_its_kernel_keeps_the_contract():
    from portable.conformance import cells, contract

    cases = list(cells.cases(KERNELS[0], detect("cpu")))
    assert len(cases) > 20
    for case in cases:
        contract.check(KERNELS[0], case, "cpu")
