"""What carries the exchange, by `--basp-transport`: chosen once, at the start, alike on all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from megatron_basp.errors import ConfigurationError
from megatron_basp.megatron.settings import Settings
from megatron_basp.process_groups import SequenceGroups
from megatron_basp.symmetric_memory import Wanted, open_where_possible

TRANSPORTS = ("auto", "nccl", "symmetric-memory")


def with_transports(
    groups: SequenceGroups, settings: Settings, inside_a_domain: Mapping[int, bool]
) -> tuple[SequenceGroups, str]:
    """The groups with what carries their exchange, and a line that says what and why. Collective over the world.

    Args:
        inside_a_domain: by K, whether fast links join all ranks of each group of that size.

    Raises:
        ConfigurationError: symmetric memory was asked for and cannot be used.
    """
    if settings.transport == "nccl":
        return groups, "the backend's all-to-all"
    wanted = {
        size: Wanted(group, settings.in_flight_bytes(size), settings.part_bytes(size), inside_a_domain[size])
        for size, group in groups.by_size.items()
    }
    opened, reasons = open_where_possible(wanted)
    if settings.transport == "symmetric-memory" and reasons:
        size, reason = next(iter(reasons.items()))
        raise ConfigurationError(
            f"--basp-transport symmetric-memory cannot carry the exchange of groups of K={size}: {reason}; use "
            f"--basp-transport auto, or nccl"
        )
    said = [f"K = {size}: symmetric memory, which a trial received the same by" for size in opened]
    said += [f"K = {size}: the backend's all-to-all, since {reason}" for size, reason in reasons.items()]
    return replace(groups, transports=dict(groups.transports) | opened), "; ".join(said)
