#!/usr/bin/python3
"""Simulate the all-to-alls of a plan with SimGrid: a request as JSON on stdin, what came out as JSON on stdout.

For the system's Python, which is where Debian puts SimGrid; imports nothing of ours. Knows no formula of the cost
model: it posts flows between GPUs, and SimGrid shares links among them (max-min fairness) and tells when each ends.

Request:
    nodes, gpus_per_node: GPU i is in node i // gpus_per_node.
    flows: "peer", one for each pair of GPUs; or "node", one for all that a GPU sends to its peers in another node.
    waves: one after the other, each with
        groups: lists of GPUs; all groups exchange at the same time.
        bytes_to_a_peer: for each collective, what a GPU sends to each other one of its group.
        within_bytes_per_second, within_latency_seconds: of each GPU's link to the GPUs of its node, one way.
        across_bytes_per_second, across_latency_seconds: of each node's link to the others, one way, all its GPUs.

Answer: simgrid (version); waves: seconds, node_sent_bytes (by node, counted from the flows), flows.
"""

import json
import sys

import simgrid
from simgrid import Actor, Comm, Engine, LinkInRoute, NetZone

# SimGrid's own corrections for TCP are off: rates and latencies of the request are those that are reached.
OPTIONS = (
    "network/model:CM02 network/TCP-gamma:0 network/crosstraffic:0 network/bandwidth-factor:1 "
    "network/latency-factor:1 network/weight-S:0 surf/precision:1e-9"
).split()


class Port:
    """A host with a link of its own to the middle of a star, and one back: where flows meet others."""

    def __init__(self, zone, name):
        self.host = zone.create_host(name, 1e9)
        self.links = [zone.create_link(name + way, 1e9).seal() for way in ("-up", "-down")]
        up, down = self.links
        zone.add_route(self.host.netpoint, None, None, None, [LinkInRoute(up)], False)
        zone.add_route(None, self.host.netpoint, None, None, [LinkInRoute(down)], False)
        self.host.seal()

    def set(self, bytes_per_second, latency_seconds):
        for link in self.links:
            link.set_bandwidth(bytes_per_second)
            link.set_latency(latency_seconds / 2)  # a flow takes one link up and one down


class Cluster:
    """A port for each GPU, to those of its node, and one for each node, which its GPUs share."""

    def __init__(self, request):
        self.gpus_per_node, self.each_peer = request["gpus_per_node"], request["flows"] == "peer"
        zone = NetZone.create_star_zone("cluster")
        self.nodes = [Port(zone, f"node-{node}") for node in range(request["nodes"])]
        self.gpus = [Port(zone, f"gpu-{gpu}") for gpu in range(request["nodes"] * self.gpus_per_node)]
        zone.seal()
        self.waves = []

    def run_waves(self, waves):
        for wave in waves:
            links = zip(wave["within_bytes_per_second"], wave["within_latency_seconds"], strict=True)
            for gpu, link in zip(self.gpus, links, strict=True):
                gpu.set(*link)
            for node in self.nodes:
                node.set(wave["across_bytes_per_second"], wave["across_latency_seconds"])
            start = Engine.clock
            self.waves.append({"seconds": 0.0, "node_sent_bytes": [0] * len(self.nodes), "flows": 0})
            members = [
                Actor.create("group", self.gpus[group[0]].host, self.exchange, group, wave["bytes_to_a_peer"])
                for group in wave["groups"]
            ]
            for member in members:
                member.join()
            self.waves[-1]["seconds"] = Engine.clock - start

    def exchange(self, group, bytes_to_a_peer):
        """One collective after the other; other groups are at theirs meanwhile."""
        for size in bytes_to_a_peer:
            Comm.wait_all([self.post(*flow, size) for flow in self.flows(group)])

    def flows(self, group):
        """(sender, receivers) of one collective."""
        for sender in group:
            others = {}
            for receiver in group:
                node = receiver // self.gpus_per_node
                if receiver != sender:
                    alone = self.each_peer or node == sender // self.gpus_per_node
                    others.setdefault(("gpu", receiver) if alone else ("node", node), []).append(receiver)
            for receivers in others.values():
                yield sender, receivers

    def post(self, sender, receivers, size):
        wave, size = self.waves[-1], size * len(receivers)
        wave["flows"] += 1
        node, other = sender // self.gpus_per_node, receivers[0] // self.gpus_per_node
        if node == other:
            return Comm.sendto_async(self.gpus[sender].host, self.gpus[receivers[0]].host, size)
        wave["node_sent_bytes"][node] += size
        return Comm.sendto_async(self.nodes[node].host, self.nodes[other].host, size)


def main():
    request = json.load(sys.stdin)
    engine = Engine([sys.argv[0], "--log=root.thres:error", *("--cfg=" + option for option in OPTIONS)])
    cluster = Cluster(request)
    Actor.create("waves", cluster.gpus[0].host, cluster.run_waves, request["waves"])
    engine.run()
    print(json.dumps({"simgrid": simgrid.simgrid_version, "waves": cluster.waves}))


if __name__ == "__main__":
    main()
