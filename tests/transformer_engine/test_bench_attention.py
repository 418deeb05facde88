"""The benchmark of the exchange takes Transformer Engine's own code where it is installed; its form copies as much."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_basp.peers import implementations
from megatron_basp.peers.measurement import Case, Row
from megatron_basp.peers.shapes import Layout, Shape
from tests.distributed.conftest import over_gloo

SHAPE = Shape("small", heads=8, kv_heads=4, head_size=4, length=16, rows=2)


def measure(rank: int) -> list[Row]:
    ours, own = implementations.installed()[:2]
    assert own.what != implementations.FORM and own.layout == Layout(zig_zag=True)
    form = replace(own, name="form", what=implementations.FORM, make=implementations.four_collectives_attention)
    case = Case(SHAPE, "with_attention", [ours, own, form], repetitions=2)
    rows = case.rows()
    assert case.unsupported == []
    return rows


def test_its_form_sends_and_copies_what_its_own_code_does(tmp_path_factory: pytest.TempPathFactory) -> None:
    _, own, form = over_gloo(tmp_path_factory)(measure, 4)[0]
    assert own.implementation == "transformer_engine" and own.collectives == form.collectives == 8
    assert (own.bytes_sent, own.bytes_copied) == (form.bytes_sent, form.bytes_copied)
    assert max(own.max_error, form.max_error) <= 1e-5
