"""Host memory while a checkpoint of a gigabyte is loaded, measured in processes of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_load.py"
MARGIN = 64 << 20  # for what threads read and what Python holds


def test_memory_stays_near_the_weights(tmp_path: Path):
    """As stored, and cast to a wider dtype."""
    dtypes = ["bfloat16", "float32"]
    command = [sys.executable, SCRIPT, "--rounds", "0", "--folder", tmp_path, "--dtype", *dtypes]
    report = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    for dtype in dtypes:
        assert report[dtype]["weights"] > 0.9e9
        assert report[dtype]["peak above weights"] < 1.5 * report["largest tensor"] + MARGIN
