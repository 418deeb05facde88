"""A measured machine becomes a file that loads, with a source beside each figure, or is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from megatron_basp.cluster import ClusterSpec, cluster_from_mapping, load_cluster
from megatron_basp.errors import ConfigurationError
from megatron_basp.hardware_file import Known, Measured, fit_exchanges, hardware_file
from tests.unit.commented_yaml import without_a_comment

HARDWARE = Path(__file__).parents[2] / "configs" / "hardware"
H100 = load_cluster("h100-8", HARDWARE)
SIZES = (1e6, 4e6, 64e6)


def times(latency_seconds: float, bytes_per_second: float) -> list[tuple[float, float]]:
    return [(size, latency_seconds + size / bytes_per_second) for size in SIZES]


ONE_HOST = Measured(
    device="NVIDIA H100",
    backend="nccl",
    hosts=1,
    ranks_per_host=8,
    versions={"torch": "2.14.1", "nccl": "2.27.7"},
    memory_bytes=85_000_000_000,
    matmul_precision="bf16",
    within={2: times(30e-6, 280e9), 4: times(40e-6, 330e9), 8: times(50e-6, 340e9)},
    ring_bytes_per_second=360e9,
    memory_bytes_per_second=2.9e12,
    matmul_flops_per_second=700e12,
    attention_flops_per_second={64: {1024: 300e12}, 128: {1024: 350e12}},
)
FOUR_HOSTS = replace(
    ONE_HOST,
    hosts=4,
    across={2: times(60e-6, 330e9), 4: times(70e-6, 260e9)},
    ring_across_bytes_per_second=320e9,
)
CARDS = Known(nics_per_node=8, bytes_per_second_per_nic=50e9, peak_flops_per_second=989e12)


def written(measured: Measured, known: Known) -> tuple[str, ClusterSpec]:
    known.check(measured.hosts)
    text = hardware_file("own", "Measured today.", measured, fit_exchanges(measured), known)
    assert without_a_comment(text) == []
    return text, cluster_from_mapping("own", yaml.safe_load(text))


def test_one_host_without_more_is_one_node_and_its_peak_is_what_a_product_reached() -> None:
    text, cluster = written(ONE_HOST, Known())
    assert (cluster.nodes, cluster.gpus_per_node, cluster.across) == (1, 8, None)
    assert cluster.within_latency_seconds(4) == pytest.approx(40e-6)
    assert cluster.within_bytes_per_second(8) == pytest.approx(340e9)
    assert cluster.ring_bytes_per_second == pytest.approx(360e9)
    assert cluster.peak_flops_per_second == {"bf16": pytest.approx(700e12)} and cluster.matmul_share_of_peak == 1
    assert cluster.attention_flops_per_second[128][1024] == pytest.approx(350e12)
    assert "taken from" not in text


def test_the_rest_is_taken_from_a_library_file_which_is_named() -> None:
    text, cluster = written(ONE_HOST, Known(like=H100))
    assert cluster.nodes is None and cluster.across == H100.across
    assert cluster.peak_flops_per_second == H100.peak_flops_per_second
    assert cluster.matmul_share_of_peak == pytest.approx(700 / 989, rel=1e-3)
    assert cluster.within_bytes_per_second(8) == pytest.approx(340e9), "what is measured is not taken"
    assert text.count("# taken from h100-8") == 7


def test_flags_win_over_the_library_file() -> None:
    text, cluster = written(ONE_HOST, Known(like=H100, nics_per_node=4, peak_flops_per_second=1000e12))
    assert cluster.across is not None
    assert cluster.across.nics_per_node == 4 and cluster.across.bytes_per_second_per_nic == 50e9
    assert cluster.peak_flops_per_second == {"bf16": 1000e12}
    assert "nics_per_node: 4  # given" in text


def test_a_name_with_its_number_of_nodes_keeps_it() -> None:
    two_nodes = load_cluster("a100-40gb-2x4", HARDWARE)
    assert written(ONE_HOST, Known(like=two_nodes, peak_flops_per_second=989e12))[1].nodes == 2


def test_several_hosts_measure_the_fabric() -> None:
    _, cluster = written(FOUR_HOSTS, CARDS)
    assert cluster.nodes == 4 and cluster.across is not None
    assert cluster.across.share_of_rate == {2: pytest.approx(330 / 400), 4: pytest.approx(260 / 400)}
    assert cluster.across_latency_seconds() == pytest.approx(70e-6)
    assert cluster.across_bytes_per_second(2) == pytest.approx(330e9)
    assert cluster.ring_across_bytes_per_second() == pytest.approx(320e9)
    assert cluster.across.all_to_all_uses_all_nics is True


def test_an_all_to_all_that_passes_no_card_s_rate_goes_through_one() -> None:
    slow = replace(FOUR_HOSTS, across={2: times(60e-6, 45e9), 4: times(60e-6, 40e9)})
    _, cluster = written(slow, CARDS)
    assert cluster.across is not None and cluster.across.all_to_all_uses_all_nics is False
    assert cluster.across_bytes_per_second(4) == pytest.approx(40e9)


def test_small_and_large_figures_are_numbers_in_yaml() -> None:
    """YAML takes 1e-05 and 1e+16 for text."""
    extreme = replace(ONE_HOST, within={2: times(1e-9, 1e3)}, memory_bytes=10**25)
    _, cluster = written(extreme, Known())
    assert cluster.within_bytes_per_second(2) == pytest.approx(1e3) and cluster.memory_bytes == pytest.approx(1e25)


@pytest.mark.parametrize(
    ("measured", "known", "message"),
    [
        (FOUR_HOSTS, Known(), "network cards cannot be measured, and 4 hosts have some: give --nics-per-node"),
        (FOUR_HOSTS, Known(nics_per_node=8), "network cards cannot be measured"),
        (ONE_HOST, CARDS, "one host cannot measure: start on several with torchrun, or add --like"),
        (ONE_HOST, Known(peak_flops_per_second=312e12), "700 TFLOP/s in bf16, above the peak of 312 .given."),
        (
            FOUR_HOSTS,
            Known(nics_per_node=1, bytes_per_second_per_nic=50e9),
            r"6.60 times what the network cards carry left a node .1 × 50 GB/s, given.",
        ),
        (
            replace(ONE_HOST, within={4: [(1e6, 2e-3), (4e6, 1e-3)]}),
            Known(),
            "all-to-all of 4 ranks of a host: the times do not grow with the message",
        ),
    ],
)
def test_what_contradicts_or_lacks_is_refused(measured: Measured, known: Known, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message) as caught:
        written(measured, known)
    assert "\n" not in str(caught.value)
