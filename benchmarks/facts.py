"""What every benchmark writes down: what it measured, when, and with which versions."""

import json
import platform
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import zdtrain


def save(out: Path, record: dict[str, Any]) -> None:
    facts = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "lightning": version("lightning"),  # importing it would slow down the start of workers
        "zdtrain": zdtrain.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({**facts, **record}, indent=1) + "\n")
    print(f"written to {out}")
