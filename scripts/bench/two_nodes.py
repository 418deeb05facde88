"""Two nodes on one machine: network namespaces joined by a link of a given rate. Linux, with `ip` and `tc`.

Ranks of one node reach each other over the loopback device, which is fast; what goes to the other node passes a token
bucket. The namespaces have no name: they vanish with the last process that is in one, however it ends.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from megatron_basp.errors import ConfigurationError

RANKS_PER_NODE = 2
RANKS = 2 * RANKS_PER_NODE
DEVICE = "veth0"
# Jumbo frames: at 1500 bytes the processor, and not the link, is what a benchmark would measure.
FRAME_BYTES = 9000
# What may leave at once after a pause: little, since pauses would else make the link faster than it is.
BURSTS_PER_SECOND, LEAST_BURST_BYTES = 250, 2 * FRAME_BYTES
# More than is ever under way: a packet that is dropped costs a timeout of TCP, and fabrics drop none.
QUEUE_BYTES = 256 << 20


class TwoNodes:
    """Namespaces of this process, to be entered by the ranks that it forks.

    Args:
        megabits_per_second: of the link, each way.

    Raises:
        ConfigurationError: this system does not let us.
    """

    def __init__(self, megabits_per_second: int) -> None:
        missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
        if missing:
            raise ConfigurationError(f"{' and '.join(missing)} cannot be found: install iproute2")
        try:
            self._namespaces = [_new_namespace(alone=False), _new_namespace(alone=True)]
            first = f"/proc/{os.getpid()}/fd/{self._namespaces[0]}"
            _run(f"ip link add {DEVICE} type veth peer name {DEVICE} netns {first}")
            for node in range(2):
                os.setns(self._namespaces[node], os.CLONE_NEWNET)
                _run(f"ip addr add {self.address(node)}/24 dev {DEVICE}")
                _run(f"ip link set {DEVICE} mtu {FRAME_BYTES} up")
                burst = max(LEAST_BURST_BYTES, megabits_per_second * 1_000_000 // 8 // BURSTS_PER_SECOND)
                rate = f"rate {megabits_per_second}mbit burst {burst} limit {QUEUE_BYTES}"
                _run(f"tc qdisc add dev {DEVICE} root tbf {rate}")
        except (OSError, subprocess.CalledProcessError) as error:
            why = error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) else error
            raise ConfigurationError(
                f"this system refuses network namespaces with a shaped link ({why}): run as root, or where user "
                f"namespaces and the kernel modules veth and sch_tbf are allowed"
            ) from None

    @staticmethod
    def address(node: int) -> str:
        return f"10.77.0.{node + 1}"

    def enter(self, node: int) -> None:
        """This thread, and those that it starts, belong to the node."""
        os.setns(self._namespaces[node], os.CLONE_NEWNET)


def _new_namespace(alone: bool) -> int:
    """A descriptor of a network namespace that this process is now in. alone: its user may do so already."""
    try:
        os.unshare(os.CLONE_NEWNET)
    except PermissionError:
        if alone:
            raise
        _become_root_of_a_user_namespace()
    _run("ip link set lo up")
    return os.open("/proc/self/ns/net", os.O_RDONLY)


def _become_root_of_a_user_namespace() -> None:
    """Without being root: in a namespace of users of our own we are. Only a process of one thread may do this."""
    user, group = os.geteuid(), os.getegid()
    os.unshare(os.CLONE_NEWUSER | os.CLONE_NEWNET)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {user} 1")
    Path("/proc/self/gid_map").write_text(f"0 {group} 1")


def _run(command: str) -> None:
    subprocess.run(command.split(), check=True, capture_output=True, text=True)
