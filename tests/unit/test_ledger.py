"""The ledger adds up what it is told. (What it is told: tests/distributed/test_sent_bytes.py)"""

import json

import pytest

from megatron_basp.ledger import Exchange, Ledger

QKV = Exchange(layer=1, operation="qkv", direction="forward", group_size=4)
OUTPUT = Exchange(layer=1, operation="output", direction="forward", group_size=4)
BACKWARD = QKV._replace(direction="backward")


@pytest.fixture
def ledger():
    ledger = Ledger()
    ledger.record(QKV, [1, 2, 3], [100, 200, 300])
    ledger.record(QKV, [1, 2, 3], [100, 200, 300])
    ledger.record(OUTPUT, [1, 2, 3], [10, 20, 30])
    ledger.record(BACKWARD, [5], [7])
    return ledger


def test_a_new_ledger_is_empty():
    assert Ledger().as_dict() == {"collectives": 0, "sent_bytes": 0, "exchanges": [], "sent_bytes_to_peer": {}}
    assert Ledger().total_bytes == 0


def test_collectives_and_bytes_are_counted_by_kind_of_exchange(ledger):
    assert ledger.collectives == {QKV: 2, OUTPUT: 1, BACKWARD: 1}
    assert ledger.sent_bytes == {QKV: 1200, OUTPUT: 60, BACKWARD: 7}
    assert ledger.total_bytes == 1267


def test_bytes_to_each_peer_add_up_over_all_exchanges_to_the_total(ledger):
    assert ledger.sent_bytes_to_peer == {1: 210, 2: 420, 3: 630, 5: 7}
    assert sum(ledger.sent_bytes_to_peer.values()) == ledger.total_bytes


def test_ledgers_do_not_share_counts(ledger):
    assert Ledger().collectives == {}


def test_reset_forgets_everything(ledger):
    ledger.reset()
    assert ledger == Ledger()
    assert ledger.as_dict() == Ledger().as_dict()


def test_peers_and_bytes_must_match_one_to_one(ledger):
    with pytest.raises(ValueError):
        ledger.record(QKV, [1, 2], [100])


def test_as_dict_is_json_with_totals_sorted_exchanges_and_peers(ledger):
    written = ledger.as_dict()
    assert json.loads(json.dumps(written)) == written
    assert (written["collectives"], written["sent_bytes"]) == (4, 1267)
    assert written["exchanges"] == [
        {**OUTPUT._asdict(), "collectives": 1, "sent_bytes": 60},
        {**BACKWARD._asdict(), "collectives": 1, "sent_bytes": 7},
        {**QKV._asdict(), "collectives": 2, "sent_bytes": 1200},
    ]
    assert list(written["sent_bytes_to_peer"].items()) == [("1", 210), ("2", 420), ("3", 630), ("5", 7)]


def test_peers_are_listed_by_number_and_not_as_text(ledger):
    ledger.record(QKV, [10, 2], [1, 1])
    assert list(ledger.as_dict()["sent_bytes_to_peer"]) == ["1", "2", "3", "5", "10"]
