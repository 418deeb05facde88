"""Text files to the `.bin`/`.idx` pair that Megatron trains on.

    files ──> documents ──> shards in PREFIX.parts ──> PREFIX.bin, PREFIX.idx, PREFIX.manifest.json

A shard counts once its JSON record stands beside it, so a run that was killed continues after the last record. The
manifest names sources and tokenizer: what has not changed is left alone, what has is built anew.
"""

from __future__ import annotations

import os
import shutil
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from megatron_basp.atomic_files import flush, locked, read_json, write_json
from megatron_basp.errors import ConfigurationError
from megatron_basp.text_files import batches, read_documents, sample_texts, source_stats, standard_library_files
from megatron_basp.tokenizer import load_tokenizer, tokenizer_sha256, train_tokenizer

type Inputs = dict[str, Any]  # what a data set was made from: if it is the same, so is the data set

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


def prepare_sample_dataset(folder: Path) -> TextDataset:
    """A few hundred kilobytes of Python's standard library with a vocabulary of 512: for runs that check something."""
    files = standard_library_files()[:40]
    tokenizer = train_tokenizer(sample_texts(files), folder / "tokenizer", vocab_size=512)
    return prepare_text_dataset(files, folder / "text", tokenizer)


def prepare_text_dataset(
    files: Sequence[Path],
    prefix: Path,
    tokenizer_folder: Path,
    *,
    json_key: str = "text",
    document_bytes: int | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> TextDataset:
    """Tokenize `files` into `PREFIX.bin` and `PREFIX.idx`, in the order given, and end every document with eod.

    A `.jsonl` file is one document a line, any other file one document, or several with `document_bytes`. A document
    is its text's tokens (no BOS), and eod stands nowhere else: where a text spells a special token, that is encoded as
    plain text.
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
        document_bytes: cut plain text into documents of about this size; None makes each file one.
        shard_bytes: bytes of source in a shard: held in memory, and the most that an interruption loses.

    Raises:
        ConfigurationError: in one line: a file that is missing, empty, not UTF-8 or not JSONL with text under the
            key, no documents at all, a tokenizer that does not load, or sources that changed meanwhile.
    """
    inputs: Inputs = {
        "sources": source_stats(files),
        "tokenizer_sha256": tokenizer_sha256(tokenizer_folder),
        "json_key": json_key,
        "document_bytes": document_bytes,
    }
    parts = Path(f"{prefix}.parts")
    with locked(prefix):
        manifest = read_json(Path(f"{prefix}.manifest.json"))
        if manifest is None or manifest["inputs"] != inputs or _damage(prefix):
            counts = _build(files, parts, tokenizer_folder, inputs, shard_bytes)
            if source_stats(files) != inputs["sources"]:
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


def count_documents(prefix: Path) -> int:
    """The number of documents of a whole data set, from the header of its index."""
    with Path(f"{prefix}.idx").open("rb") as stream:
        *_, boundaries = INDEX_HEADER.unpack(stream.read(INDEX_HEADER.size))
    return boundaries - 1


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


def _build(
    files: Sequence[Path], parts: Path, tokenizer_folder: Path, inputs: Inputs, shard_bytes: int
) -> dict[str, int]:
    """Write the shards that are not finished, merge all into `parts/merged`, and return the manifest's counts."""
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    tokenizer = load_tokenizer(tokenizer_folder)
    eod, encoder, dtype = tokenizer.eos_token_id, tokenizer.backend_tokenizer, DType.optimal_dtype(len(tokenizer))
    shards, (after, read) = _finished_shards(parts, inputs)
    sizes = [source["bytes"] for source in inputs["sources"]]
    done_bytes = sum(sizes[: after[0]]) + after[1]
    if shards:
        print(f"{parts}: {len(shards)} shards are finished, {done_bytes} of {sum(sizes)} bytes", file=sys.stderr)
    with tqdm(total=sum(sizes), initial=done_bytes, unit="B", unit_scale=True, desc="tokenize", disable=None) as bar:
        source = read_documents(files, inputs["json_key"], after, inputs["document_bytes"])
        for documents in batches(source, shard_bytes):
            shard = f"{parts}/{len(shards):06d}"
            builder = IndexedDatasetBuilder(f"{shard}.bin", dtype)
            for batch in batches(documents, ENCODE_BYTES):
                texts = [document.text for document in batch if document.text]
                for encoding in encoder.encode_batch_fast(texts, add_special_tokens=False):
                    builder.add_document([*encoding.ids, eod], [len(encoding.ids) + 1])
                bar.update(sum(document.size_bytes for document in batch))
            builder.finalize(f"{shard}.idx")
            flush(f"{shard}.bin", f"{shard}.idx")
            read += len(documents)
            write_json(Path(f"{shard}.json"), [documents[-1].after, read])
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


def _finished_shards(parts: Path, inputs: Inputs) -> tuple[list[str], tuple[Sequence[int], int]]:
    """The finished shards of these inputs, and the last one's record: where the next begins, documents read so far."""
    if read_json(parts / "inputs.json") != inputs:
        # The record goes first: a removal that is cut short must not pass for shards to continue from.
        (parts / "inputs.json").unlink(missing_ok=True)
        shutil.rmtree(parts, ignore_errors=True)
        parts.mkdir()
        write_json(parts / "inputs.json", inputs)
    shards: list[str] = []
    last: tuple[Sequence[int], int] = ((0, 0, 0), 0)
    while (record := read_json(parts / f"{len(shards):06d}.json")) is not None:
        shards.append(f"{parts}/{len(shards):06d}")
        last = record
    return shards, last


def _publish(merged: Path, prefix: Path, manifest: dict[str, Any]) -> None:
    """Put the merged files in place: Megatron refuses a prefix without .idx, so that goes first and comes last."""
    record = Path(f"{prefix}.manifest.json")
    flush(f"{merged}.bin", f"{merged}.idx")
    record.unlink(missing_ok=True)
    Path(f"{prefix}.idx").unlink(missing_ok=True)
    flush(prefix.parent)
    for cache in Path(prefix, "cache").glob("*_indices"):
        shutil.rmtree(cache)
    os.replace(f"{merged}.bin", f"{prefix}.bin")
    flush(prefix.parent)
    os.replace(f"{merged}.idx", f"{prefix}.idx")
    write_json(record, manifest)
