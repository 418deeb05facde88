"""Hardware files: each loads, each figure has a source, and what is wrong in one's own is named."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_basp.cluster import cluster_from_mapping, load_cluster
from megatron_basp.errors import ConfigurationError
from tests.unit.commented_yaml import without_a_comment

HARDWARE = Path(__file__).parents[2] / "configs" / "hardware"
FILES = sorted(HARDWARE.glob("*.yaml"))
NAMES = [file.stem for file in FILES]
CONTENT: dict[str, Any] = yaml.safe_load((HARDWARE / "a100-40gb-2x4.yaml").read_text())


def test_the_library_has_the_machines_that_it_promises() -> None:
    promised = "a100-40gb-2x4 a100-80gb-8 a100-80gb-8-4nic a100-80gb-8-8nic h100-8 h200-8 b200-8"
    assert set(promised.split()) <= set(NAMES)
    page = (HARDWARE / "README.md").read_text()
    assert all(f"`{name}`" in page for name in NAMES)


@pytest.mark.parametrize("file", FILES, ids=NAMES)
def test_every_figure_stands_beside_its_source(file: Path) -> None:
    text = file.read_text()
    assert without_a_comment(text) == []
    # A table of the library cannot be all assumptions: something must have been published.
    assert text.count("data sheet") >= 4


def test_a_figure_without_a_source_is_found() -> None:
    assert without_a_comment("# a title\n\nnodes: 2\nwithin_node:\n  # source\n  a: 1\n  b: {2: 1}\nc: 1  # d\n") == [
        "nodes: 2",
        "  b: {2: 1}",
    ]


@pytest.mark.parametrize("name", NAMES)
def test_the_name_says_how_many_gpus_and_nodes(name: str) -> None:
    cluster = load_cluster(name, HARDWARE)
    size = next(part for part in name.split("-")[1:] if part.replace("x", "").isdigit())
    nodes, _, gpus = size.rpartition("x")
    assert cluster.gpus_per_node == int(gpus)
    assert cluster.nodes == (int(nodes) if nodes else None)
    cards = [part.removesuffix("nic") for part in name.split("-") if part.endswith("nic")]
    if cards:
        assert cluster.across is not None and cluster.across.nics_per_node == int(cards[0])


@pytest.mark.parametrize("name", NAMES)
def test_links_behave_as_links_do(name: str) -> None:
    cluster = load_cluster(name, HARDWARE)
    sizes = [size for size in (2, 4, 8, 72) if size <= cluster.gpus_per_node]
    tensor_bytes = 64e6
    seconds = [
        cluster.within_latency_seconds(n) + tensor_bytes * (n - 1) / n / cluster.within_bytes_per_second(n)
        for n in sizes
    ]
    assert seconds == sorted(seconds), "a larger group exchanges the same tensor no faster"
    rates = [cluster.across_bytes_per_second(nodes) for nodes in (2, 4, 8)]
    assert rates == sorted(rates, reverse=True), "more nodes reach no more of the rate"
    assert cluster.across_latency_seconds() > max(map(cluster.within_latency_seconds, sizes[:3]))
    # A GPU's part of what leaves the node is less than what it reaches inside.
    assert rates[0] / cluster.gpus_per_node < cluster.within_bytes_per_second(max(sizes))
    for rates_by_length in cluster.attention_flops_per_second.values():
        short = [rate for length, rate in sorted(rates_by_length.items()) if length <= 32768]
        assert short == sorted(short), "longer sequences reach more"
        assert max(rates_by_length.values()) < cluster.peak_flops_per_second["bf16"]


def test_more_cards_carry_more() -> None:
    names = ("a100-80gb-8", "a100-80gb-8-4nic", "a100-80gb-8-8nic")
    rates = [load_cluster(name, HARDWARE).across_bytes_per_second(2) for name in names]
    assert 3 < rates[1] / rates[0] <= 4 and rates[2] / rates[1] == pytest.approx(2)


@pytest.mark.parametrize(
    ("names", "cards", "rates"),
    [
        (("a100-40gb-2x4", "a100-80gb-8"), 2, {2: 10.33, 4: 5.94, 8: 4.87}),
        (("a100-80gb-8-4nic", "a100-80gb-8-8nic", "h100-8"), 4, {2: 20.01, 4: 10.53, 8: 7.77}),
    ],
)
def test_shares_of_the_fabric_are_flexsp_s(names: tuple[str, ...], cards: int, rates: dict[int, float]) -> None:
    """Its constants are MiB/ms of a whole tensor; (nodes-1)/nodes of it leaves a node of 8, over 200 Gb/s cards."""
    for name in names:
        across = load_cluster(name, HARDWARE).across
        assert across is not None
        for nodes, rate in rates.items():
            leaves_bytes_per_second = 8 * rate * 2**20 * 1e3 * (nodes - 1) / nodes
            assert across.share_of_rate[nodes] == pytest.approx(leaves_bytes_per_second / (cards * 25e9), abs=6e-3)


def test_units_and_sizes_between_two_entries() -> None:
    cluster = cluster_from_mapping("own", CONTENT)
    assert cluster.memory_bytes == 40e9 and cluster.peak_flops_per_second["bf16"] == 312e12
    assert cluster.within_latency_seconds(3) == pytest.approx(94e-6)  # the next larger entry
    assert cluster.within_bytes_per_second(64) == pytest.approx(199.6e9)  # the largest
    assert cluster.across_bytes_per_second(3) == pytest.approx(0.75 * 50e9)
    assert cluster.ring_across_bytes_per_second() == pytest.approx(0.89 * 50e9)


def test_an_all_to_all_through_one_card_carries_what_one_card_does() -> None:
    content = changed(lambda content: content["across_nodes"].update(nics_per_node=4, all_to_all_uses_all_nics=False))
    assert cluster_from_mapping("own", content).across_bytes_per_second(2) == pytest.approx(0.87 * 50e9)
    assert cluster_from_mapping("own", content).ring_across_bytes_per_second() == pytest.approx(4 * 0.89 * 50e9)


def test_a_single_node_needs_no_fabric_and_says_so_when_asked_to_cross() -> None:
    content = changed(lambda content: (content.update(nodes=1), content.pop("across_nodes")))
    cluster = cluster_from_mapping("own", content)
    assert cluster.across is None
    for ask in (
        cluster.across_latency_seconds,
        cluster.ring_across_bytes_per_second,
        lambda: cluster.across_bytes_per_second(2),
    ):
        with pytest.raises(ConfigurationError, match="cluster own has one node of 4 GPUs: use no more ranks"):
            ask()


def changed(change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    content = copy.deepcopy(CONTENT)
    change(content)
    return content


@pytest.mark.parametrize("key", [key for key in CONTENT if key != "nodes"])
def test_a_missing_key_is_named(key: str) -> None:
    with pytest.raises(ConfigurationError, match=f"cluster own: {key} is missing"):
        cluster_from_mapping("own", changed(lambda content: content.pop(key)))


@pytest.mark.parametrize("key", CONTENT["across_nodes"])
def test_a_missing_key_of_the_fabric_is_named(key: str) -> None:
    with pytest.raises(ConfigurationError, match=f"cluster own, across_nodes: {key} is missing"):
        cluster_from_mapping("own", changed(lambda content: content["across_nodes"].pop(key)))


@pytest.mark.parametrize(
    ("where", "key", "value", "message"),
    [
        ("", "memory_gigabytes", 0, "memory_gigabytes must be a positive number, got 0"),
        ("", "memory_gigabytes", -40, "must be a positive number, got -40"),
        ("", "memory_gigabytes", float("nan"), "must be a positive number, got nan"),
        ("", "memory_gigabytes", float("inf"), "must be finite, got inf"),
        ("", "memory_gigabytes", "40", "must be a positive number, got '40'"),
        ("", "memory_gigabytes", True, "must be a positive number, got True"),
        ("", "memory_gigabytes", None, "must be a positive number, got None"),
        ("", "nodes", 0, "nodes must be a whole number of 1 or more, got 0"),
        ("", "nodes", 1.5, "nodes must be a whole number of 1 or more, got 1.5"),
        ("", "matmul_share_of_peak", 1.2, "must be a number above 0 and at most 1, got 1.2"),
        ("", "peak_teraflops", 312, "peak_teraflops must be a mapping with entries, got 312"),
        ("", "peak_teraflops", {}, "peak_teraflops must be a mapping with entries"),
        ("", "peak_teraflops", {16: 312}, "peak_teraflops has an entry for 16, which is no name"),
        ("", "attention_teraflops", {"64": {512: 1}}, "it has an entry for '64', which is no size"),
        ("", "attention_teraflops", {64: {0: 1}}, "64 has an entry for 0, which is no size"),
        ("", "attention_teraflops", {64: {512: -1}}, r"64\[512\] must be a positive number, got -1"),
        ("", "ring_gigabyte_per_second", 1, "ring_gigabyte_per_second is not a key that is known"),
        ("within_node", "gigabytes_per_second", {2: 0}, r"within_node: gigabytes_per_second\[2\] must be a positive"),
        ("within_node", "latency_microseconds", {"2": 1}, "has an entry for '2', which is no size"),
        ("within_node", "latency_microseconds", {True: 1}, "has an entry for True, which is no size"),
        ("across_nodes", "share_of_rate", {2: 1.01}, r"share_of_rate\[2\] must be a number above 0 and at most 1"),
        ("across_nodes", "all_to_all_uses_all_nics", 1, "all_to_all_uses_all_nics must be true or false, got 1"),
        ("across_nodes", "cards", 1, "across_nodes: cards is not a key that is known"),
    ],
)
def test_a_value_that_cannot_be_is_named(where: str, key: str, value: object, message: str) -> None:
    def change(content: dict[str, Any]) -> None:
        (content[where] if where else content)[key] = value

    with pytest.raises(ConfigurationError, match=message) as caught:
        cluster_from_mapping("own", changed(change))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "v100",
            None,
            "there is no cluster v100: use one of a100-40gb-2x4, .*b200-8, .*or a .yaml file; .*bench",
        ),
        ("nowhere.yaml", None, "there is no cluster .*nowhere.yaml: use one of"),
        ("broken.yaml", b"a: [", "broken.yaml is not YAML"),
        ("list.yaml", b"- 1", "list.yaml is no mapping"),
        ("binary.yaml", b"\xff\xfe\xfa", "binary.yaml cannot be read"),
    ],
)
def test_what_is_no_cluster_is_refused_in_one_line(
    tmp_path: Path, name: str, content: bytes | None, message: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    if name.endswith(".yaml"):
        name = str(tmp_path / name)
    with pytest.raises(ConfigurationError, match=message) as caught:
        load_cluster(name, HARDWARE)
    assert "\n" not in str(caught.value)
