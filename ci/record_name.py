"""What this machine's records in ci/results are named by: python ci/record_name.py

The arch alone belongs to the first card that was measured there; another card of it adds its product's name.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT)]

from portable import Target, detect  # noqa: E402 - the checkout's, whatever is installed


def record_name(target: Target, results: Path) -> str:
    """`sm90` where its contract's record is of such a card, or of none yet; else `sm90-h200`."""
    file = results / f"contract-{target.arch}.json"
    if not file.exists() or json.loads(file.read_text(encoding="utf-8"))["card"] == target.name:
        return target.arch
    return f"{target.arch}-{(target.product or target.name).lower().replace(' ', '-')}"


if __name__ == "__main__":
    print(record_name(detect(), ROOT / "ci" / "results"))
