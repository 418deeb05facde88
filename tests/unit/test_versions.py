"""What is refused with one version of Megatron only, and the page that says what was seen to work."""

from argparse import Namespace
from pathlib import Path

import pytest

from megatron_basp.errors import ConfigurationError
from megatron_basp.megatron.refusals import REFUSALS, REFUSED_WITH, refuse_unsupported_with
from megatron_basp.megatron.versions import IN_DEVELOPMENT, RELEASED, SUPPORTED

PAGE = Path(__file__).parents[2] / "docs" / "versions.md"
SOME_HAVE = {refusal.name: refusal.versions for refusal in REFUSALS if refusal.versions is not None}


def arguments(**given):
    names = [refusal.name for refusals in REFUSED_WITH.values() for refusal in refusals]
    unset = dict.fromkeys([*names, *SOME_HAVE, "num_experts", "calculate_per_token_loss"])
    return Namespace(**unset | given)


def test_a_feature_not_shown_with_a_version_is_refused_with_that_one_only():
    for minor, refusals in REFUSED_WITH.items():
        for refusal in refusals:
            flag = refusal.flag or "--" + refusal.name.replace("_", "-")
            with pytest.raises(ConfigurationError, match=rf"^{flag} \(got 1\) .* and Megatron-Core {minor}: .*0\.19"):
                refuse_unsupported_with(minor, arguments(**{refusal.name: 1}), "basp")
            refuse_unsupported_with("0.19", arguments(**{refusal.name: 1}), "basp")
        refuse_unsupported_with(minor, arguments(), "basp")


def test_experts_are_balanced_by_the_tokens_of_one_rank_in_0_18():
    args = arguments(num_experts=4, calculate_per_token_loss=True)
    with pytest.raises(ConfigurationError, match=r"^--calculate-per-token-loss with .* Megatron-Core 0\.18"):
        refuse_unsupported_with("0.18", args, "basp")
    refuse_unsupported_with("0.19", args, "basp")
    refuse_unsupported_with("0.18", arguments(num_experts=4), "basp")
    refuse_unsupported_with("0.18", arguments(calculate_per_token_loss=True), "basp")


@pytest.mark.parametrize("name", SOME_HAVE)
def test_an_argument_that_only_some_versions_have_is_not_passed_over_in_these(name):
    args = Namespace(**dict.fromkeys(SOME_HAVE.keys() - {name}))
    with pytest.raises(AttributeError, match=f"'{name}'"):
        refuse_unsupported_with(SOME_HAVE[name][0], args, "basp")


def test_tables_name_supported_versions_and_no_argument_twice():
    named = {minor for refusal in REFUSALS for minor in refusal.versions or ()} | REFUSED_WITH.keys() | set(RELEASED)
    assert named <= SUPPORTED.keys() == {*RELEASED, IN_DEVELOPMENT.rpartition(".")[0]}
    everywhere = {refusal.name for refusal in REFUSALS}
    assert not [r.name for refusals in REFUSED_WITH.values() for r in refusals if r.name in everywhere]


def test_the_page_of_versions_has_what_each_was_seen_to_work_with():
    page = PAGE.read_text()
    for minor, seen in SUPPORTED.items():
        assert f"| {minor} | {seen} |" in page
