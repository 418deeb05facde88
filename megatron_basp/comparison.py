"""What the ranks of a training run saw, and how far two runs are apart.

A run is held to a reference rank by rank: each rank to the reference's rank that holds the same parameters.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor
from torch.linalg import vector_norm

from megatron_basp.plan import BatchPlan


@dataclass
class RankReport:
    """What one rank saw.

    place: its ranks in tensor, pipeline and expert parallelism; ranks of one place hold the same parameters.
    mtp_losses, mtp_tokens: of multi-token prediction, for each step and by depth: what Megatron logs, and of how many
        tokens.
    expert_losses: what Megatron logs of its experts, for each step and by name: auxiliary losses, z-loss.
    samples: for each step, a checksum of every row that its loader gave.
    gradients, parameters: by name, gradients of the first and of the last step (as clipped), parameters at the end.
    plan: of the micro-batches of training, None where there was none.
    """

    place: tuple[int, int, int]
    losses: list[float]
    grad_norms: list[float]
    held_out_losses: list[float]
    mtp_losses: list[list[float]]
    mtp_tokens: list[list[float]]
    expert_losses: list[dict[str, float]]
    samples: list[list[int]]
    gradients: list[dict[str, Tensor]]
    parameters: dict[str, Tensor]
    plan: BatchPlan | None


class Bounds(NamedTuple):
    """The largest differences that count as rounding.

    loss: absolute. gradient, parameter: relative, in the Frobenius norm of each; gradient holds for its norm too.
    """

    loss: float
    gradient: float
    parameter: float


# What two orders of the same fp32 sums differ by over ten steps with losses between 4 and 7, and some room.
BOUNDS = Bounds(loss=2e-6, gradient=1e-5, parameter=1e-5)


class Difference(NamedTuple):
    """The largest difference of one kind, and where it is."""

    value: float
    where: str


@dataclass(frozen=True)
class Comparison:
    """The largest differences of a run from its reference.

    losses: absolute, of a step's loss; held_out_losses: the same of the evaluations before and after; mtp_losses: the
        same of the logged losses of multi-token prediction, None without it.
    expert_losses: relative, of the logged losses of experts; None without them.
    grad_norms: relative. gradients, parameters: relative in the Frobenius norm of each tensor, since single entries
        near 0 are rounding, to Adam too; None where gradients were not compared.
    samples_equal: each step trained on the same rows, each row once, whichever data-parallel rank read it.
    """

    losses: Difference
    held_out_losses: Difference
    mtp_losses: Difference | None
    expert_losses: Difference | None
    grad_norms: Difference
    gradients: Difference | None
    parameters: Difference
    samples_equal: bool

    def beyond(self, bounds: Bounds = BOUNDS) -> list[str]:
        """What differs by more than the bounds, a line each; empty for equal runs. Samples are not judged."""
        judged = [
            ("losses differ", self.losses, bounds.loss),
            ("held-out losses differ", self.held_out_losses, bounds.loss),
            ("logged losses of multi-token prediction differ", self.mtp_losses, bounds.loss),
            ("logged losses of experts differ", self.expert_losses, bounds.gradient),
            ("gradient norms differ", self.grad_norms, bounds.gradient),
            ("gradients differ", self.gradients, bounds.gradient),
            ("parameters differ", self.parameters, bounds.parameter),
        ]
        return [
            f"{what} by {difference.value:.1e}, bound {bound:.1e}: {difference.where}"
            for what, difference, bound in judged
            if difference is not None and not difference.value <= bound
        ]


def compare(run: Sequence[RankReport], reference: Sequence[RankReport], gradients: bool = True) -> Comparison:
    """How far a run is from its reference.

    Args:
        run, reference: what each rank saw, by rank.
        gradients: compare these too.

    Raises:
        ValueError: the runs have other numbers of steps, or other parameters.
    """
    last, reference_last = run[-1], reference[-1]
    peers = {report.place: report for report in reference}
    pairs = [(f"rank {rank}", report, peers[report.place]) for rank, report in enumerate(run)]
    grad_norms = [
        _largest(found, expected, f"{rank}, step", relative=True)
        for rank, found, expected in ((rank, a.grad_norms, b.grad_norms) for rank, a, b in pairs)
    ]
    return Comparison(
        losses=_largest(last.losses, reference_last.losses, "step"),
        held_out_losses=_largest(last.held_out_losses, reference_last.held_out_losses, "evaluation"),
        mtp_losses=_largest_of_depths(last, reference_last),
        expert_losses=_largest_of_names(last.expert_losses, reference_last.expert_losses),
        grad_norms=max(grad_norms),
        gradients=max(
            _largest_of_tensors(found, expected, f"{rank}, {when} step")
            for rank, a, b in pairs
            for when, found, expected in zip(("first", "last"), a.gradients, b.gradients, strict=True)
        )
        if gradients
        else None,
        parameters=max(_largest_of_tensors(a.parameters, b.parameters, rank) for rank, a, b in pairs),
        samples_equal=rows_by_step(run) == rows_by_step(reference),
    )


def _largest_of_depths(last: RankReport, reference: RankReport) -> Difference | None:
    if last.mtp_tokens != reference.mtp_tokens:
        raise ValueError("the losses of multi-token prediction are of other tokens than in the reference")
    if not reference.mtp_losses:
        return None
    pairs = enumerate(zip(last.mtp_losses, reference.mtp_losses, strict=True), 1)
    return max(_largest(found, expected, f"step {step}, depth") for step, (found, expected) in pairs)


def _largest_of_names(found: list[dict[str, float]], expected: list[dict[str, float]]) -> Difference | None:
    if [step.keys() for step in found] != [step.keys() for step in expected]:
        raise ValueError("other losses of experts are logged than in the reference")
    return max(
        (
            _largest([a[name]], [b[name]], f"{name}, step {step}, loss", relative=True)
            for step, (a, b) in enumerate(zip(found, expected, strict=True), 1)
            for name in b
        ),
        default=None,
    )


def rows_by_step(reports: Sequence[RankReport]) -> list[list[int]]:
    """The rows of all data-parallel replicas, sorted, for each step. Ranks that read the same rows are one replica."""
    replicas = {tuple(map(tuple, report.samples)) for report in reports if any(report.samples)}
    return [sorted(itertools.chain(*step)) for step in zip(*replicas, strict=True)]


def _largest(found: Sequence[float], expected: Sequence[float], what: str, relative: bool = False) -> Difference:
    """A NaN is the largest difference of all."""
    if len(found) != len(expected) or not found:
        raise ValueError(f"{what}: there are {len(found)}, and {len(expected)} in the reference")
    return max(
        Difference(_ratio(abs(a - b), abs(b) if relative else 1.0), f"{what} {index + 1}: {a}, not {b}")
        for index, (a, b) in enumerate(zip(found, expected, strict=True))
    )


def _largest_of_tensors(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], what: str) -> Difference:
    if found.keys() != expected.keys() or not found:
        raise ValueError(f"{what}: parameters {sorted(found.keys() ^ expected.keys())} are in one run only")
    return max(Difference(relative_difference(found[name], expected[name]), f"{what}: {name}") for name in expected)


def relative_difference(found: Tensor, expected: Tensor) -> float:
    """‖found - expected‖ / ‖expected‖; where expected is 0 all over (an expert without tokens), 0 or infinity."""
    return _ratio(vector_norm(found - expected).item(), vector_norm(expected).item())


def _ratio(difference: float, size: float) -> float:
    ratio = difference / size if size else (math.inf if difference else 0.0)
    return math.inf if math.isnan(ratio) else ratio
