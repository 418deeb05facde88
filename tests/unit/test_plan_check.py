"""`megatron-basp plan --check`: what it calls equal and what it must not; the ledger here is made by hand."""

import json
from dataclasses import replace

import pytest

from megatron_basp.cli.main import main
from megatron_basp.exchange_check import check, predicted_seconds, predicted_step
from megatron_basp.exchange_cost import ExchangeModel
from megatron_basp.ledger import Amount, Collective
from megatron_basp.ledger_file import Exchanged, Header, LedgerFile, LedgerWriter, PlannedWave, Step
from megatron_basp.library import named_cluster
from megatron_basp.placement import placement

# 3 rows of 64 tokens on 4 ranks in "nodes" of 2: two rows at K=2, one at K=4; 2 layers, 3 micro-batches.
HEADER = Header(
    rank=0,
    world_size=4,
    versions={},
    backend="gloo",
    clock="host",
    mode="basp",
    flags={
        "num-layers": 2,
        "seq-length": 64,
        "micro-batch-size": 3,
        "global-batch-size": 9,
        "data-parallel-size": 1,
        "pipeline-model-parallel-size": 1,
    },
    exchanged=Exchanged(heads=8, kv_heads=2, qk_head_size=6, v_head_size=4, element_bytes=4),
    training_waves=(PlannedWave(2, 2), PlannedWave(1, 4)),
    evaluation_waves=(PlannedWave(2, 2), PlannedWave(1, 4)),
    cp_ranks=(0, 1, 2, 3),
    domain_size=2,
    nodes=("a", "a", "b", "b"),
)


def share(operation, wave):
    """Bytes to each rank of a group, in a layer and direction, by hand."""
    tokens, group_size, kv_heads = ((32, 2, 2), (16, 4, 4))[wave]
    elements = {"qkv": 8 * 6 + kv_heads * (6 + 4), "output": 8 * 4}[operation]
    return tokens * elements * 4 // group_size


def exchange(operation, wave, direction, layer, forward_passes=1):
    count = 3 * (forward_passes if direction == "forward" else 1)
    each = share(operation, wave) * count
    name = Collective("exchange", operation, "GROUP", (2, 4)[wave], layer, wave, direction)
    return name, Amount(count, each, each, (0, 2)[wave] * each, 0.25)


def step(number=1, layers=(1, 2), forward_passes=1):
    sent = dict(
        exchange(operation, wave, direction, layer, forward_passes)
        for operation in ("qkv", "output")
        for wave in (0, 1)
        for direction in ("forward", "backward")
        for layer in layers
    )
    sent[Collective("dp", "all_reduce", "DATA", 4)] = Amount(1, 0, 5, 5, 0.1)
    return Step("training", number, 1.0, sent)


def changed(of_step, operation, wave, direction, **fields):
    """The step with one collective's amount changed, in layer 2."""
    sent = dict(of_step.sent)
    key = next(c for c in sent if (c.operation, c.wave, c.direction, c.layer) == (operation, wave, direction, 2))
    sent[key] = replace(sent[key], **{name: getattr(sent[key], name) + more for name, more in fields.items()})
    return replace(of_step, sent=sent)


def different(*steps, header=HEADER):
    checks = check(LedgerFile(header, steps, True))
    assert len(checks) == 8
    return [(one.kind, one.differs_in) for one in checks if one.differs_in is not None]


def test_what_the_formula_says_is_equal():
    assert not different(step(1), step(2))


@pytest.mark.parametrize("field", ["count", "same_rank_bytes", "same_node_bytes", "across_nodes_bytes"])
def test_one_more_of_anything_in_any_step_is_found_and_located(field):
    worse = changed(step(7), "output", 1, "backward", **{field: 1})
    assert different(step(6), worse) == [((1, 4, "output", "backward"), 7)]


def test_bytes_that_went_to_another_class_of_peers_differ_though_their_sum_does_not():
    moved = changed(step(), "qkv", 1, "forward", same_node_bytes=-16, across_nodes_bytes=16)
    assert different(moved) == [((1, 4, "qkv", "forward"), 1)]


