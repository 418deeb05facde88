"""Hold the cost model's exchange to a simulation by SimGrid, on clusters of 8 to 512 GPUs: `make simulate`.

Writes table.md, result.json and step_time.png. Exits with 1 if model and simulation differ by more than 5 % in any
case, with 2 if there is no SimGrid.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from tqdm import tqdm

from megatron_basp.errors import ConfigurationError
from scripts.simulate.cases import Case, all_cases, request_of
from scripts.simulate.report import print_table, write_report
from scripts.simulate.result import Comparison, compare

SIMULATOR = Path(__file__).with_name("all_to_all.py")


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    try:
        check_simgrid(options.python)
    except ConfigurationError as error:
        print(f"simulate: {error}", file=sys.stderr)
        return 2
    comparisons = run(options.python, all_cases())
    print_table(comparisons)
    options.output.mkdir(parents=True, exist_ok=True)
    write_report(comparisons, options.output)
    print(f"written: table.md, result.json and step_time.png in {options.output}")
    apart = [one for one in comparisons if not one.agrees]
    for one in apart:
        print(f"simulate: {one.case.name}: {one.disagreement}", file=sys.stderr)
    return 1 if apart else 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m scripts.simulate", description=__doc__.split("\n\n")[0])
    parser.add_argument("--python", default="/usr/bin/python3", help="the Python that has simgrid (%(default)s)")
    parser.add_argument("--output", type=Path, default=Path("runs/simulate"), help="a folder (%(default)s)")
    return parser.parse_args(arguments)


def check_simgrid(python: str) -> None:
    """Raise `ConfigurationError` unless that Python has SimGrid."""
    try:
        # -I: neither PYTHONPATH nor the current folder, which are meant for another Python.
        found = subprocess.run([python, "-I", "-c", "import simgrid"], capture_output=True).returncode == 0
    except OSError:
        found = False
    if not found:
        raise ConfigurationError(
            f"{python} has no module simgrid: apt-get install python3-simgrid (Debian), or name the Python that has "
            f"it, make simulate SIMGRID_PYTHON=..."
        )


def run(python: str, cases: Sequence[Case]) -> list[Comparison]:
    """Simulate all, one process for each core; the results are in the order of the cases."""
    found: dict[str, Comparison] = {}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        # Those that take longest start first.
        longest_first = sorted(cases, key=lambda case: -max(case.plan.group_sizes))
        running = {pool.submit(simulate, python, request_of(case)): case for case in longest_first}
        for done in tqdm(as_completed(running), total=len(running), desc="simulating", unit="case"):
            case = running[done]
            found[case.name] = compare(case, done.result())
    return [found[case.name] for case in cases]


def simulate(python: str, request: dict[str, Any]) -> dict[str, Any]:
    """What `all_to_all.py` answers to a request."""
    done = subprocess.run(
        [python, "-I", str(SIMULATOR)], input=json.dumps(request), capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{SIMULATOR.name} failed with {done.returncode}:\n{done.stderr}")
    return json.loads(done.stdout)


if __name__ == "__main__":
    sys.exit(main())
