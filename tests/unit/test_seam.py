"""Replacing a function of Megatron, on stand-in modules: only what is known is replaced, and a stranger is named."""

import sys
import types

import pytest

from megatron_basp.megatron.seam import replace
from megatron_basp.megatron.versions import MegatronMismatch, check_version


@pytest.fixture
def module(monkeypatch):
    """Make a module that `import` finds."""

    def make(name, **contents):
        made = types.ModuleType(name)
        vars(made).update(contents)
        monkeypatch.setitem(sys.modules, name, made)
        return made

    # The version comes from here; Megatron's own would import all of Megatron, and this process must stay free of it.
    make("megatron.core.package_info", __version__="0.99.1")
    return make


def add(first, second=1):
    return first + second


def tenfold(original):
    return lambda *args, **kwargs: 10 * original(*args, **kwargs)


def mismatch(*args, **kwargs):
    """The message of a refusal: one line that names the version and the remedy."""
    with pytest.raises(MegatronMismatch) as caught:
        replace(*args, **kwargs)
    message = str(caught.value)
    assert "\n" not in message
    assert (
        "Megatron-Core 0.99.1" in message
        and "use megatron-core" in message
        and "or a release of megatron_basp" in message
    )
    return message


def test_a_function_is_replaced_by_what_is_made_of_the_original(module):
    target = module("stand_in", add=add)
    replace("stand_in:add", ["first", "second"], tenfold)
    assert target.add(1, second=2) == 30


def test_a_method_is_replaced_for_all_instances(module):
    class Adder:
        def add(self, first):
            return first + 1

    module("stand_in", Outer=types.SimpleNamespace(Adder=Adder), Adder=Adder)
    adder = Adder()
    replace("stand_in:Adder.add", ["first"], tenfold)
    assert adder.add(1) == 20
    replace("stand_in:Outer.Adder.add", [], tenfold)
    assert adder.add(1) == 200


def test_modules_that_imported_the_function_get_the_same_replacement(module):
    target, user, other = module("stand_in", add=add), module("user", add=add), module("other", add=add)
    replace("stand_in:add", [], tenfold, also_in=["user", "other"])
    assert target.add is user.add is other.add
    assert user.add(1) == 20


@pytest.mark.parametrize(
    ("target", "named"),
    [
        ("stand_in:subtract", "subtract"),
        ("stand_in:Adder.add", "Adder"),
        ("stand_in:add.inner", "inner"),
        ("no_such_module_here:add", "no_such_module_here"),
    ],
)
def test_a_target_that_is_not_there_is_named(module, target, named):
    module("stand_in", add=add)
    message = mismatch(target, [], tenfold)
    assert f"hooks {target}" in message and named in message.split("Megatron-Core")[1]


def test_a_parameter_that_the_target_no_longer_takes_is_named(module):
    target = module("stand_in", add=add)
    message = mismatch("stand_in:add", ["first", "third", "fourth"], tenfold)
    assert "hooks stand_in:add" in message and "it takes no parameter third, fourth" in message
    assert target.add is add


@pytest.mark.parametrize("contents", [{"add": lambda first, second=1: 0}, {}], ids=["another function", "nothing"])
def test_a_module_that_holds_something_else_is_named_and_nothing_is_replaced(module, contents):
    target, user, stranger = module("stand_in", add=add), module("user", add=add), module("stranger", **contents)
    message = mismatch("stand_in:add", ["first"], tenfold, also_in=["user", "stranger"])
    assert "hooks stand_in:add" in message and "stranger does not hold the same add" in message
    assert target.add is add and user.add is add
    assert getattr(stranger, "add", None) is contents.get("add")


def test_a_mismatch_makes_no_replacement_at_all(module):
    module("stand_in", add=add)

    def make(original):
        raise AssertionError("called for a target that is not known")

    mismatch("stand_in:add", ["third"], make)
    mismatch("stand_in:add", [], make, also_in=["sys"])


def test_a_target_of_other_versions_is_left_alone_whether_it_is_there_or_not(module):
    target = module("stand_in", add=add)
    replace("stand_in:add", ["first"], tenfold, versions=("0.98",))
    replace("stand_in:no_such_name", [], tenfold, versions=("0.98",))
    assert target.add is add
    replace("stand_in:add", ["first"], tenfold, versions=("0.98", "0.99"))
    assert target.add(1, 2) == 30


@pytest.mark.parametrize("version", ["0.17.1", "0.20.1", "0.99.1", "1.19.0", "0.190.0"])
def test_a_version_that_was_never_tried_is_refused_by_name_with_the_remedy(module, version):
    module("megatron.core.package_info", __version__=version)
    with pytest.raises(MegatronMismatch, match=rf"this is {version}: use megatron-core 0\.18\.x or 0\.19\.x, or a"):
        check_version()


@pytest.mark.parametrize("version", ["0.18.7", "0.19.7", "0.20.0", "0.20.0+d98e8a6"])
def test_any_release_of_a_version_that_was_tried_is_accepted(module, version):
    module("megatron.core.package_info", __version__=version)
    check_version()