def test_a_layer_a_wave_or_a_direction_that_did_not_exchange_is_missed():
    assert len(different(step(layers=(1,)))) == 8
    without = step()
    sent = {c: amount for c, amount in without.sent.items() if c.direction != "backward" or c.wave == 0}
    assert {kind[0] for kind, _ in different(replace(without, sent=sent))} == {1}


def test_heads_that_are_exchanged_in_parts_take_so_many_collectives_and_the_same_bytes():
    in_parts = replace(HEADER, training_waves=tuple(replace(wave, chunks=2) for wave in HEADER.training_waves))
    halves = step(forward_passes=1)
    twice = {c: replace(amount, count=2 * amount.count) for c, amount in halves.sent.items()}
    assert not different(replace(halves, sent=twice), header=in_parts)
    assert len(different(halves, header=in_parts)) == 8


def test_an_exchange_that_was_not_predicted_differs():
    one_wave = replace(HEADER, training_waves=(PlannedWave(2, 2), PlannedWave(1, 1)))
    assert {kind[:2] for kind, _ in different(step(), header=one_wave)} == {(1, 4)}


@pytest.mark.parametrize(
    ("flags", "forward_passes"),
    [
        ({"recompute-granularity": "full", "recompute-method": "uniform", "recompute-num-layers": 1}, 2),
        ({"recompute-granularity": "selective"}, 1),
        ({"recompute-granularity": "selective", "recompute-modules": ["core_attn", "mlp"]}, 1),
        ({"recompute-granularity": "full", "recompute-method": "block", "recompute-num-layers": 5}, 2),
    ],
)
def test_what_is_recomputed_is_exchanged_twice_forward(flags, forward_passes):
    header = replace(HEADER, flags=HEADER.flags | flags)
    assert not different(step(forward_passes=forward_passes), header=header)
    assert different(step(forward_passes=3 - forward_passes), header=header)


def test_a_block_of_layers_is_recomputed_in_each_virtual_stage():
    flags = {"num-layers": 8, "pipeline-model-parallel-size": 2, "virtual-pipeline-model-parallel-size": 2}
    block = {"recompute-granularity": "full", "recompute-method": "block", "recompute-num-layers": 1}
    predicted = predicted_step(replace(HEADER, flags=HEADER.flags | flags | block))
    assert {kind.direction: sent.collectives for kind, sent in predicted.items()} == {
        "forward": (4 + 2) * 3,
        "backward": 4 * 3,
    }


def test_a_rank_with_more_neighbours_sends_more_of_it_inside():
    header = replace(HEADER, rank=2, nodes=("a", "b", "b", "b"))
    predicted = {kind[:3]: sent for kind, sent in predicted_step(header).items() if kind.direction == "forward"}
    assert predicted[1, 4, "qkv"][2:] == (2 * 6 * share("qkv", 1), 6 * share("qkv", 1))
    assert predicted[0, 2, "qkv"][2:] == (6 * share("qkv", 0), 0)


def test_seconds_are_those_of_the_exchange_model():
    cluster = named_cluster("a100-40gb-2x4")
    found = predicted_seconds(HEADER, [HEADER], cluster)
    placed = placement([HEADER.cp_ranks], dict(enumerate(HEADER.nodes)))
    from megatron_basp.exchange_cost import AttentionShape

    model = ExchangeModel(cluster, AttentionShape(8, 2, 6, 4, 4), placed)
    assert found[0, "forward"] == found[0, "backward"] == pytest.approx(2 * 3 * model.of_wave(2, 32).seconds)
    assert found[1, "forward"] == pytest.approx(2 * 3 * model.of_wave(4, 16).seconds)


