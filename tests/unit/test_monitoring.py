"""What is checked and measured beside Megatron's log."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from megatron_basp.clock import HostSpan
from megatron_basp.ledger import Collective, Ledger
from megatron_basp.megatron.monitoring import ExchangeMonitor, check_throughput, peak_tflops
from megatron_basp.megatron.steps import Steps


@pytest.mark.parametrize(
    ("device", "peak"),
    [
        ("NVIDIA A100-SXM4-40GB", 312),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989),
        ("NVIDIA H20", 148),
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500),
        ("NVIDIA GeForce RTX 4090", None),
        ("CPU", None),
    ],
)
def test_the_peak_is_known_by_the_device_s_name(device: str, peak: float | None) -> None:
    assert peak_tflops(device) == peak


def test_a_throughput_above_the_peak_is_an_error_with_the_values() -> None:
    check_throughput(988.0, "NVIDIA H100 80GB HBM3", rank=3)
    check_throughput(1e6, "a device of next year", rank=3)
    with pytest.raises(RuntimeError, match=r"rank 3: Megatron measured 1012\.5 TFLOP/s a GPU, and NVIDIA H100 80GB"):
        check_throughput(1012.5, "NVIDIA H100 80GB HBM3", rank=3)


def test_a_span_is_the_time_from_its_making_to_its_end() -> None:
    outer, inner = HostSpan(), HostSpan()
    sum(range(1000))
    inner.stop()
    outer.stop()
    sum(range(1000))
    assert inner.is_over() and 0 < inner.seconds() < outer.seconds() < 1


def test_times_of_steps_that_are_over_are_added_up_and_not_kept() -> None:
    ledger = Ledger()
    runtime = SimpleNamespace(ledger=ledger, steps=Steps(ledger))
    monitor = ExchangeMonitor(runtime)  # type: ignore[arg-type]
    for iteration in range(5):
        with runtime.steps.step("training", iteration), ledger.exchanging(Collective("exchange", "qkv", "group", 2)):
            sum(range(1000))
    assert not monitor._spans
    assert monitor.totals().steps == 5 and monitor.totals().seconds > 0
