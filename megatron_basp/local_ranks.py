"""Several ranks on this machine, forked from a process that has imported everything already.

Importing Megatron takes seconds and half a gigabyte; forked ranks share both. For the demo and the tests: a cluster
starts its ranks with torchrun.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

from megatron_basp.errors import ConfigurationError, RankFailed

# Of a rank that died: what a traceback of a forked test run takes.
LAST_LINES = 80


def run_ranks[Result](function: Callable[[int], Result], ranks: int, log_folder: Path) -> list[Result]:
    """Call `function(rank)` in `ranks` forked processes with torchrun's environment, and wait for all of them.

    Args:
        function: called with the rank; what it returns is pickled. `torch.distributed` is not initialized yet.
        ranks: their number.
        log_folder: gets `rank0.log` and so on, with what a rank wrote to stdout and stderr.

    Returns:
        what each rank returned, by rank.

    Raises:
        RankFailed: a rank raised or died. The others are stopped first.
    """
    with started_ranks(function, ranks, log_folder) as started:
        started.wait()
        return started.results()


def in_one_rank[Result](function: Callable[[], Result], log_folder: Path) -> Result:
    """The function's result, from a process of its own; bad input is bad input here too."""

    def on_rank(rank: int) -> Result | ConfigurationError:
        try:
            return function()
        except ConfigurationError as error:
            return error

    result = run_ranks(on_rank, 1, log_folder)[0]
    if isinstance(result, ConfigurationError):
        raise result
    return result


@contextmanager
def started_ranks[Result](
    function: Callable[[int], Result], ranks: int, log_folder: Path
) -> Iterator[StartedRanks[Result]]:
    """As `run_ranks`, for who has something to do meanwhile. What is left of them at the end is killed."""
    log_folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="ranks-") as scratch:
        arguments = (function, ranks, port, log_folder, Path(scratch))
        # Torch asks the kernel to interrupt the ranks should this process be killed.
        context = mp.start_processes(_run_rank, arguments, ranks, join=False, start_method="fork")
        try:
            yield StartedRanks(context, log_folder, Path(scratch))
        finally:
            for process in context.processes:
                process.kill()


class StartedRanks[Result]:
    """Ranks that run."""

    def __init__(self, context: Any, log_folder: Path, scratch: Path) -> None:
        self._context, self._log_folder, self._scratch = context, log_folder, scratch

    @property
    def pids(self) -> list[int]:
        return self._context.pids()

    def are_over(self, timeout: float | None = 0) -> bool:
        """Whether all have returned, waiting for one to end or for so many seconds.

        Raises:
            RankFailed: one raised or died. The others are stopped first.
        """
        try:
            return self._context.join(timeout)
        except mp.ProcessRaisedException as error:
            log = f"{self._log_folder}/rank{error.error_index}.log"
            raise RankFailed(f"{error.msg.strip()}\n(log: {log})") from None
        except mp.ProcessExitedException as error:
            log = self._log_folder / f"rank{error.error_index}.log"
            end = "\n".join(log.read_text(errors="replace").splitlines()[-LAST_LINES:])
            raise RankFailed(
                f"rank {error.error_index} ended with exit code {error.exit_code} (log: {log}, which ends:)\n{end}"
            ) from None

    def wait(self) -> None:
        while not self.are_over(timeout=None):
            pass

    def results(self) -> list[Result]:
        """What each returned, by rank, once all are over."""
        files = [self._scratch / str(rank) for rank in range(len(self.pids))]
        return [pickle.loads(file.read_bytes()) for file in files]


def _run_rank(
    rank: int, function: Callable[[int], Any], ranks: int, port: int, log_folder: Path, scratch: Path
) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(ranks),
        LOCAL_WORLD_SIZE=str(ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    # An interrupted rank ends without a word; the parent is interrupted too, and says so.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    redirect_output(log_folder / f"rank{rank}.log")
    # Where a signal hits it, a rank says in its log where it was, in every thread.
    faulthandler.enable(sys.stderr)
    # One thread a rank: more than cores, and ranks that wait for each other in collectives starve.
    torch.set_num_threads(1)
    result = function(rank)
    (scratch / str(rank)).write_bytes(pickle.dumps(result))
    sys.stdout.flush()
    sys.stderr.flush()
    if torch.distributed.is_initialized():
        # No rank may leave while another still talks to it.
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def redirect_output(log: Path) -> None:
    """By descriptor, so that what C++ prints goes there too; whatever a test runner put into `sys.stdout` is
    replaced."""
    sys.stdout.flush()
    sys.stderr.flush()
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