@pytest.fixture
def command(tmp_path, capsys):
    """Writes a ledger for each rank and runs the command on it."""

    def run(steps_of_ranks, *words, name="ledger.jsonl", header=HEADER):
        for rank, steps in enumerate(steps_of_ranks):
            with (tmp_path / f"ledger.rank{rank}.jsonl").open("w") as file:
                writer = LedgerWriter(file, replace(header, rank=rank))
                for of_step in steps:
                    writer.write_step(of_step)
                writer.close()
        status = main(["plan", "--check", str(tmp_path / name), *words])
        return status, *capsys.readouterr()

    return run


def test_an_equal_ledger_exits_with_0_and_a_tampered_one_with_1(command):
    status, out, _ = command([[step(1), step(2)]] * 2)
    assert status == 0 and "bytes: equal" in out and "of 2 of 4 ranks in each of 2 training steps" in out
    worse = changed(step(2), "qkv", 0, "forward", same_node_bytes=4)
    status, out, _ = command([[step(1), step(2)], [step(1), worse]])
    assert status == 1 and "1 of 16 differ" in out
    expected = 3 * 2 * share("qkv", 0)
    assert (
        f"rank 1, step 2, wave 0: qkv forward at K=2 has same node bytes {expected + 4}, predicted {expected}" in out
    )


def test_a_file_of_one_rank_is_held_by_itself(command):
    worse = changed(step(), "qkv", 0, "forward", same_node_bytes=4)
    assert command([[step()], [worse]], name="ledger.rank0.jsonl")[0] == 0
    assert command([[step()], [worse]], name="ledger.rank1.jsonl")[0] == 1


def test_the_document_has_bytes_and_seconds_in_places_of_their_own(command):
    status, out, _ = command([[step(1), step(2)]], "--cluster", "a100-40gb-2x4", "--json")
    document = json.loads(out)
    assert (
        status == 0
        and document["verdict"] == "equal"
        and document["complete"] is True
        and len(document["exchanges"]) == 8
    )
    times = {(one["wave"], one["direction"]): one for one in document["seconds"]}
    one = times[0, "forward"]
    assert one["measured_seconds"] == pytest.approx(2 * 2 * 0.25)  # two layers, two operations
    assert one["modelled_to_measured"] == pytest.approx(one["modelled_seconds"] / 1.0)
    status, out, _ = command([[step(1)]], "--cluster", "a100-40gb-2x4")
    assert "modelled ms" in out and "measured ms" in out and "no verdict" in out
    document = json.loads(command([[step(1)]], "--json")[1])
    assert {one["modelled_seconds"] for one in document["seconds"]} == {None}


def test_a_run_without_exchanges_is_equal(command):
    header = replace(HEADER, training_waves=(PlannedWave(4, 1),))
    status, out, _ = command([[Step("training", 1, 1.0, {})]], header=header)
    assert status == 0 and "nothing should be exchanged, and nothing was" in out


@pytest.mark.parametrize(
    ("words", "header", "said"),
    [
        (["--ranks", "4"], HEADER, "leave --ranks out"),
        (["--", "--num-layers", "2"], HEADER, "leave a command line of Megatron's out"),
        (["--cluster", "z80"], HEADER, "there is no cluster z80"),
        ([], replace(HEADER, flags={**HEADER.flags, "mtp-num-layers": 1}), "multi-token prediction"),
        ([], replace(HEADER, flags={**HEADER.flags, "pipeline-model-parallel-size": 3}), "layers % (PP·"),
        ([], replace(HEADER, flags={**HEADER.flags, "data-parallel-size": 0}), "has 0 --data-parallel-size"),
        ([], replace(HEADER, flags={**HEADER.flags, "num-layers": "2"}), "has 2 --num-layers"),
        ([], replace(HEADER, flags={}), "has no --global-batch-size"),
    ],
)
def test_bad_input_is_one_line(command, words, header, said):
    status, out, err = command([[step()]], *words, header=header)
    assert status == 2 and not out and said in err and err.count("\n") == 1


def test_a_ledger_that_is_missing_or_has_no_step_is_refused(command, tmp_path):
    assert "has no training step" in command([[]])[2]
    assert command([], name="other.jsonl")[0] == 2
