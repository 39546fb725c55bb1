"""docs/claims.md prints what it says it prints."""

import contextlib
import io
import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "claims.md").read_text(encoding="utf-8")
PRELUDE, *SECTIONS = PAGE.split("\n## ")
BLOCK = re.compile(r"```(?:python|text)\n(.*?)```", re.DOTALL)


@pytest.mark.parametrize("section", SECTIONS, ids=[section.partition("\n")[0] for section in SECTIONS])
def test_a_claim_is_as_the_page_says(section: str) -> None:
    program, expected = BLOCK.findall(section)
    printed = io.StringIO()
    names: dict[str, object] = {"__name__": "claims"}
    with contextlib.redirect_stdout(printed):
        exec(BLOCK.findall(PRELUDE)[0] + program, names)
    assert printed.getvalue() == expected
