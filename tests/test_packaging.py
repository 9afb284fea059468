"""The checkout, the wheel and the sdist hold the same modules, wherever they are imported from."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("portable", "backends", "platform")
TOP_LEVEL = {*FOLDERS, "tests", "ci"}
SITE_PACKAGES = [path for path in sys.path if path.endswith("-packages")]


def run(*command, cwd, **env):
    """What a command printed; its output is the failure's message."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | env
    done = subprocess.run(list(map(str, command)), cwd=cwd, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def source_files():
    """Every file of the library as the wheel must hold it: portable/mha.py, portable/backends/reference.py, ..."""
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                file = path.relative_to(ROOT).as_posix()
                yield file if folder == "portable" else f"portable/{file}"


def modules(files):
    names = (
        file.removesuffix(".py").replace("/", ".").removesuffix(".__init__") for file in files if file.endswith(".py")
    )
    return sorted(name for name in names if not name.endswith(".__main__"))


def copy_tree(target, symlinks):
    """The tree as an archive of it unpacks: with its symlinks, or without."""

    def left_out(folder, names):
        lost = [name for name in names if not symlinks and Path(folder, name).is_symlink()]
        return [
            *lost,
            "__pycache__",
            ".venv",
            ".git",
            "build",
            "dist",
            *(n for n in names if n.endswith(("_cache", ".egg-info"))),
        ]

    shutil.copytree(ROOT, target, symlinks=True, ignore=left_out)
    assert (target / "portable" / "backends").is_symlink() == symlinks


def build(kind, tree, into):
    run(sys.executable, "-m", "build", "--no-isolation", f"--{kind}", "--outdir", into, tree, cwd=into.parent)
    (made,) = into.iterdir()
    return made


@pytest.fixture(scope="module", params=["checkout", "symlinks lost", "sdist"])
def wheel(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("dist")
    tree = folder / "tree"
    copy_tree(tree, symlinks=request.param != "symlinks lost")
    if request.param == "sdist":
        archive = build("sdist", tree, folder / "sdist")
        run("tar", "xzf", archive, cwd=folder / "sdist")
        (tree,) = (path for path in (folder / "sdist").iterdir() if path.is_dir())
    return build("wheel", tree, folder / "wheel")


@pytest.mark.packaging
def test_the_wheel_holds_every_file_once_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert sorted(name for name in names if ".dist-info/" not in name) == sorted(source_files())
    assert any(name.endswith("licenses/LICENSE") for name in names)


IMPORT_ALL = """
import importlib, sys
target, count = sys.argv[1], int(sys.argv[2])
names = sys.argv[3 : 3 + count]
sys.path[:0] = [target]
sys.path += sys.argv[3 + count :]
for name in names:
    file = importlib.import_module(name).__file__
    assert file is None or file.startswith(target), (name, file)
import platform, uuid
assert platform.system() and not hasattr(platform, "__path__")
print(len(names))
"""


@pytest.mark.packaging
def test_every_module_imports_from_another_folder(wheel, tmp_path):
    """-I -S: an environment with nothing but the wheel and, after it, the folder that torch is in."""
    installed, elsewhere = tmp_path / "installed", tmp_path / "elsewhere"
    elsewhere.mkdir()
    run(sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", installed, wheel, cwd=elsewhere)
    names = modules(source_files())
    command = (sys.executable, "-I", "-S", "-c", IMPORT_ALL, installed, len(names), *names, *SITE_PACKAGES)
    assert int(run(*command, cwd=elsewhere)) == len(names)


@pytest.mark.packaging
def test_doctests_are_collected_under_the_names_that_users_import():
    listing = run(
        sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "portable", cwd=ROOT
    )
    names = [line.partition("::")[2] for line in listing.splitlines() if "::" in line]
    assert {name.split(".")[1] for name in names} >= {"kernel", "backends", "platform"}
    assert all(name.startswith("portable.") for name in names)


def test_the_standard_library_keeps_its_platform_module():
    run(sys.executable, "-c", "import platform, uuid; assert platform.system() and uuid.uuid4()", cwd=ROOT)


def test_the_top_level_is_the_agreed_one():
    made = ("__pycache__", "build", "dist")
    folders = {path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")}
    assert {name for name in folders if name not in made and not name.endswith(".egg-info")} == TOP_LEVEL
    assert not (ROOT / "platform" / "__init__.py").exists()
    for name in ("backends", "platform"):
        assert os.readlink(ROOT / "portable" / name) == f"../{name}"


IMPORT_PORTABLE = """
import sys, time
import torch
already, start = set(sys.modules), time.perf_counter()
import portable
took = time.perf_counter() - start
vendors = "flash_attn flash_attn_interface aiter flashinfer vllm transformers triton amdsmi pynvml".split()
loaded = (sys.modules.keys() - already) & set(vendors)
assert not loaded, loaded
assert not torch.cuda.is_initialized()
print(took)
"""


def test_import_is_quick_and_touches_no_vendor_and_no_device():
    """With bytecode, as an installed package has it: the first turn writes what is missing."""
    took: list[float] = []
    while len(took) < 10 and min(took, default=1) >= 0.3:  # seconds beyond torch; the least, since noise only adds
        took.append(float(run(sys.executable, "-c", IMPORT_PORTABLE, cwd=ROOT, PYTHONDONTWRITEBYTECODE="")))
    assert min(took) < 0.3, took


LOADED = """
import logging, sys
sys.path.insert(0, sys.argv[1])
from portable.backends.hip import runtime, sources
logging.basicConfig(stream=sys.stdout, format="%(message)s")
runtime.library = lambda name: sys.exit(f"it would load {name}")
print(sources.code("merge", ("ELEMENT=bf16",), "amd", "gfx942")[:4])
def away(name): raise RuntimeError(f"{name} is away")
runtime.library = away
try:
    sources.code("merge", ("ELEMENT=bf16",), "amd", "gfx950")
except RuntimeError as error:
    print(error)
"""


@pytest.mark.packaging
def test_objects_that_a_release_compiled_are_in_its_wheel_and_loaded_first(tmp_path):
    pytest.importorskip("ziglang")
    copy_tree(tmp_path / "tree", symlinks=True)
    given = {"PORTABLE_OBJECTS": "--arch gfx942 --only merge"}
    run(
        *(sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", tmp_path / "wheel", "."),
        cwd=tmp_path / "tree",
        **given,
    )
    assert not (tmp_path / "tree" / "backends" / "hip" / "objects").exists()
    (wheel,) = (tmp_path / "wheel").iterdir()
    run(sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", tmp_path / "site", wheel, cwd=tmp_path)
    first, label, away = run(sys.executable, "-c", LOADED, tmp_path / "site", cwd=tmp_path).splitlines()
    assert first == r"b'\x7fELF'" and away == "libhiprtc.so is away"
    assert label.startswith("no object of merge for gfx950") and "hipRTC compiles it, which is unverified" in label
