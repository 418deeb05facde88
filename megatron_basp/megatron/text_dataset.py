"""Text files to the `.bin`/`.idx` pair that Megatron trains on.

    files ──> documents ──> shards in PREFIX.parts ──> PREFIX.bin, PREFIX.idx, PREFIX.manifest.json

A shard counts once its JSON record stands beside it, so a run that was killed continues after the last record. The
manifest names sources and tokenizer: what has not changed is left alone, what has is built anew.
"""

import fcntl
import hashlib
import json
import os
import shutil
import struct
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from megatron_basp.errors import ConfigurationError

END_OF_DOCUMENT = "<|endoftext|>"
PADDING = "<|padding|>"
TOKENIZER_FILES = ("tokenizer*", "vocab*", "merges*", "special_tokens_map.json", "added_tokens.json")
SHARD_BYTES = 64 * 2**20
ENCODE_BYTES = 4 * 2**20  # a token costs some 70 bytes while it is encoded: this bounds memory, not speed

# As megatron/core/datasets/indexed_dataset.py writes it: magic, version, type code, sequences, document boundaries;
# then an int32 length and an int64 pointer per sequence, an int64 per boundary. The type codes are those of its DType.
INDEX_HEADER = struct.Struct("<9sQBQQ")
INDEX_MAGIC = b"MMIDIDX\x00\x00"
ITEM_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 8, 7: 4, 8: 2}


@dataclass(frozen=True)
class TextDataset:
    """A prepared data set. `tokens` includes the ends of documents; `skipped` counts JSONL lines without text."""

    prefix: Path
    tokenizer_folder: Path
    vocab_size: int
    documents: int
    tokens: int
    skipped: int

    def megatron_flags(self) -> list[str]:
        """The arguments with which Megatron's `pretrain_gpt.py` reads this data set."""
        tokenizer = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(self.tokenizer_folder)]
        return ["--data-path", str(self.prefix), *tokenizer]


def standard_library_files() -> list[Path]:
    """The Python sources of the running interpreter's standard library: some 9 MB of real text without a download.

    Left out are tests, tables (`encodings`), applications that ship with Python, and what was installed beside it.
    The order is that of a hash of the name: Megatron's `--split` cuts by document, and by name the cut would fall
    between packages. This way each part of the split, and any leading sample, is drawn from all of them.

    Raises:
        ConfigurationError: there are no source files (the standard library may be zipped).
    """
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "dist-packages", "test", "tests", "encodings", "idlelib", "lib2to3", "turtledemo"}
    names = {path: path.relative_to(root) for path in root.rglob("*.py")}
    files = [path for path, name in names.items() if not left_out.intersection(name.parts) and path.stat().st_size]
    if not files:
        raise ConfigurationError(f"{root}: no Python sources of the standard library here; name files of your own")
    return sorted(files, key=lambda path: hashlib.sha256(names[path].as_posix().encode()).digest())


def sample_texts(files: Sequence[Path], *, limit_bytes: int = 3_000_000, json_key: str = "text") -> Iterator[str]:
    """The leading documents of `files` until `limit_bytes` of source are reached, to train a tokenizer on.

    Raises:
        ConfigurationError: as `prepare_text_dataset`, for what is read.
    """
    _sources(files)
    for document in next(_batches(_documents(files, json_key), limit_bytes)):
        yield document.text


