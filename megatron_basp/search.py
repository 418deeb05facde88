"""The best BASP run and the best plain one for a model on given devices: which micro-batch, K and recompute. Pure.

Devices, tensor, pipeline and expert parallelism, sharding, sequence length and global batch stay as they are; plain
runs also choose their context parallelism.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import get_args

from megatron_basp.candidates import Comparison, DoesNotFit, compare_plans, fits_memory, plain_runs
from megatron_basp.errors import ConfigurationError
from megatron_basp.placement import divisors
from megatron_basp.training_spec import Recompute, TrainingSpec

Sizes = tuple[Recompute, int]  # and the micro-batch
Watch = Callable[[list[Sizes]], Iterable[Sizes]]


@dataclass(frozen=True)
class SearchResult:
    """training: the best BASP run. comparison: all its plans, and beside them the best plain run with any recompute.

    tried: BASP and plain runs that were modelled; too_large: those of them that do not fit the memory.
    """

    training: TrainingSpec
    comparison: Comparison
    tried: int
    too_large: int


def search(training: TrainingSpec, group_size: int | None = None, watch: Watch = iter) -> SearchResult:
    """Try every micro-batch that divides the samples of a replica, with every recompute.

    Args:
        training: its micro-batch and recompute do not matter.
        group_size: K, where the user fixed it.
        watch: passes on what is tried, one by one, to show progress.

    Raises:
        ConfigurationError: no micro-batch can be dealt out to the ranks.
        DoesNotFit: those that can do not fit the memory; with what would make the smallest of them fit.
    """
    samples = training.global_batch_size // training.parallelism.data_parallel_size
    basp: list[tuple[TrainingSpec, Comparison]] = []
    too_large: list[DoesNotFit] = []
    impossible: list[ConfigurationError] = []
    of_recompute: dict[Recompute, TrainingSpec] = {
        recompute: replace(training, parallelism=replace(training.parallelism, recompute=recompute))
        for recompute in get_args(Recompute)
    }
    # The smallest comes last.
    runs = [(recompute, size) for recompute in of_recompute for size in reversed(divisors(samples))]
    for recompute, size in watch(runs):
        try:
            run = replace(of_recompute[recompute], micro_batch_size=size)
            basp.append((run, compare_plans(run, group_size)))
        except DoesNotFit as error:
            too_large.append(error)
        except ConfigurationError as error:
            impossible.append(error)
    if not basp:
        raise (too_large or impossible)[-1]
    plain = [stock for one in of_recompute.values() for stock in plain_runs(one)]
    fitting = [stock for stock in plain if fits_memory(stock.training, stock.cost)]
    best, comparison = min(basp, key=lambda one: one[1].chosen.cost.step_seconds)
    return SearchResult(
        training=best,
        comparison=replace(comparison, plain=min(fitting, key=lambda stock: stock.cost.step_seconds, default=None)),
        tried=len(basp) + len(too_large) + len(plain),
        too_large=len(too_large) + len(plain) - len(fitting),
    )
