"""One writer per run folder."""

import errno
import os
from pathlib import Path

from zdtrain.records.types import RecordError

try:
    import fcntl
except ImportError:  # Windows has no advisory locks of this kind: two processes can then continue one folder
    fcntl = None  # type: ignore[assignment]

_LOCK_FILE = ".lock"


class FolderLock:
    """Holds a run folder for this process until `release` or the end of the process, however it ends.

    A POSIX record lock, because forked loader workers do not inherit it: they may outlive a killed run for seconds.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._descriptor: int | None = None

    def acquire(self) -> None:
        """Take the folder; a lock that is already held is kept.

        Raises:
            RecordError: another process writes into the folder.
            OSError: the folder cannot be written.
        """
        if self._descriptor is not None or fcntl is None:
            return
        descriptor = os.open(self._folder / _LOCK_FILE, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            os.close(descriptor)
            raise RecordError(
                f"another process is recording into {self._folder}: wait for it, or record into a new folder"
            ) from error
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):  # a file system without locks
                os.close(descriptor)
                raise
        self._descriptor = descriptor

    def release(self) -> None:
        """Give the folder up."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
