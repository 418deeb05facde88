"""Nodes on one machine: network namespaces joined by a switch, with links of a given rate. Linux, with `ip` and `tc`.

Ranks of one node reach each other over the loopback device, which is fast; what goes to another node passes a token
bucket on its way to the switch, and one on its way from it. The namespaces have no name: they vanish with the last
process that is in one, however it ends.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from megatron_basp.errors import ConfigurationError

DEVICE = "uplink"
SUBNET = "10.77.0.0/24"
# Jumbo frames: at 1500 bytes the processor, and not the link, is what a benchmark would measure.
FRAME_BYTES = 9000
# What may leave at once after a pause: little, since pauses would else make the link faster than it is.
BURSTS_PER_SECOND, LEAST_BURST_BYTES = 250, 2 * FRAME_BYTES
# More than is ever under way: a packet that is dropped costs a timeout of TCP, and fabrics drop none.
QUEUE_BYTES = 256 << 20
# Of Ethernet, IP and TCP with its timestamps: in every frame that is counted.
HEADER_BYTES = 14 + 20 + 32
MOST_NODES = 250
# What would be sent, and counted, beside what ranks send: devices that announce themselves; and, once more, segments
# that are late, as they are on a slow link, or came out of turn. None is ever lost.
SETTINGS = {
    "/proc/sys/net/ipv6/conf/default/disable_ipv6": "1",
    "/proc/sys/net/ipv4/tcp_early_retrans": "0",
    "/proc/sys/net/ipv4/tcp_recovery": "0",
    "/proc/sys/net/ipv4/tcp_reordering": "300",
}
# For how long nobody sends again what no acknowledgement has come for: it is in a queue, and not lost.
PATIENCE = "20s"


class Network:
    """Namespaces of this process, to be entered by the ranks that it forks; it sits in the switch's itself.

    Links have no limit until `limit` sets one.

    Raises:
        ConfigurationError: this system does not let us. What was made until then goes with this process.
    """

    def __init__(self, nodes: int) -> None:
        missing = [tool for tool in ("ip", "tc") if _tool(tool) is None]
        if missing:
            raise ConfigurationError(f"{' and '.join(missing)} cannot be found: install iproute2")
        self.nodes = nodes
        try:
            self._switch = _new_namespace(alone=False)
            _run(f"ip link add switch mtu {FRAME_BYTES} type bridge")
            _run("ip link set switch up")
            self._nodes = [self._join(node) for node in range(nodes)]
            self.limit(1)  # what cannot be limited is refused now
            self.limit(None)
        except (OSError, subprocess.CalledProcessError) as error:
            why = error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) else error
            raise ConfigurationError(
                f"this system refuses network namespaces with a shaped link ({why}): run as root, or where user "
                f"namespaces and the kernel modules veth, bridge and sch_tbf are allowed"
            ) from None

    @staticmethod
    def address(node: int) -> str:
        return f"10.77.0.{node + 1}"

    def enter(self, node: int) -> None:
        """This thread, and those that it starts, belong to the node."""
        os.setns(self._nodes[node], os.CLONE_NEWNET)

    def limit(self, megabits_per_second: int | None) -> None:
        """Set what each node's link carries each way; None for as much as the machine can."""
        for node in range(self.nodes):
            _shape(_port(node), megabits_per_second)
            self.enter(node)
            _shape(DEVICE, megabits_per_second)
            os.setns(self._switch, os.CLONE_NEWNET)

    def sent_bytes(self) -> int:
        """That left all nodes until now, by the counters of the switch's ports, without the headers of frames.

        An acknowledgement is a header and nothing else, so that its number, which differs from run to run, adds
        nothing.
        """
        counted = 0
        for line in Path("/proc/thread-self/net/dev").read_text().splitlines()[2:]:
            name, figures = line.split(":")
            if name.strip().startswith("port"):
                received_bytes, frames = map(int, figures.split()[:2])
                counted += received_bytes - HEADER_BYTES * frames
        return counted

    def _join(self, node: int) -> int:
        """A descriptor of a new node's namespace. Nodes know each other's hardware addresses, and need not ask."""
        namespace = _new_namespace(alone=True)
        _run(
            f"ip link add {DEVICE} mtu {FRAME_BYTES} address {_hardware_address(node)} type veth "
            f"peer name {_port(node)} mtu {FRAME_BYTES} netns /proc/{os.getpid()}/fd/{self._switch}"
        )
        _run(f"ip addr add {self.address(node)}/24 dev {DEVICE}")
        _run(f"ip link set {DEVICE} up")
        _run(f"ip route replace {SUBNET} dev {DEVICE} src {self.address(node)} rto_min {PATIENCE}")
        for other in range(self.nodes):
            if other != node:
                _run(
                    f"ip neigh add {self.address(other)} lladdr {_hardware_address(other)} dev {DEVICE} nud permanent"
                )
        os.setns(self._switch, os.CLONE_NEWNET)
        _run(f"ip link set {_port(node)} master switch up")
        return namespace


def refusal(nodes: int) -> str | None:
    """Why this system refuses such a network; None if it does not. Tried in a process of its own, which is then gone:
    half a network would stay with this one."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        why = ""
        try:
            Network(nodes)
        except ConfigurationError as error:
            why = str(error)
        finally:
            os.write(writer, why.encode())
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as stream:
        why = stream.read()
    os.waitpid(child, 0)
    return why or None


def _shape(device: str, megabits_per_second: int | None) -> None:
    if megabits_per_second is None:
        _run(f"tc qdisc replace dev {device} root pfifo limit 100000")
        return
    burst = max(LEAST_BURST_BYTES, megabits_per_second * 1_000_000 // 8 // BURSTS_PER_SECOND)
    rate = f"rate {megabits_per_second}mbit burst {burst} limit {QUEUE_BYTES}"
    _run(f"tc qdisc replace dev {device} root tbf {rate}")


def _port(node: int) -> str:
    return f"port{node}"


def _hardware_address(node: int) -> str:
    return f"02:00:00:00:00:{node + 1:02x}"


def _new_namespace(alone: bool) -> int:
    """A descriptor of a network namespace that this process is now in. alone: its user may do so already."""
    try:
        os.unshare(os.CLONE_NEWNET)
    except PermissionError:
        if alone:
            raise
        _become_root_of_a_user_namespace()
    for setting, value in SETTINGS.items():
        if Path(setting).exists():
            Path(setting).write_text(value)
    _run("ip link set lo up")
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY)


def _become_root_of_a_user_namespace() -> None:
    """Without being root: in a namespace of users of our own we are. Only a process of one thread may do this."""
    user, group = os.geteuid(), os.getegid()
    os.unshare(os.CLONE_NEWUSER | os.CLONE_NEWNET)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {user} 1")
    Path("/proc/self/gid_map").write_text(f"0 {group} 1")


def _tool(name: str) -> str | None:
    """Also where only administrators look for it."""
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def _run(command: str) -> None:
    name, *arguments = command.split()
    subprocess.run([_tool(name) or name, *arguments], check=True, capture_output=True, text=True)
