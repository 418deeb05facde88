"""Text files as a stream of documents, and the standard library as text that is always at hand."""

from __future__ import annotations

import hashlib
import json
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megatron_basp.errors import ConfigurationError


class Document(NamedTuple):
    """One document, and where it stood."""

    text: str
    size_bytes: int  # in the source
    after: tuple[int, int, int]  # where the next one begins: number of the file, byte offset in it, lines before


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
        ConfigurationError: as `source_stats` and `read_documents`, once the first text is asked for.
    """
    source_stats(files)
    for document in next(batches(read_documents(files, json_key), limit_bytes)):
        yield document.text


def source_stats(files: Sequence[Path]) -> list[dict[str, Any]]:
    """Path, size and modification time of every file: what a rerun compares to see whether one has changed.

    Raises:
        ConfigurationError: no files at all, or one that is missing or empty.
    """
    if not files:
        raise ConfigurationError("no files given; name at least one text or .jsonl file")
    for path in files:
        if not path.is_file() or not path.stat().st_size:
            raise ConfigurationError(f"{path}: {'an empty file; leave it out' if path.is_file() else 'no such file'}")
    stats = [(path.resolve(), path.stat()) for path in files]
    return [{"path": str(path), "bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns} for path, stat in stats]


def read_documents(
    files: Sequence[Path], json_key: str, start: Sequence[int] = (0, 0, 0), document_bytes: int | None = None
) -> Iterator[Document]:
    """A document from each line of a `.jsonl` file; any other file is one, or several.

    Args:
        start: where to begin: the `after` of the last document that was read.
        document_bytes: cut plain text at the ends of lines into documents of about this size; None leaves it whole.

    Raises:
        ConfigurationError: a file that is not UTF-8, or not JSONL with text under the key.
    """
    first, offset, line = start
    for number, path in enumerate(files[first:], first):
        if path.suffix == ".jsonl":
            with path.open("rb") as stream:
                stream.seek(offset)
                for raw in stream:
                    line += 1
                    text = _json_text(_decode(raw, path, offset), json_key, f"{path}:{line}")
                    offset += len(raw)
                    yield Document(text, len(raw), (number, offset, line))
        else:
            with path.open("rb") as stream:
                stream.seek(offset)
                while lines := stream.readlines(-1 if document_bytes is None else document_bytes):
                    raw = b"".join(lines)
                    text = _decode(raw, path, offset)
                    offset += len(raw)
                    yield Document(text, len(raw), (number, offset, 0))
        offset = line = 0


def batches(documents: Iterable[Document], limit_bytes: int) -> Iterator[list[Document]]:
    """Cut `documents` into lists that each end once they reach `limit_bytes` of source; the last may fall short."""
    batch: list[Document] = []
    size_bytes = 0
    for document in documents:
        batch.append(document)
        size_bytes += document.size_bytes
        if size_bytes >= limit_bytes:
            yield batch
            batch, size_bytes = [], 0
    if batch:
        yield batch


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
