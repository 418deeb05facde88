"""Two nodes of two ranks on one machine."""

from __future__ import annotations

from megatron_basp.emulated.network import Network

RANKS_PER_NODE = 2
RANKS = 2 * RANKS_PER_NODE


def two_nodes(megabits_per_second: int) -> Network:
    """Joined by a link of this rate, each way.

    Raises:
        ConfigurationError: this system does not let us.
    """
    network = Network(2)
    network.limit(megabits_per_second)
    return network
