"""Writes the documentation pages of the rules: ``python -m zdtrain.lint.pages docs/rules``."""

import sys
from pathlib import Path

from zdtrain.lint.rules.registry import ALL

_GROUPS = {
    "ZD1": "Host reads and waits",
    "ZD2": "What a capture bakes or refuses",
    "ZD3": "Optimizers, schedulers and the order of a step",
    "ZD4": "0-D tensors",
    "ZD5": "Modules, loading and checkpoints",
}


def pages() -> dict[str, str]:
    """The pages by file name: one per rule, and an index."""
    return {f"{code}.md": rule.page() for code, rule in ALL.items()} | {"README.md": index()}


def index() -> str:
    """All rules in tables by hundreds."""
    lines = ["# Rules of zdtrain lint", ""]
    lines += ["Each page is the docstring of its rule: `zdtrain rule ZD101` prints the same text.", ""]
    for prefix, title in _GROUPS.items():
        lines += [f"## {prefix}xx {title}", "", "| code | name | severity | finds |", "|---|---|---|---|"]
        for code, rule in ALL.items():
            if code.startswith(prefix):
                found = rule.summary().removeprefix("Finds ").rstrip(".")
                lines.append(f"| [{code}]({code}.md) | {rule.name} | {rule.severity.label} | {found} |")
        lines.append("")
    return "\n".join(lines)


def main(folder: str) -> None:
    """Writes the pages into a folder and removes pages of rules that are gone."""
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    wanted = pages()
    for old in target.glob("*.md"):
        if old.name not in wanted:
            old.unlink()
    for name, text in wanted.items():
        (target / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
