"""What a run has to say about where it ran."""

import os
import platform
import socket
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from typing import Any

_PACKAGES = ("zdtrain", "torch", "lightning", "torchmetrics", "jsonargparse", "numpy")


def describe_environment() -> dict[str, Any]:
    """Return versions, host, processor count, command line and git state as plain JSON values."""
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": sys.argv,
        "working_directory": os.getcwd(),
        "host": socket.gethostname(),
        "process_id": os.getpid(),
        "platform": platform.platform(),
        "num_cpus": os.cpu_count(),
        "python": platform.python_version(),
        "packages": {name: found for name in _PACKAGES if (found := _version(name))},
        "git": _git_state(),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git_state() -> dict[str, Any] | None:
    """Commit and whether tracked files differ from it; None outside a repository or without git."""
    commit = _git("rev-parse", "HEAD")
    if commit is None:
        return None
    return {"commit": commit, "dirty": bool(_git("status", "--porcelain", "--untracked-files=no"))}


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
