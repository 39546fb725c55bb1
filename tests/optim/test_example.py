"""The plain loop with SimpleAdam runs and learns."""

import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_the_plain_loop_learns_the_digits(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import plain_loop_simple_adam

    assert plain_loop_simple_adam.main() > 0.85
    assert "0 steps skipped" in capsys.readouterr().out
    del sys.modules["plain_loop_simple_adam"]
