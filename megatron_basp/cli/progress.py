"""Progress of forked ranks on the terminal that the command was started from."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_basp.megatron.recorder import Record


@contextmanager
def terminal() -> Iterator[int]:
    """A descriptor of this process's stderr for its ranks, whose own goes to their logs."""
    descriptor = os.dup(2)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def step_progress(
    terminal: int, rank: int, name: str, steps: int, done: int = 0
) -> Iterator[Callable[[Record], None]]:
    """In a rank: a bar of training steps, which rank 0 shows; yields what is to be called after each. `done`: those
    before a restart."""
    from tqdm import tqdm

    with (
        os.fdopen(os.dup(terminal), "w") as stderr,
        tqdm(
            total=steps, initial=done, desc=name, unit="step", file=stderr, disable=rank != 0, mininterval=0.5
        ) as progress,
    ):

        def advance(record: Record) -> None:
            if record.losses:
                progress.set_postfix_str(f"loss {record.losses[-1]:.4f}", refresh=False)
            progress.update()

        yield advance


@contextmanager
def named_steps(terminal: int, rank: int, steps: int, done: int = 0) -> Iterator[Callable[[str], None]]:
    """In a rank: a bar of steps that differ, which rank 0 shows; yields what is to be called with the name of each one
    that begins. `done`: those that other ranks have done before."""
    from tqdm import tqdm

    with (
        os.fdopen(os.dup(terminal), "w") as file,
        tqdm(
            total=steps,
            initial=done,
            file=file,
            disable=rank != 0,
            bar_format="{n}/{total} |{bar:20}| {elapsed} {desc}",
        ) as bar,
    ):
        begun = 0

        def advance(name: str) -> None:
            nonlocal begun
            bar.set_description_str(name, refresh=False)
            bar.update(1 if begun else 0)
            bar.refresh()
            begun += 1

        yield advance
        bar.set_description_str("done", refresh=False)
        bar.update(1)
