"""Files that survive a kill: written whole or not at all, and by one process at a time."""

from __future__ import annotations

import fcntl
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def locked(target: Path) -> Iterator[None]:
    """Let one process at a time work on `target`. The lock file stays: to remove it would let two in."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with Path(f"{target}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"{target}: another process is at it, waiting", file=sys.stderr)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def read_json(path: Path) -> Any:
    """The content of a JSON file, None if there is no such file."""
    return json.loads(path.read_text()) if path.exists() else None


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file, onto the disk before returning; until then, what was at `path` is still there."""
    unfinished = Path(f"{path}.unfinished")
    unfinished.write_text(json.dumps(content, indent=1))
    flush(unfinished)
    os.replace(unfinished, path)
    flush(path.parent)


def flush(*paths: Path | str) -> None:
    """Have files (their bytes) and folders (their names) on the disk before going on."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
