"""What no Triton kernel's source may hold: it would tie the source to one vendor, or to Triton before 3.9."""

from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "backends" / "triton"


@pytest.mark.parametrize("word", ["inline_asm", "asm volatile", "make_block_ptr", "make_tensor_ptr"])
def test_no_source_has(word):
    files = sorted(FOLDER.glob("*.py"))
    assert len(files) > 30
    assert not [file.name for file in files if word in file.read_text(encoding="utf-8").lower()]
