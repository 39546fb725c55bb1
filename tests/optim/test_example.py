"""The plain loop with SimpleAdam runs and learns."""

import os
import re
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "plain_loop_simple_adam.py"


def test_the_plain_loop_learns_the_digits():
    done = subprocess.run(
        [sys.executable, str(EXAMPLE)], capture_output=True, text=True, env=dict(os.environ), check=True
    )
    assert float(re.search(r"accuracy ([\d.]+)", done.stdout).group(1)) > 0.85
    assert "0 steps skipped" in done.stdout
