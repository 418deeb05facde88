"""What Megatron logs is what it would log of the same training without the plugin, and figures of the exchange."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from megatron_basp.comparison import BOUNDS
from megatron_basp.errors import RankFailed
from megatron_basp.local_ranks import run_ranks
from megatron_basp.plan import Limits, exchanged_elements_per_token
from tests.end_to_end.training import GQA, ITERATIONS, MODEL, ROPE, SEQ_LENGTH, TRAINING, Trainer, batch, cp

PLANNED = f"{cp(2)} --sequence-parallel-mode basp"
FLAGS = f"{GQA} {ROPE} {batch(3)}"
# Three sequences over two ranks: two at K = 1, one at K = 2, which sends half of what a rank holds of it, in each of
# 2 layers, 2 directions and 2 micro-batches, in fp32 with heads of 8.
SENT_BYTES = SEQ_LENGTH // 2 * exchanged_elements_per_token(2, Limits(8, 4)) * 8 // 2 * 4 * 2 * 2 * 2


def train(trainer: Trainer, flags: str, ranks: int, folder: Path, before: Callable[[], None] = lambda: None) -> Path:
    """Train and return the folder, with the log of each rank."""
    from megatron_basp.megatron.observed_run import observe_training

    argv = [*MODEL.split(), *TRAINING.split(), *trainer.data_flags, *flags.split()]
    planned = "--sequence-parallel-mode" in flags
    run_ranks(lambda rank: observe_training(argv, ITERATIONS, planned, before), ranks, folder)
    return folder


def log_line(folder: Path, ranks: int) -> list[str]:
    log = (folder / f"rank{ranks - 1}.log").read_text()
    return re.findall(r"consumed samples: +(\d+) \|.*global batch size: +(\d+) \| lm loss: (\S+)", log)


def writing_scalars(folder: Path) -> Callable[[], None]:
    """Called in each rank: TensorBoard's place is taken by something that writes what Megatron gives it; the
    operations that Megatron counts in a step are written, and what its timer of our exchange says."""

    def before() -> None:
        folder.mkdir(parents=True, exist_ok=True)

        class SummaryWriter:
            def __init__(self, **arguments: object) -> None:
                self.file = (folder / "scalars").open("w", buffering=1)

            def add_scalar(self, name: str, value: Any, step: int) -> None:
                print(json.dumps([name, step, float(value)]), file=self.file)

            def add_text(self, *arguments: object, **keywords: object) -> None: ...

            def flush(self) -> None: ...

            def close(self) -> None: ...

        tensorboard = ModuleType("torch.utils.tensorboard")
        tensorboard.SummaryWriter = SummaryWriter  # type: ignore[attr-defined]
        sys.modules["torch.utils.tensorboard"] = tensorboard
        from megatron.core import timers
        from megatron.training import training

        timers.SummaryWriter = SummaryWriter
        log = timers.Timers.log

        def logged(self: Any, names: list[str], *arguments: Any, **keywords: Any) -> None:
            if names == ["basp-exchange"] and os.environ["RANK"] == "0":
                with (folder / "timer").open("a") as file:
                    print(self("basp-exchange").elapsed(reset=False), file=file)
            log(self, names, *arguments, **keywords)

        timers.Timers.log = logged
        count = training.num_floating_point_operations

        def counted(*arguments: Any, **keywords: Any) -> float:
            operations = count(*arguments, **keywords)
            if os.environ["RANK"] == "0":
                with (folder / "operations").open("a") as file:
                    print(operations, file=file)
            return operations

        training.num_floating_point_operations = counted

    return before


def scalars(folder: Path) -> dict[str, dict[int, float]]:
    found: dict[str, dict[int, float]] = {}
    for line in (folder / "scalars").read_text().splitlines():
        name, step, value = json.loads(line)
        found.setdefault(name, {})[step] = value
    return found


def test_the_log_is_that_of_one_process_and_the_exchange_is_added(trainer: Trainer, tmp_path: Path) -> None:
    run, reference = tmp_path / "run", tmp_path / "reference"
    flags = f"{FLAGS} --tensorboard-dir {tmp_path} --log-throughput --log-timers-to-tensorboard"
    flags = f"{flags} --timing-log-level 2"
    train(trainer, f"{flags} {PLANNED}", 2, run, writing_scalars(run))
    train(trainer, flags, 1, reference, writing_scalars(reference))

    lines, expected_lines = log_line(run, 2), log_line(reference, 1)
    assert len(lines) == len(expected_lines) >= ITERATIONS
    for (samples, batch_size, loss), (*expected, expected_loss) in zip(lines, expected_lines, strict=True):
        assert [samples, batch_size] == expected
        assert abs(float(loss) - float(expected_loss)) <= BOUNDS.loss
    assert (run / "operations").read_text() == (reference / "operations").read_text() != ""

    found, expected_scalars = scalars(run), scalars(reference)
    ours = {name: found.pop(name) for name in list(found) if name.startswith("basp/")}
    assert found.keys() == expected_scalars.keys() >= {"lm loss", "lm loss vs samples", "grad-norm", "learning-rate"}
    for name, steps in expected_scalars.items():
        assert found[name].keys() == steps.keys()
        if "time" not in name and "throughput" not in name:
            for step, value in steps.items():
                assert found[name][step] == pytest.approx(value, rel=BOUNDS.gradient, abs=0), (name, step)

    steps = range(1, ITERATIONS + 1)
    assert ours.pop("basp/exchange-bytes-per-step") == dict.fromkeys(steps, SENT_BYTES)
    milliseconds = ours.pop("basp/exchange-milliseconds-per-step")
    assert milliseconds.keys() == set(steps) and all(0 < value < 1e4 for value in milliseconds.values())
    assert ours == {
        "basp/group-size-wave-0": dict.fromkeys(steps, 1),
        "basp/group-size-wave-1": dict.fromkeys(steps, 2),
    }
    seconds = [float(line) for line in (run / "timer").read_text().split()]
    assert len(seconds) == ITERATIONS and all(0 < value < 10 for value in seconds)


def test_nothing_is_measured_where_nobody_asked(trainer: Trainer, tmp_path: Path) -> None:
    def before() -> None:
        from megatron_basp.megatron import monitoring

        def measure(*arguments: object) -> None:
            raise AssertionError("the exchange is measured")

        monitoring.ExchangeMonitor = measure

    train(trainer, f"{FLAGS} {PLANNED}", 2, tmp_path, before)


def test_a_throughput_above_the_device_s_peak_stops_the_run(trainer: Trainer, tmp_path: Path) -> None:
    def before() -> None:
        import torch
        from megatron.training import training

        torch.cuda.get_device_name = lambda device=None: "NVIDIA H100 80GB HBM3"
        training.num_floating_point_operations = lambda *arguments, **keywords: 1e20

    with pytest.raises(RankFailed, match=r"rank \d: Megatron measured .* NVIDIA H100 80GB HBM3 computes at most 989"):
        train(trainer, f"{FLAGS} {PLANNED}", 2, tmp_path, before)


@pytest.mark.slow
def test_weights_and_biases_gets_the_same_offline(trainer: Trainer, tmp_path: Path) -> None:
    pytest.importorskip("wandb", exc_type=ImportError)
    write_scalars = writing_scalars(tmp_path)

    def before() -> None:
        write_scalars()  # Megatron gives Weights & Biases what it gives TensorBoard, and nothing without
        os.environ["WANDB_MODE"] = "offline"

    flags = f"{FLAGS} {PLANNED} --wandb-project basp --wandb-exp-name test --wandb-save-dir {tmp_path}"
    train(trainer, f"{flags} --tensorboard-dir {tmp_path}", 2, tmp_path / "run", before)
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    written = file.read_bytes()
    for name in (b"lm loss", b"basp/exchange-bytes-per-step", b"basp/exchange-milliseconds-per-step"):
        assert written.count(name) >= ITERATIONS
