"""Data preparation: what was written decodes to the very text, and no interruption leaves anything else behind.

Megatron is imported in a process of its own: once imported, the CPU backend could no longer be installed in this one.
"""

import gc
import json
import multiprocessing
import os
import runpy
import shutil
import signal
import subprocess
import sys
import sysconfig
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from megatron_basp.errors import ConfigurationError
from megatron_basp.megatron.text_dataset import check_text_dataset, prepare_text_dataset
from megatron_basp.text_files import sample_texts, standard_library_files
from megatron_basp.tokenizer import END_OF_DOCUMENT, PADDING, train_tokenizer

SCRIPT = Path(__file__).parents[2] / "scripts" / "data" / "prepare_text.py"
TEXTS = [
    "def add(a, b):\n    return a + b\n",
    "import os\r\n\r\nprint(os.name)",
    "# ein Satz, kürzer\n",
    "x = 1  # 漢字 🙂\n",
]


# What runs in Megatron's process.


def import_megatron():
    from megatron.core.datasets import indexed_dataset  # noqa: F401

    gc.freeze()  # Megatron collects garbage for every shard that it merges


class Killed(BaseException):
    """Not an Exception, as a kill is none: nothing may catch it."""


def prepare(files, prefix, tokenizer_folder, kill_at=None, **options):
    """The data set (None if killed before the disk was touched `kill_at + 1` times), and the documents tokenized."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    steps, fsync, replace = iter(range(10**6)), os.fsync, os.replace

    def step_then(action):
        def act(*args):
            if next(steps) == kill_at:
                raise Killed
            return action(*args)

        return act

    add_document = mock.patch.object(
        IndexedDatasetBuilder, "add_document", autospec=True, side_effect=IndexedDatasetBuilder.add_document
    )
    with (
        mock.patch.object(os, "fsync", step_then(fsync)),
        mock.patch.object(os, "replace", step_then(replace)),
        add_document as tokenized,
    ):
        try:
            dataset = prepare_text_dataset(files, prefix, tokenizer_folder, **options)
        except Killed:
            dataset = None
    return dataset, tokenized.call_count


def prepare_in_forks(count, *args):
    """The exit codes of `count` processes that prepare the same prefix at the same time."""
    children = []
    for _ in range(count):
        if not (child := os.fork()):
            code = 1
            try:
                prepare(*args)
                code = 0
            finally:
                os._exit(code)
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def prepare_until_sigkill(files, prefix, tokenizer_folder, finished_shards, **options):
    """The exit code of a process that is killed as soon as so many shards are finished."""
    last = f"{prefix}.parts/{finished_shards - 1:06d}.json"
    replace = os.replace

    def replace_and_die(source, target):
        replace(source, target)
        if str(target) == last:
            os.kill(os.getpid(), signal.SIGKILL)

    with mock.patch.object(os, "replace", replace_and_die):
        if not (child := os.fork()):
            try:
                prepare_text_dataset(files, prefix, tokenizer_folder, **options)
            finally:
                os._exit(1)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def read(prefix):
    """The type of the tokens, and the documents as Megatron reads them."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    dataset = IndexedDataset(str(prefix))
    assert len(dataset.document_indices) == len(dataset) + 1
    return dataset.index.dtype.__name__, [document.tolist() for document in dataset[:]]


def megatron_tokenizer(folder):
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer

    unset = dict.fromkeys(("chat_template", "vocab_file", "merge_file", "special_tokens", "metadata_path"))
    switches = dict.fromkeys(
        ("tokenizer_hf_no_use_fast", "tokenizer_hf_no_include_special_tokens", "trust_remote_code", "pad_vocab_size"),
        False,
    )
    flags = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(folder)}
    tokenizer = build_tokenizer(SimpleNamespace(**unset, **switches, **flags))
    return {name: getattr(tokenizer, name) for name in ("eod", "pad", "vocab_size")}