def train_tokenizer(texts: Iterable[str], folder: Path, vocab_size: int = 4096) -> Path:
    """Train a byte-level byte-pair tokenizer (as GPT-2's) into a Hugging Face folder, and return the folder.

    Decoding gives back any text exactly. A folder is complete or not there, and one that was trained on the same
    texts is left as it is. `texts` are held in memory; `vocab_size` is an upper bound, short texts yield less.

    Raises:
        ConfigurationError: no text, a vocabulary too small for bytes, or a folder with files of another origin.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    texts, record, work = list(texts), folder / "trained_on.json", Path(f"{folder}.parts")
    # Padding has its own token: Megatron pads short samples with it, and masks the loss wherever it meets it.
    special_tokens, alphabet = [END_OF_DOCUMENT, PADDING], pre_tokenizers.ByteLevel.alphabet()
    smallest = len(special_tokens) + len(alphabet)
    if vocab_size < smallest:
        raise ConfigurationError(f"vocabulary size {vocab_size}: a byte-level tokenizer takes at least {smallest}")
    if not any(texts):
        raise ConfigurationError(f"{folder}: no text to train the tokenizer on")
    digest = hashlib.sha256()
    for text in texts:
        digest.update(text.encode() + b"\0")
    inputs = {"texts_sha256": digest.hexdigest(), "vocab_size": vocab_size}

    with _locked(folder):
        if _read_json(record) == inputs:
            return folder
        if folder.exists() and not record.exists() and any(folder.iterdir()):
            raise ConfigurationError(f"{folder}: holds files of another origin; use it as it is, or name a new folder")
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size, special_tokens=special_tokens, initial_alphabet=alphabet, show_progress=False
        )
        tokenizer.train_from_iterator(texts, trainer)
        shutil.rmtree(work, ignore_errors=True)
        (work / "new").mkdir(parents=True)
        tokenizer.save(f"{work}/new/tokenizer.json")
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",  # known to transformers 4 and 5, unlike what 5 would write
            "eos_token": END_OF_DOCUMENT,
            "pad_token": PADDING,
            "clean_up_tokenization_spaces": False,  # else decoding drops spaces before punctuation
        }
        _write_json(work / "new" / "tokenizer_config.json", config)
        _write_json(work / "new" / record.name, inputs)
        _flush(*(work / "new").iterdir())
        if folder.exists():
            folder.rename(work / "old")
        (work / "new").rename(folder)
        _flush(folder.parent)
        shutil.rmtree(work)
    return folder


def prepare_text_dataset(
    files: Sequence[Path],
    prefix: Path,
    tokenizer_folder: Path,
    *,
    json_key: str = "text",
    shard_bytes: int = SHARD_BYTES,
) -> TextDataset:
    """Tokenize `files` into `PREFIX.bin` and `PREFIX.idx`, in the order given, and end every document with eod.

    A `.jsonl` file is one document a line, any other file one document. A document is its text's tokens (no BOS),
    and eod stands nowhere else: where a text spells a special token, that is encoded as plain text.
    Imports Megatron when there is something to do: whoever wants its CPU backend installs that first.

    A rerun does nothing while sources (path, size, modification time), tokenizer and key are as the manifest says,
    continues after the last finished shard if it was interrupted, and else starts over. Processes that prepare the
    same prefix take turns. At no time is there an `.idx` whose `.bin` is not whole. Megatron keys its cache of
    sample indices by path alone: the one beside the data is removed with the data it was made from, one under
    `--data-cache-path` is yours to remove.

    Args:
        files: UTF-8 text or JSONL.
        prefix: path of the results without their endings.
        tokenizer_folder: Hugging Face folder of a "fast" tokenizer with an end-of-sequence token.
        json_key: where a line of JSONL keeps its text.
        shard_bytes: bytes of source in a shard: held in memory, and the most that an interruption loses.

    Raises:
        ConfigurationError: in one line: a file that is missing, empty, not UTF-8 or not JSONL with text under the
            key, no documents at all, a tokenizer that does not load, or sources that changed meanwhile.
    """
    inputs = {
        "sources": _sources(files),
        "tokenizer_sha256": _tokenizer_sha256(tokenizer_folder),
        "json_key": json_key,
    }
    parts = Path(f"{prefix}.parts")
    with _locked(prefix):
        manifest = _read_json(Path(f"{prefix}.manifest.json"))
        if manifest is None or manifest["inputs"] != inputs or _damage(prefix):
            counts = _build(files, parts, tokenizer_folder, inputs, shard_bytes)
            if _sources(files) != inputs["sources"]:
                raise ConfigurationError(f"{prefix}: the sources changed while they were read; run it again")
            manifest = {"inputs": inputs, "counts": counts}
            _publish(parts / "merged", prefix, manifest)
        shutil.rmtree(parts, ignore_errors=True)
    dataset = TextDataset(prefix, tokenizer_folder, **manifest["counts"])
    skipped = f", {dataset.skipped} lines without text skipped" if dataset.skipped else ""
    print(f"{prefix}: {dataset.documents} documents, {dataset.tokens} tokens{skipped}", file=sys.stderr)
    return dataset


def check_text_dataset(prefix: Path) -> None:
    """Check that `PREFIX.bin` and `PREFIX.idx` are there, whole, and fit each other in size. Needs no Megatron.

    Raises:
        ConfigurationError: in one line: which file is missing or half-written, and the command that makes it.
    """
    if damage := _damage(prefix):
        command = f"python scripts/data/prepare_text.py FILE… --output {prefix}"
        raise ConfigurationError(f"{damage}; make it with: {command}")


def _damage(prefix: Path) -> str | None:
    binary, index = Path(f"{prefix}.bin"), Path(f"{prefix}.idx")
    for path in (binary, index):
        if not path.is_file():
            return f"{path}: missing"
    with index.open("rb") as stream:
        header = stream.read(INDEX_HEADER.size).ljust(INDEX_HEADER.size, b"\0")
        magic, version, code, sequences, boundaries = INDEX_HEADER.unpack(header)
        if magic != INDEX_MAGIC or version != 1 or code not in ITEM_BYTES:
            return f"{index}: not a Megatron index, or cut off in its header"
        found, expected = index.stat().st_size, INDEX_HEADER.size + 12 * sequences + 8 * boundaries
        if found != expected:
            return f"{index}: half-written, {found} bytes where its header says {expected}"
        lengths = np.fromfile(stream, np.int32, sequences)
    found, expected = binary.stat().st_size, int(lengths.sum(dtype=np.int64)) * ITEM_BYTES[code]
    return f"{binary}: half-written, {found} bytes where {index.name} says {expected}" if found != expected else None


class _Document(NamedTuple):
    text: str
    size_bytes: int  # in the source
    after: tuple[int, int, int]  # where the next one begins: number of the file, byte offset in it, lines before


def _sources(files: Sequence[Path]) -> list[dict]:
    if not files:
        raise ConfigurationError("no files given; name at least one text or .jsonl file")
    for path in files:
        if not path.is_file() or not path.stat().st_size:
            raise ConfigurationError(f"{path}: {'an empty file; leave it out' if path.is_file() else 'no such file'}")
    stats = [(path.resolve(), path.stat()) for path in files]
    return [{"path": str(path), "bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns} for path, stat in stats]


def _documents(files: Sequence[Path], json_key: str, start: Sequence[int] = (0, 0, 0)) -> Iterator[_Document]:
    first, offset, line = start
    for number, path in enumerate(files[first:], first):
        if path.suffix == ".jsonl":
            with path.open("rb") as stream:
                stream.seek(offset)
                for raw in stream:
                    line += 1
                    text = _json_text(_decode(raw, path, offset), json_key, f"{path}:{line}")
                    offset += len(raw)
                    yield _Document(text, len(raw), (number, offset, line))
        else:
            raw = path.read_bytes()
            yield _Document(_decode(raw, path, 0), len(raw), (number + 1, 0, 0))
        offset = line = 0


def _decode(raw: bytes, path: Path, offset: int) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        found = f"byte {offset + error.start} (0x{raw[error.start]:02x})"
        raise ConfigurationError(f"{path}: not UTF-8 at {found}; convert it, as with iconv") from None


def _json_text(line: str, key: str, where: str) -> str:
    if not line.strip():
        return ""
    try:
        record = json.loads(line)
        text = record.get(key) if isinstance(record, dict) else None
        if not isinstance(text, str):
            raise ConfigurationError(f'{where}: no text under the key "{key}"; name the right one with --json-key')
        text.encode()  # JSON can spell half a surrogate pair, which is no text
    except (json.JSONDecodeError, UnicodeEncodeError) as error:
        raise ConfigurationError(f"{where}: not JSON, or no Unicode in it: {error}") from None
    return text


def _batches(documents: Iterable[_Document], limit_bytes: int) -> Iterator[list[_Document]]:
    batch, size_bytes = [], 0
    for document in documents:
        batch.append(document)
        size_bytes += document.size_bytes
        if size_bytes >= limit_bytes:
            yield batch
            batch, size_bytes = [], 0
    if batch:
        yield batch


def _tokenizer_sha256(folder: Path) -> str:
    files = sorted({path for pattern in TOKENIZER_FILES for path in folder.glob(pattern) if path.is_file()})
    if not files:
        raise ConfigurationError(f"{folder}: no tokenizer here; it takes a Hugging Face folder with a tokenizer.json")
    digest = hashlib.sha256()
    for path in files:
        digest.update(path.name.encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def _load_tokenizer(folder: Path):
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{folder}: the tokenizer does not load: {str(error).splitlines()[0]}") from error
    if not tokenizer.is_fast or tokenizer.eos_token_id is None:
        raise ConfigurationError(f'{folder}: it takes a "fast" tokenizer with an eos_token to end documents with')
    encoder = tokenizer.backend_tokenizer
    encoder.encode_special_tokens = True
    encoder.no_truncation()  # a tokenizer.json may ask for either
    encoder.no_padding()
    return tokenizer


def _build(files: Sequence[Path], parts: Path, tokenizer_folder: Path, inputs: dict, shard_bytes: int) -> dict:
    """Write the shards that are not finished, merge all into `parts/merged`, and return the manifest's counts."""
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    tokenizer = _load_tokenizer(tokenizer_folder)
    eod, encoder, dtype = tokenizer.eos_token_id, tokenizer.backend_tokenizer, DType.optimal_dtype(len(tokenizer))
    shards, (after, read) = _finished_shards(parts, inputs)
    sizes = [source["bytes"] for source in inputs["sources"]]
    done_bytes = sum(sizes[: after[0]]) + after[1]
    if shards:
        print(f"{parts}: {len(shards)} shards are finished, {done_bytes} of {sum(sizes)} bytes", file=sys.stderr)
    with tqdm(total=sum(sizes), initial=done_bytes, unit="B", unit_scale=True, desc="tokenize", disable=None) as bar:
        for documents in _batches(_documents(files, inputs["json_key"], after), shard_bytes):
            shard = f"{parts}/{len(shards):06d}"
            builder = IndexedDatasetBuilder(f"{shard}.bin", dtype)
            for batch in _batches(documents, ENCODE_BYTES):
                texts = [document.text for document in batch if document.text]
                for encoding in encoder.encode_batch_fast(texts, add_special_tokens=False):
                    builder.add_document([*encoding.ids, eod], [len(encoding.ids) + 1])
                bar.update(sum(document.size_bytes for document in batch))
            builder.finalize(f"{shard}.idx")
            _flush(f"{shard}.bin", f"{shard}.idx")
            read += len(documents)
            _write_json(Path(f"{shard}.json"), [documents[-1].after, read])
            shards.append(shard)
    merged = IndexedDatasetBuilder(f"{parts}/merged.bin", dtype)
    for shard in shards:
        merged.add_index(shard)
    merged.finalize(f"{parts}/merged.idx")
    written = len(merged.sequence_lengths)
    if not written:
        raise ConfigurationError(f"{files[0]}: no documents, all {read} lines are without text")
    tokens = int(np.sum(merged.sequence_lengths, dtype=np.int64))  # they are int32, and so would be Python's sum
    return {"vocab_size": len(tokenizer), "documents": written, "tokens": tokens, "skipped": read - written}


