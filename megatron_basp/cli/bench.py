"""`megatron-basp bench BENCHMARK`: what this machine reaches."""

from __future__ import annotations

from typing import Any

from megatron_basp.cli import bench_attention, bench_fabric, bench_train


def add_parser(subcommands: Any) -> None:
    parser = subcommands.add_parser(
        "bench", help="measure this machine", description="Measure this machine.", allow_abbrev=False
    )
    benchmarks = parser.add_subparsers(dest="benchmark", required=True, metavar="BENCHMARK")
    bench_attention.add_parser(benchmarks)
    bench_fabric.add_parser(benchmarks)
    bench_train.add_parser(benchmarks)
