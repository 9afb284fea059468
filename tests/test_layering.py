"""The import contract of ci/layering.py: the tree keeps it, and each way of breaking it is caught."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def layering(root):
    done = subprocess.run(
        [sys.executable, ROOT / "ci" / "layering.py", root], capture_output=True, text=True, timeout=60
    )
    assert not done.stderr
    return done.returncode, done.stdout.splitlines()


def write(root, file, text):
    path = root / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_the_tree_keeps_the_contract():
    assert layering(ROOT) == (0, ["layering: no violations"])


BROKEN = {
    "upwards": ("portable/ragged.py", "from portable.batch import Batch"),
    "upwards, inside a function": ("portable/ragged.py", "def f():\n    import portable.batch"),
    "upwards, for types only": ("portable/ragged.py", "if TYPE_CHECKING:\n    from portable import batch"),
    "upwards, relative": ("portable/ragged.py", "from . import batch"),
    "upwards, relative from a module": ("portable/ragged.py", "from .batch import Batch"),
    "the whole package": ("portable/kernel.py", "import portable"),
    "platform to select": ("platform/amd.py", "from portable.select import select"),
    "kernel to detection": ("portable/kernel.py", "from portable.platform.detect import detect"),
    "core to a free module": ("portable/attention.py", "from portable.cli import main"),
    "backend to a planner": ("backends/triton/paged.py", "from portable.mha import MhaPlan"),
    "backend to a planner, relative": ("backends/triton/paged.py", "from ...mha import MhaPlan"),
    "backends from elsewhere": ("portable/cli.py", "def f():\n    from portable.backends import reference"),
    "backends by name": ("portable/select.py", "importlib.import_module('portable.backends.reference')"),
    "backends by a made name": ("portable/select.py", "import_module(f'portable.backends.{name}')"),
    "backends not lazily": ("portable/attention.py", "import portable.backends.reference"),
    "vendor library at the top": ("backends/flash_attn.py", "import flash_attn"),
    "vendor library in a class body": ("backends/flash_attn.py", "class A:\n    from flash_attn import f"),
    "vendor library in another's backend": ("backends/flash_attn.py", "def f():\n    import aiter"),
    "vendor library in the core": ("portable/mha.py", "def f():\n    from flash_attn.interface import g"),
    "triton in the core": ("portable/merge.py", "def f():\n    import triton"),
    "transformers in the core": ("portable/attention.py", "def f():\n    import transformers"),
    "transformers not lazily": ("portable/generate.py", "from transformers import AutoModel"),
    "vendor word in code": ("portable/mha.py", "def f(x): return x.is_cuda or x == 'gfx942'"),
    "vendor word in a comment": ("portable/mha.py", "# faster on ROCm"),
    "vendor word in a name": ("portable/mha.py", "HIP_VISIBLE_DEVICES = 1"),
}


@pytest.mark.parametrize(("file", "text"), BROKEN.values(), ids=BROKEN)
def test_a_broken_rule_is_caught_where_it_is(tmp_path, file, text):
    write(tmp_path, file, f'"""First line."""\n{text}\n')
    code, lines = layering(tmp_path)
    assert code == 1 and lines
    assert all(line.startswith((f"{file}:2: ", f"{file}:3: ")) for line in lines), lines


KEPT = {
    "downwards": ("portable/variants.py", "from portable.batch import Batch\nimport portable.ragged as ragged"),
    "the loader": ("portable/attention.py", "def f(name):\n    return import_module(f'portable.backends.{name}')"),
    "backend": ("backends/aiter/paged.py", "from portable.kernel import Kernel\ndef f():\n    import aiter"),
    "triton kernel": ("backends/triton/paged.py", "import triton\nfrom portable.backends.triton import tables"),
    "free module": (
        "portable/generate.py",
        "from portable.attention import Attention\ndef f():\n    import transformers",
    ),
    "transformers for types": (
        "portable/generate.py",
        "if TYPE_CHECKING:\n    from transformers import PreTrainedModel",
    ),
    "words that only contain one": ("portable/mha.py", "relationship = 'damda smoke'"),
    "vendor words in an integration": ("portable/integrations/engine.py", "names = ['cuda']"),
}


@pytest.mark.parametrize(("file", "text"), KEPT.values(), ids=KEPT)
def test_what_the_contract_allows_passes(tmp_path, file, text):
    write(tmp_path, file, text + "\n")
    assert layering(tmp_path) == (0, ["layering: no violations"])


def test_symlinked_folders_are_read_once(tmp_path):
    write(tmp_path, "backends/flash_attn.py", "import flash_attn\n")
    write(tmp_path, "portable/__init__.py", "")
    (tmp_path / "portable" / "backends").symlink_to("../backends")
    assert len(layering(tmp_path)[1]) == 1