def _finished_shards(parts: Path, inputs: dict) -> tuple[list[str], Sequence]:
    """The finished shards of these inputs, and the last one's record: where the next begins, documents read so far."""
    if _read_json(parts / "inputs.json") != inputs:
        # The record goes first: a removal that is cut short must not pass for shards to continue from.
        (parts / "inputs.json").unlink(missing_ok=True)
        shutil.rmtree(parts, ignore_errors=True)
        parts.mkdir()
        _write_json(parts / "inputs.json", inputs)
    shards, last = [], ((0, 0, 0), 0)
    while (record := _read_json(parts / f"{len(shards):06d}.json")) is not None:
        shards.append(f"{parts}/{len(shards):06d}")
        last = record
    return shards, last


def _publish(merged: Path, prefix: Path, manifest: dict) -> None:
    """Put the merged files in place: Megatron refuses a prefix without .idx, so that goes first and comes last."""
    record = Path(f"{prefix}.manifest.json")
    _flush(f"{merged}.bin", f"{merged}.idx")
    record.unlink(missing_ok=True)
    Path(f"{prefix}.idx").unlink(missing_ok=True)
    _flush(prefix.parent)
    for cache in Path(prefix, "cache").glob("*_indices"):
        shutil.rmtree(cache)
    os.replace(f"{merged}.bin", f"{prefix}.bin")
    _flush(prefix.parent)
    os.replace(f"{merged}.idx", f"{prefix}.idx")
    _write_json(record, manifest)


@contextmanager
def _locked(target: Path) -> Iterator[None]:
    """Let one process at a time work on `target`. The lock file stays: to remove it would let two in."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with Path(f"{target}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"{target}: another process is at it, waiting", file=sys.stderr)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _read_json(path: Path):
    return json.loads(path.read_text()) if path.exists() else None


def _write_json(path: Path, content) -> None:
    unfinished = Path(f"{path}.unfinished")
    unfinished.write_text(json.dumps(content, indent=1))
    _flush(unfinished)
    os.replace(unfinished, path)
    _flush(path.parent)


def _flush(*paths: Path | str) -> None:
    """Have files (their bytes) and folders (their names) on the disk before going on."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
