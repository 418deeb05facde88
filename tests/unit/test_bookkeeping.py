"""When a page of the ledger is full, who gets it, and when it is written."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from megatron_basp.clock import DeviceSpan, HostSpan, clock
from megatron_basp.ledger import Amount, Collective, Ledger, Page
from megatron_basp.ledger_file import LedgerFile, read_ledger
from megatron_basp.megatron.bookkeeping import Bookkeeper, set_aside
from megatron_basp.megatron.runtime import Runtime
from megatron_basp.megatron.steps import Steps
from tests.settings import small_settings
from tests.unit.test_ledger import Second
from tests.unit.test_ledger_file import HEADER, QKV

Seen = tuple[str, int, list[str]]


def seen_by(steps: Steps) -> list[Seen]:
    """What a reader of the pages is given: phase, iteration, operations."""
    seen: list[Seen] = []

    def read(phase: str, iteration: int, seconds: float, page: Page) -> None:
        assert seconds >= 0
        seen.append((phase, iteration, [collective.operation for collective in page]))

    steps.readers.append(read)
    return seen


def send(ledger: Ledger, operation: str) -> None:
    ledger.record(Collective("other", operation, "default_pg", 2), {1: 10})


def test_each_page_is_of_one_step_and_what_lies_between_steps_has_its_own() -> None:
    ledger = Ledger()
    steps = Steps(ledger)
    seen = seen_by(steps)
    send(ledger, "start")
    with steps.step("training", 7):
        send(ledger, "first")
    send(ledger, "log")
    with steps.step("evaluation", 7):
        send(ledger, "held out")
    with steps.step("training", 8):
        send(ledger, "second")
    assert seen == [
        ("outside", 0, ["start"]),
        ("training", 7, ["first"]),
        ("outside", 7, ["log"]),
        ("evaluation", 7, ["held out"]),
        ("outside", 7, []),
        ("training", 8, ["second"]),
    ]


def test_a_step_that_fails_is_not_taken_for_one() -> None:
    ledger = Ledger()
    steps = Steps(ledger)
    seen = seen_by(steps)
    with pytest.raises(RuntimeError), steps.step("training", 1):
        send(ledger, "half of it")
        raise RuntimeError
    steps.turn("outside")
    assert seen == [("outside", 0, []), ("outside", 1, ["half of it"])]


class Event:
    """Of a device whose stream works when it is told to: an event has happened once the device came to it.

    A contract with stand-ins: this has not run on a GPU.
    """

    recorded: ClassVar[list[Event]] = []
    done: ClassVar[int] = 0  # of those recorded; the n-th comes at n milliseconds

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.recorded.append(self)

    def query(self) -> bool:
        return self.recorded.index(self) < Event.done

    def synchronize(self) -> None:
        Event.done = max(Event.done, self.recorded.index(self) + 1)

    def elapsed_time(self, end: Event) -> float:
        assert self.query() and end.query(), "asked for before it happened"
        return float(self.recorded.index(end) - self.recorded.index(self))


@pytest.fixture
def on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(Event, "recorded", [])
    monkeypatch.setattr(Event, "done", 0)


def test_a_span_on_a_device_lies_between_two_events_and_waits_only_when_its_length_is_asked_for(
    on_a_device: None,
) -> None:
    assert clock() is DeviceSpan
    outer, inner = DeviceSpan(), DeviceSpan()
    inner.stop()
    outer.stop()
    assert not outer.is_over() and Event.done == 0
    assert inner.seconds() == 1e-3 and inner.is_over() and not outer.is_over()
    assert outer.seconds() == 3e-3 and outer.is_over()


def test_on_a_cpu_the_host_s_clock_measures() -> None:
    assert clock() is HostSpan


def bookkeeper(folder: Path) -> tuple[Runtime, Path]:
    runtime = Runtime()
    runtime.set_settings(small_settings(ledger=folder / "new" / "ledger.jsonl"))
    runtime.bookkeeper = Bookkeeper(runtime, HEADER)
    return runtime, folder / "new" / "ledger.rank1.jsonl"


def take_step(runtime: Runtime, iteration: int) -> None:
    with runtime.steps.step("training", iteration):
        with runtime.ledger.exchanging(QKV):
            pass
        runtime.ledger.record(QKV, {0: 100, 2: 10}, same_rank_bytes=50)


def written_steps(path: Path) -> list[int]:
    return [step.step for step in read_ledger(path).of("training")]


def test_a_step_is_written_when_the_device_came_to_its_end_and_nobody_waits_for_that(
    on_a_device: None, tmp_path: Path
) -> None:
    runtime, path = bookkeeper(tmp_path)
    take_step(runtime, 1)
    assert written_steps(path) == []
    Event.done = 2
    take_step(runtime, 2)
    assert written_steps(path) == [1] and Event.done == 2
    runtime.close_books()
    assert runtime.ledger.clock is None and runtime.steps.readers == []
    ledger: LedgerFile = read_ledger(path)
    assert ledger.is_complete and written_steps(path) == [1, 2]
    assert ledger.total("training") == {QKV: Amount(2, 100, 200, 20, 2e-3)}


def test_on_a_cpu_a_step_is_written_when_it_ends(tmp_path: Path) -> None:
    runtime, path = bookkeeper(tmp_path)
    take_step(runtime, 1)
    assert written_steps(path) == [1]
    runtime.close_books()
    runtime.close_books()  # once is enough


def test_rank_0_prints_the_shares_of_a_training_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runtime, _ = bookkeeper(tmp_path)
    runtime.close_books()
    assert capsys.readouterr().out == "", "rank 1"

    runtime = Runtime()
    runtime.set_settings(small_settings(ledger=tmp_path / "ledger.jsonl"))
    runtime.bookkeeper = Bookkeeper(runtime, replace(HEADER, rank=0))
    runtime.ledger.clock = Second
    gradients = Collective("dp", "all_reduce", "DATA_PARALLEL_GROUP_WITH_CP", 4)
    for iteration in (1, 2):
        with runtime.steps.step("training", iteration):
            runtime.ledger.record(QKV, {1: 2**20, 2: 2**20}, same_rank_bytes=2**20)
            runtime.ledger.record(gradients, {1: 6 * 2**20})
            with runtime.ledger.timed(gradients):
                pass
    runtime.close_books()
    rows = [[cell.strip() for cell in line.split("│")] for line in capsys.readouterr().out.splitlines()]
    shares = {row[1]: row[2:-1] for row in rows if len(row) == 9}
    # Of HEADER's ranks 0 and 1 are in a node, 2 in another;.
    assert shares == {
        "exchange of attention": ["1", "1.000", "1.000", "25.0%", "0.000", "0.0%"],
        "data parallelism": ["1", "6.000", "0.000", "75.0%", "1000.000", "100.0%"],
    }


def test_the_pages_of_a_run_that_writes_no_ledger_are_turned_all_the_same() -> None:
    """So that they do not grow, and the guard of the first step sees its own."""
    runtime = SimpleNamespace(ledger=Ledger())
    steps = Steps(runtime.ledger)
    for iteration in (1, 2):
        with steps.step("training", iteration):
            send(runtime.ledger, "first")
    assert runtime.ledger.page == {}


def test_a_run_that_starts_again_keeps_what_was_written_before(tmp_path: Path) -> None:
    path = tmp_path / "ledger.rank0.jsonl"
    set_aside(path)
    for text in ("first", "second", "third"):
        path.write_text(text)
        set_aside(path)
        assert not path.exists()
    kept = {file.name: file.read_text() for file in tmp_path.iterdir()}
    assert kept == {f"{path.name}.1": "first", f"{path.name}.2": "second", f"{path.name}.3": "third"}
