"""Which network namespaces there are."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path


def namespaces(pids: Iterable[int | str]) -> set[str]:
    """Of those of these processes that have not ended."""
    found = set()
    for pid in pids:
        try:
            found.add(os.readlink(f"/proc/{pid}/ns/net"))
        except OSError:
            continue
    return found


def still_in_use(some: set[str]) -> set[str]:
    """Of these namespaces, once a few seconds are over or none is."""
    for _ in range(200):
        left = some & namespaces(folder.name for folder in Path("/proc").glob("[0-9]*"))
        if not left:
            break
        time.sleep(0.05)
    return left