def run_script(*arguments):
    command = mock.patch.object(sys, "argv", [str(SCRIPT), *map(str, arguments)])
    with command, redirect_stdout(StringIO()) as output, pytest.raises(SystemExit) as end:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    return end.value.code, output.getvalue()


# What the tests share.


@pytest.fixture(scope="module")
def megatron():
    """Call a function of this file where Megatron is imported."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=import_megatron) as process:
        yield lambda function, *args, **options: process.submit(function, *args, **options).result()


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory):
    return train_tokenizer(TEXTS, tmp_path_factory.mktemp("tokenizer") / "trained", vocab_size=300)


def write(folder, texts):
    files = [folder / f"{number}.txt" for number in range(len(texts))]
    for file, text in zip(files, texts, strict=True):
        file.write_bytes(text.encode())
    return files


def write_jsonl(path, texts, key="text"):
    path.write_text("".join(json.dumps({key: text}, ensure_ascii=False) + "\n" for text in texts), newline="")
    return path


def decode(tokenizer_folder, documents):
    """The texts; every document ends with eod, which stands nowhere else."""
    tokenizer = Tokenizer.from_file(f"{tokenizer_folder}/tokenizer.json")
    eod = tokenizer.token_to_id(END_OF_DOCUMENT)
    assert all(tokens.index(eod) == len(tokens) - 1 for tokens in documents)
    return [tokenizer.decode(tokens[:-1], skip_special_tokens=False) for tokens in documents]


def final_files(prefix):
    return [path for path in (Path(f"{prefix}{end}") for end in (".bin", ".idx", ".manifest.json")) if path.exists()]


# Content.


@settings(max_examples=25, deadline=None)
@given(
    texts=st.lists(st.text(st.characters(codec="utf-8"), min_size=1), min_size=1, max_size=6),
    jsonl=st.booleans(),
    shard_bytes=st.integers(1, 100),
)
def test_documents_decode_to_the_very_texts(megatron, tokenizer_folder, texts, jsonl, shard_bytes):
    with TemporaryDirectory() as folder:
        folder = Path(folder)
        files = [write_jsonl(folder / "texts.jsonl", texts)] if jsonl else write(folder, texts)
        dataset, _ = megatron(prepare, files, folder / "out", tokenizer_folder, shard_bytes=shard_bytes)
        _, documents = megatron(read, folder / "out")
    assert decode(tokenizer_folder, documents) == texts
    assert (dataset.documents, dataset.tokens, dataset.skipped) == (len(texts), sum(map(len, documents)), 0)


def test_a_text_that_spells_a_special_token_does_not_end_its_document(megatron, tokenizer_folder, tmp_path):
    text = f"a {END_OF_DOCUMENT}{PADDING} b"
    megatron(prepare, write(tmp_path, [text]), tmp_path / "out", tokenizer_folder)
    assert decode(tokenizer_folder, megatron(read, tmp_path / "out")[1]) == [text]


def test_text_and_jsonl_mix_and_lines_without_text_are_counted(megatron, tokenizer_folder, tmp_path):
    lines = write_jsonl(tmp_path / "lines.jsonl", ["first", "", "second", ""], key="content")
    with lines.open("a") as stream:
        stream.write("  \n")
    files = [*write(tmp_path, ["before"]), lines]
    options = {"json_key": "content", "shard_bytes": 1}
    dataset, _ = megatron(prepare, files, tmp_path / "out", tokenizer_folder, **options)
    assert decode(tokenizer_folder, megatron(read, tmp_path / "out")[1]) == ["before", "first", "second"]
    assert (dataset.documents, dataset.skipped) == (3, 3)


@pytest.mark.parametrize(("vocab_size", "dtype"), [(300, "uint16"), (70_000, "int32")])
def test_tokens_take_the_type_that_megatron_would_choose(megatron, tmp_path, vocab_size, dtype):
    vocabulary = {END_OF_DOCUMENT: 0} | {f"word{number}": number for number in range(1, vocab_size)}
    Tokenizer(models.WordLevel(vocabulary, unk_token=END_OF_DOCUMENT)).save(str(tmp_path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END_OF_DOCUMENT}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    megatron(prepare, write(tmp_path, [f"word{vocab_size - 1}"]), tmp_path / "out", tmp_path)
    assert megatron(read, tmp_path / "out") == (dtype, [[vocab_size - 1, 0]])


def test_a_tokenizer_that_truncates_and_pads_does_neither_here(megatron, tokenizer_folder, tmp_path):
    other = shutil.copytree(tokenizer_folder, tmp_path / "other")
    tokenizer = Tokenizer.from_file(f"{other}/tokenizer.json")
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=10**4)
    tokenizer.save(f"{other}/tokenizer.json")
    megatron(prepare, write(tmp_path, TEXTS), tmp_path / "out", other)
    assert decode(tokenizer_folder, megatron(read, tmp_path / "out")[1]) == TEXTS


# Interruptions and changes.


def test_killed_between_shards_leaves_no_final_file_and_resumes_after_them(megatron, tokenizer_folder, tmp_path):
    prefix = tmp_path / "out"
    files = [*write(tmp_path, TEXTS), write_jsonl(tmp_path / "lines.jsonl", TEXTS)]
    one_document_a_shard = {"shard_bytes": 1}
    code = megatron(prepare_until_sigkill, files, prefix, tokenizer_folder, 6, **one_document_a_shard)
    assert code == -signal.SIGKILL
    assert final_files(prefix) == []
    dataset, tokenized = megatron(prepare, files, prefix, tokenizer_folder, **one_document_a_shard)
    assert (dataset.documents, tokenized) == (8, 2)
    assert decode(tokenizer_folder, megatron(read, prefix)[1]) == TEXTS + TEXTS
    assert not Path(f"{prefix}.parts").exists()


def test_killed_at_any_step_of_a_rebuild_shows_the_old_data_or_the_new_or_none(megatron, tokenizer_folder, tmp_path):
    prefix, old, new = tmp_path / "out", TEXTS[:1], TEXTS[1:3]
    seen = []
    for step in range(100):
        shutil.rmtree(f"{prefix}.parts", ignore_errors=True)
        megatron(prepare, write(tmp_path, old), prefix, tokenizer_folder)
        files = write(tmp_path, new)
        dataset, _ = megatron(prepare, files, prefix, tokenizer_folder, kill_at=step, shard_bytes=1)
        if Path(f"{prefix}.idx").exists():
            check_text_dataset(prefix)
            seen.append(decode(tokenizer_folder, megatron(read, prefix)[1]))
        else:
            seen.append(None)
        if dataset is not None:
            break
        megatron(prepare, files, prefix, tokenizer_folder)
        assert decode(tokenizer_folder, megatron(read, prefix)[1]) == new
    assert [text for text, after in zip(seen, [*seen[1:], 0], strict=True) if text != after] == [old, None, new]


def test_unchanged_rerun_does_nothing(megatron, tokenizer_folder, tmp_path):
    files, prefix = write(tmp_path, TEXTS), tmp_path / "out"
    first, _ = megatron(prepare, files, prefix, tokenizer_folder)
    before = [(path, path.stat().st_mtime_ns, path.stat().st_ino) for path in final_files(prefix)]
    assert megatron(prepare, files, prefix, tokenizer_folder) == (first, 0)
    assert [(path, path.stat().st_mtime_ns, path.stat().st_ino) for path in final_files(prefix)] == before


@pytest.mark.parametrize("change", ["source", "order", "tokenizer", "damage"])
def test_whatever_changes_is_built_anew(megatron, tokenizer_folder, tmp_path, change):
    files, prefix, tokenizer = write(tmp_path, TEXTS), tmp_path / "out", tokenizer_folder
    megatron(prepare, files, prefix, tokenizer)
    cached = prefix / "cache" / "GPTDataset_indices" / "of-the-old-data.npy"
    cached.parent.mkdir(parents=True)
    cached.touch()
    if change == "source":
        files[1].write_text("other")
    elif change == "order":
        files.reverse()
    elif change == "tokenizer":
        tokenizer = train_tokenizer(["something else"], tmp_path / "other", vocab_size=260)
    else:
        os.truncate(f"{prefix}.bin", 2)
    _, tokenized = megatron(prepare, files, prefix, tokenizer)
    assert tokenized == len(files)
    assert decode(tokenizer, megatron(read, prefix)[1]) == [file.read_bytes().decode() for file in files]
    assert not cached.exists()


def test_shards_of_other_sources_are_not_continued_from(megatron, tokenizer_folder, tmp_path):
    files, prefix = write(tmp_path, TEXTS), tmp_path / "out"
    megatron(prepare_until_sigkill, files, prefix, tokenizer_folder, 2, shard_bytes=1)
    files[0].write_text("changed after its shard was finished")
    _, tokenized = megatron(prepare, files, prefix, tokenizer_folder)
    assert tokenized == len(TEXTS)
    assert decode(tokenizer_folder, megatron(read, prefix)[1])[0] == files[0].read_text()


def test_processes_that_prepare_the_same_prefix_take_turns(megatron, tokenizer_folder, tmp_path):
    texts = TEXTS * 10
    arguments = (write(tmp_path, texts), tmp_path / "out", tokenizer_folder)
    assert megatron(prepare_in_forks, 3, *arguments) == [0, 0, 0]
    assert decode(tokenizer_folder, megatron(read, tmp_path / "out")[1]) == texts


# Checks and messages.


def cut(path, size_bytes):
    os.truncate(path, size_bytes)


@pytest.mark.parametrize(
    ("end", "damage", "message"),
    [
        (".bin", lambda path: path.unlink(), "missing"),
        (".idx", lambda path: path.unlink(), "missing"),
        (".bin", lambda path: cut(path, path.stat().st_size - 1), "half-written"),
        (".idx", lambda path: cut(path, path.stat().st_size - 1), "half-written"),
        (".idx", lambda path: cut(path, 20), "half-written"),
        (".idx", lambda path: cut(path, 0), "cut off in its header"),
        (".idx", lambda path: path.write_bytes(b"something else" * 10), "not a Megatron index"),
    ],
)
def test_a_damaged_file_is_named_with_the_command_that_makes_it(prepared, tmp_path, end, damage, message):
    for path in final_files(prepared):
        shutil.copy(path, tmp_path)
    prefix = tmp_path / prepared.name
    check_text_dataset(prefix)
    damage(Path(f"{prefix}{end}"))
    with pytest.raises(ConfigurationError) as error:
        check_text_dataset(prefix)
    line = str(error.value)
    assert line.startswith(f"{prefix}{end}: ") and message in line and "\n" not in line
    assert line.endswith(f"python scripts/data/prepare_text.py FILE… --output {prefix}")


@pytest.fixture(scope="module")
def prepared(megatron, tokenizer_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("prepared")
    megatron(prepare, write(folder, TEXTS), folder / "out", tokenizer_folder)
    return folder / "out"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"gr\xfc\xdfe", "a.txt: not UTF-8 at byte 2 (0xfc)"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n', "a.jsonl: not UTF-8 at byte 24 (0xff)"),
        ("a.jsonl", b'{"text": "a"}\n{"body": "b"}\n', 'a.jsonl:2: no text under the key "text"'),
        ("a.jsonl", b'{"text": "a"}\n\n["text"]\n', 'a.jsonl:3: no text under the key "text"'),
        ("a.jsonl", b'{"text": "a"\n', "a.jsonl:1: not JSON"),
        ("a.jsonl", b'{"text": "\\ud800"}\n', "a.jsonl:1: not JSON, or no Unicode in it"),
        ("a.jsonl", b'{"text": ""}\n\n', "a.jsonl: no documents, all 2 lines are without text"),
        ("a.txt", b"", "a.txt: an empty file"),
        ("a.txt", None, "a.txt: no such file"),
    ],
)
def test_bad_input_is_named_by_file_and_place(megatron, tokenizer_folder, tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigurationError) as error:
        megatron(prepare, [tmp_path / name], tmp_path / "out", tokenizer_folder)
    assert str(error.value).startswith(f"{tmp_path}/{message}") and "\n" not in str(error.value)
    assert final_files(tmp_path / "out") == []


def test_a_folder_without_a_tokenizer_and_an_empty_list_of_files_are_refused(tmp_path, tokenizer_folder):
    with pytest.raises(ConfigurationError, match="no tokenizer here"):
        prepare_text_dataset(write(tmp_path, TEXTS), tmp_path / "out", tmp_path)
    with pytest.raises(ConfigurationError, match="no files given"):
        prepare_text_dataset([], tmp_path / "out", tokenizer_folder)


# Tokenizer, standard library, script.


def test_megatron_finds_end_of_document_padding_and_size_in_the_trained_tokenizer(megatron, tokenizer_folder):
    tokenizer = Tokenizer.from_file(f"{tokenizer_folder}/tokenizer.json")
    assert megatron(megatron_tokenizer, tokenizer_folder) == {
        "eod": tokenizer.token_to_id(END_OF_DOCUMENT),
        "pad": tokenizer.token_to_id(PADDING),
        "vocab_size": tokenizer.get_vocab_size(),
    }


def test_a_tokenizer_is_trained_again_only_for_other_texts(tmp_path):
    folder = tmp_path / "trained"
    files = [train_tokenizer(TEXTS, folder, 270) / "tokenizer.json"]
    first = files[0].stat().st_ino, files[0].read_text()
    train_tokenizer(iter(TEXTS), folder, 270)
    assert (files[0].stat().st_ino, files[0].read_text()) == first
    train_tokenizer(["other " * 50], folder, 270)
    assert files[0].read_text() != first[1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["trained", "trained.lock"]


def test_a_tokenizer_is_not_trained_over_files_of_others_nor_without_room_or_text(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigurationError, match="files of another origin"):
        train_tokenizer(TEXTS, tmp_path)
    with pytest.raises(ConfigurationError, match="at least 258"):
        train_tokenizer(TEXTS, tmp_path / "new", vocab_size=257)
    with pytest.raises(ConfigurationError, match="no text"):
        train_tokenizer([""], tmp_path / "new")


def test_a_sample_stops_at_its_limit(tmp_path):
    files = write(tmp_path, ["12345", "67890", "abc"])
    assert list(sample_texts(files, limit_bytes=6)) == ["12345", "67890"]
    assert list(sample_texts(files)) == ["12345", "67890", "abc"]


def test_standard_library_comes_in_one_order_that_is_not_by_name_and_without_tests():
    files = standard_library_files()
    assert files == standard_library_files() != sorted(files)
    assert len(set(files)) == len(files) > 200
    assert sum(file.stat().st_size for file in files) > 5_000_000
    names = [file.relative_to(sysconfig.get_path("stdlib")) for file in files]
    assert not any({"test", "tests", "site-packages"} & set(name.parts) for name in names)


def test_a_standard_library_without_sources_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(ConfigurationError, match="no Python sources"):
        standard_library_files()


def test_script_trains_prepares_and_prints_the_flags(megatron, tmp_path):
    prefix = tmp_path / "out"
    code, output = megatron(run_script, *write(tmp_path, TEXTS), "--output", prefix, "--vocab-size", 280)
    tokenizer_folder = tmp_path / "out-tokenizer"
    tokenizer = f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {tokenizer_folder}"
    assert (code, output) == (0, f"--data-path {prefix} {tokenizer}\n")
    assert decode(tokenizer_folder, megatron(read, prefix)[1]) == TEXTS


def test_script_exits_with_2_and_one_line_on_bad_input(tmp_path):
    command = [sys.executable, SCRIPT, tmp_path / "none.txt", "--output", tmp_path / "out"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == f"prepare_text.py: {tmp_path}/none.txt: no such file\n"
