"""The ledger adds up what it is told. (What it is told: tests/distributed/test_sent_bytes.py)"""

import pytest

from megatron_basp.ledger import Amount, Collective, Ledger

QKV = Collective("exchange", "qkv", "BASP_SEQUENCE_GROUP_OF_4", 4, layer=1, wave=0, direction="forward")
OUTPUT = QKV._replace(operation="output")
BACKWARD = QKV._replace(direction="backward")
GRADIENTS = Collective("dp", "reduce_scatter", "DATA_PARALLEL_GROUP_WITH_CP", 8)
NODES = ["a"] * 4 + ["b"] * 4


class Second:
    """A span of one second."""

    is_stopped = False

    def stop(self):
        self.is_stopped = True

    def is_over(self):
        return self.is_stopped

    def seconds(self):
        assert self.is_stopped
        return 1.0


def fill(ledger):
    ledger.record(QKV, {1: 100, 2: 200, 3: 300}, same_rank_bytes=50)
    ledger.record(QKV, {1: 100, 2: 200, 3: 300}, same_rank_bytes=50)
    ledger.record(OUTPUT, {1: 10, 5: 20, 3: 30})
    ledger.record(BACKWARD, {5: 7})
    ledger.record(GRADIENTS, {1: 1000})
    return ledger


@pytest.fixture
def page():
    return fill(Ledger()).turn()


def test_collectives_and_bytes_are_counted_by_kind(page):
    assert page.collectives == {QKV: 2, OUTPUT: 1, BACKWARD: 1, GRADIENTS: 1}
    assert page.sent_bytes == {QKV: 1200, OUTPUT: 60, BACKWARD: 7, GRADIENTS: 1000}


def test_bytes_to_each_peer_add_up_over_all_collectives(page):
    assert page.sent_bytes_to_peer == {1: 1210, 2: 400, 3: 630, 5: 27}


def test_the_exchange_is_told_from_megatron_s_own_collectives(page):
    assert page.exchange.keys() == {QKV, OUTPUT, BACKWARD}
    assert page.exchange.sent_bytes_to_peer == {1: 210, 2: 400, 3: 630, 5: 27}


def test_peers_are_in_the_same_node_or_across_nodes_by_where_they_are_and_this_rank_is_neither(page):
    assert page.amounts(0, NODES) == {
        QKV: Amount(2, 100, 1200, 0, None),
        OUTPUT: Amount(1, 0, 40, 20, None),
        BACKWARD: Amount(1, 0, 0, 7, None),
        GRADIENTS: Amount(1, 0, 1000, 0, None),
    }
    # Rank 6 stands in the other node.
    assert page.amounts(6, NODES)[OUTPUT] == Amount(1, 0, 20, 40, None)
    assert page.amounts(6, NODES)[OUTPUT].sent_bytes == 60


def test_a_turned_page_is_empty_and_what_comes_later_does_not_change_the_one_before(page):
    ledger = Ledger()
    first = fill(ledger).turn()
    assert ledger.page == {} and first == page
    fill(ledger)
    assert first == page == ledger.page
    assert Ledger().page == {}


def test_time_is_added_up_by_kind():
    ledger = Ledger(clock=Second)
    for _ in range(2):
        with ledger.exchanging(QKV):
            assert ledger.is_exchanging
        ledger.record(QKV, {1: 100}, same_rank_bytes=50)
    assert not ledger.is_exchanging
    with ledger.timed(GRADIENTS):
        pass
    ledger.record(GRADIENTS, {1: 10})
    with ledger.timed(GRADIENTS):  # the wait for it
        pass
    assert ledger.page.amounts(0, NODES) == {
        QKV: Amount(2, 100, 200, 0, 2.0),
        GRADIENTS: Amount(1, 0, 10, 0, 2.0),
    }
    assert len(ledger.page.spans) == 4


def test_time_of_which_a_part_was_not_measured_is_unknown():
    ledger = Ledger(clock=Second)
    with ledger.timed(QKV):
        pass
    ledger.record(QKV, {1: 100}, same_rank_bytes=50)
    ledger.record(QKV, {1: 100}, is_timed=False)
    assert ledger.page.amounts(0, NODES)[QKV].seconds is None
    assert (Amount(1, 0, 0, 0, 1.0) + Amount(1, 0, 0, 0, None)).seconds is None


def test_a_wait_in_a_later_step_is_time_of_that_step():
    ledger = Ledger(clock=Second)
    ledger.record(GRADIENTS, {1: 10})
    ledger.turn()
    with ledger.timed(GRADIENTS):
        pass
    assert ledger.turn().amounts(0, NODES) == {GRADIENTS: Amount(0, 0, 0, 0, 1.0)}


def test_an_exchange_that_failed_leaves_nothing_behind():
    ledger = Ledger(clock=Second)
    with pytest.raises(RuntimeError), ledger.exchanging(QKV):
        raise RuntimeError
    assert ledger.page == {} and not ledger.is_exchanging
