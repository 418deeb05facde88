"""Layers of YAML: which one wins, and what is said of those that cannot be. Without Megatron."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NoReturn

import pytest

from megatron_basp.errors import ConfigurationError
from megatron_basp.megatron.config_flags import config_words
from megatron_basp.run_config import load_config


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigurationError(message)


@pytest.fixture
def parser() -> Parser:
    parser = Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--num-layers", type=int)
    parser.add_argument("--lr", type=float)
    parser.add_argument("--swiglu", action="store_true")
    parser.add_argument("--disable-bias-linear", action="store_false", dest="add_bias_linear")
    parser.add_argument("--add-bias-linear", action="store_true")
    parser.add_argument("--data-path", nargs="*")
    parser.add_argument("--split", type=str)
    return parser


def words(parser: Parser, folder: Path, *layers: str, given: str = "") -> list[str]:
    files = []
    for number, layer in enumerate(layers):
        files.append(folder / f"{number}.yaml")
        files[-1].write_text(layer)
    return config_words(load_config(files).settings, parser, given.split())


def test_each_kind_of_value_becomes_the_words_of_its_flag(parser: Parser, tmp_path: Path) -> None:
    found = words(parser, tmp_path, "num-layers: 2\nlr: 3e-4\nswiglu: true\ndata-path: [0.5, a, 0.5, b]\nsplit: 9,1,0")
    assert found == "--num-layers 2 --lr 3e-4 --swiglu --data-path 0.5 a 0.5 b --split 9,1,0".split()


def test_a_later_layer_wins_and_the_command_line_over_all(parser: Parser, tmp_path: Path) -> None:
    first = "num-layers: 2\nswiglu: true\ndisable-bias-linear: true\nlr: 1.0"
    assert words(parser, tmp_path, first, "num-layers: 4\nswiglu: false\nadd-bias-linear: true") == (
        "--lr 1.0 --num-layers 4 --add-bias-linear".split()
    )
    assert words(parser, tmp_path, first, "lr: null", given="--num-layers=8 --split 1") == (
        "--swiglu --disable-bias-linear".split()
    )


def test_what_a_file_includes_lies_below_it_in_its_order(parser: Parser, tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "a.yaml").write_text("include: b.yaml\nnum-layers: 1\nnodes: 4")
    (tmp_path / "below" / "b.yaml").write_text("num-layers: 2\nlr: 2.0")
    (tmp_path / "c.yaml").write_text("lr: 3.0")
    top = "include: [below/a.yaml, c.yaml]\nnodes: 2\nsplit: '1'"
    assert words(parser, tmp_path, top) == "--num-layers 1 --lr 3.0 --split 1".split()
    assert load_config([tmp_path / "0.yaml"]).nodes == 2
    assert load_config([tmp_path / "c.yaml"]).nodes is None


@pytest.mark.parametrize(
    ("layer", "said"),
    [
        ("num-layer: 2", "there is no flag --num-layer: did you mean num-layers?"),
        ("num_layers: 2", "there is no flag --num_layers: did you mean num-layers?"),
        ("qqqqqq: 2", "there is no flag --qqqqqq, nor one with a name like it"),
        ("num-layers: two", "num-layers: argument --num-layers: invalid int value: 'two'"),
        ("num-layers: [1, 2]", "num-layers: unrecognized arguments: 2"),
        ("num-layers: true", "num-layers takes a value, got true; null leaves it out"),
        ("swiglu: 1", "swiglu is a switch, true or false, got 1"),
        ("lr: 1.0\nlr: 2.0", "lr stands there 2 times"),
        ("lr: {a: 1}", "lr must be a word, a number"),
        ("split: 2026-01-01", "split must be a word, a number"),
        ("data-path: [a, null]", "data-path must be a word, a number"),
        ("3: 4", "a key must be a flag of Megatron's, got 3"),
        ("- num-layers", "must hold keys and values, got a list"),
        ("lr: [1", "is no YAML"),
        ("lr: !!python/object/apply:os.system [ls]", "is no YAML: could not determine a constructor"),
        ("include: {a: b}", "include must be a list of files"),
        ("include: nowhere.yaml", "nowhere.yaml cannot be read: No such file"),
        ("include: 0.yaml", "includes itself: 0.yaml > 0.yaml"),
        ("nodes: 0", "nodes must be a whole number, 1 or more, got 0"),
    ],
)
def test_what_cannot_be_is_said_in_one_line_with_the_file(
    parser: Parser, tmp_path: Path, layer: str, said: str
) -> None:
    with pytest.raises(ConfigurationError) as error:
        words(parser, tmp_path, layer)
    assert said in str(error.value) and "\n" not in str(error.value)
    assert ".yaml" in str(error.value)
