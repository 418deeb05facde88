"""Layers of multi-token prediction in the ledger and in the guard, on stand-ins for Megatron's modules."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from megatron_basp.attention import BaspAttention
from megatron_basp.ledger import Collective, Ledger
from megatron_basp.megatron.multi_token import attentions_in_a_pass, number_behind_decoder, weighing_losses
from megatron_basp.megatron.runtime import Runtime
from megatron_basp.megatron.schedule import check_exchanges
from megatron_basp.plan import Limits, PlanHolder, plan_batch
from tests.settings import small_settings


def layers(count):
    """Attention as Megatron numbers it: from 1, in the decoder and behind it."""
    return torch.nn.ModuleList(BaspAttention(None, PlanHolder(), {}, Ledger(), 1 + i) for i in range(count))


def model(decoder, predicting=0, repeated=False, depth=2):
    built = torch.nn.Module()
    built.config = SimpleNamespace(num_layers=4, mtp_use_repeated_layer=repeated, mtp_num_layers=depth)
    built.decoder = layers(decoder)
    if predicting:
        built.mtp = layers(predicting)
    return built


def numbers(built):
    return [module.layer for module in built.modules() if isinstance(module, BaspAttention)]


def test_predicting_layers_are_numbered_behind_all_of_the_decoder_not_only_this_stages():
    built = model(decoder=2, predicting=2)
    number_behind_decoder(built)
    assert numbers(built) == [1, 2, 5, 6]


def test_a_stage_without_prediction_keeps_its_numbers():
    built = model(decoder=2)
    number_behind_decoder(built)
    assert numbers(built) == [1, 2]
    assert attentions_in_a_pass(built) == Counter({1: 1, 2: 1})


@pytest.mark.parametrize(("repeated", "expected"), [(False, {1: 1, 5: 1}), (True, {1: 1, 5: 3})])
def test_a_repeated_layer_attends_once_for_each_depth(repeated, expected):
    built = model(decoder=1, predicting=1, repeated=repeated, depth=3)
    number_behind_decoder(built)
    assert attentions_in_a_pass(built) == Counter(expected)


@pytest.mark.parametrize("found", [0, 3, 13])
def test_a_predicting_layer_that_did_not_exchange_for_each_depth_is_refused(found):
    plan = plan_batch((8,) * 1, 2, Limits(2, 2))
    first, fifth = (Collective("exchange", "qkv", "a group", 2, layer, 0, "forward") for layer in (1, 5))
    counted = Counter({first: 2, fifth: found})
    with pytest.raises(RuntimeError, match=f"layer 5 exchanged {found} times in groups of 2 .* have 6 times"):
        check_exchanges(plan, Counter({1: 1, 5: 3}), {2: 2}, counted, rank=0)
    counted[fifth] = 6
    check_exchanges(plan, Counter({1: 1, 5: 3}), {2: 2}, counted, rank=0)


def test_prediction_without_labels_is_refused():
    def process_mtp_loss(hidden_states, labels, loss_mask, compute_language_model_loss, config, cp_group=None):
        raise AssertionError

    runtime = Runtime()
    runtime.set_settings(small_settings())
    with pytest.raises(ValueError, match="without labels"):
        weighing_losses(runtime, process_mtp_loss)(None, None, None, None, SimpleNamespace())
