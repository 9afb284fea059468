"""What no Triton kernel's source may hold: it would tie the source to one vendor, or to Triton before 3.9."""

from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "backends" / "triton"


OF_ONE_ARCHITECTURE = ["prefill_hopper_kernel.py"]  # it may say what only its architecture has


@pytest.mark.parametrize("word", ["inline_asm", "asm volatile", "make_block_ptr", "make_tensor_ptr"])
def test_no_source_has(word):
    files = sorted(FOLDER.glob("*.py"))
    assert len(files) > 30
    found = [file.name for file in files if word in file.read_text(encoding="utf-8").lower()]
    assert found == (OF_ONE_ARCHITECTURE if word == "inline_asm" else [])
