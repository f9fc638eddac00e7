"""Reading texts from files, Hub data sets and named sources."""

import gzip
import itertools
import json
import os
import re
import reprlib
import textwrap
import zlib
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import IO

from proxsparse.errors import InputError
from proxsparse.io.model_files import is_inside
from proxsparse.runtime.progress import phase

Rows = Iterator[tuple[str, object]]
LONGEST_NAME = 255  # characters of a source that is not a path
# Files that describe a data set, and are not text of it
SAVED = ("dataset_info.json", "dataset_dict.json")  # by `save_to_disk`
DESCRIPTIONS = ("readme.md", "dataset_infos.json", "state.json", *SAVED)
FIRST_DOCUMENTS = 10_000  # of a data set: all that is evaluated; for calibration shuffled before the first is used
DOCUMENT_CHARACTERS = 1200  # minimum length of a document cut from prose; gives builtin over 200 training documents
# Largest size that a compressed file may expand to. Text compresses 3 to 20 times; a malicious file of zeros 1000.
UNPACKED_RATIO, UNPACKED_ALWAYS = 100, 64 << 20
GZIP = b"\x1f\x8b"  # the first bytes of a file
BUILTIN_HELD_OUT_EVERY = 5  # topics 0, 5, 10, ... in alphabetical order are the validation split


def load_texts(source: str, split: str, text_field: str = "text", limit: int | None = None) -> list[str]:
    """The documents of a source, in its own order.

    Args:
        source: "builtin": the language reference in Python's `pydoc` (no network; it differs between Python
            versions). "c4": allenai/c4, streamed. "wikitext2": Salesforce/wikitext. An existing path, or a name that
            starts with ".", "/" or "~" or ends in a suffix of `FILE_READERS` (".gz" may follow): a file, or all such
            files of a folder in sorted order. Anything else: a hub data set "NAME" or "NAME:CONFIG", streamed.
        split: "train", "validation" or another split of the hub data set; ignored for local files.
        text_field: the field of a row that holds the text.
        limit: stop after this many documents with text; None reads all, which for "c4" is the whole corpus.
    Returns:
        One text per row, blank rows included: they count when WikiText's rows are joined by two newlines.
    Raises:
        InputError: the source is absent, damaged or has no text; names the file, the line and the remedy.
    """
    return first_and_rest(source, split, text_field, limit)[0]


def first_and_rest(
    source: str, split: str, text_field: str = "text", limit: int | None = FIRST_DOCUMENTS
) -> tuple[list[str], Iterator[str]]:
    """As `load_texts`; and an iterator over the texts after the limit, which are read when they are used."""
    first, rest = [], (text_of(row, where, text_field) for where, row in open_source(source, split))
    part = "" if is_local(source) else f", {split}"
    with phase(f"reading {source}{part}", limit, "document") as current:
        for text in rest:
            first.append(text)
            current.step(bool(text.strip()))
            if current.done == limit:
                break
        current.total = documents = current.done
    if not documents:
        raise InputError(f"{source}: no document with text in it; choose another file or data set")
    return first, rest


def identity_of(source: str) -> list:
    """The source, and of local files the names, sizes and times: it changes if the text changes."""
    files = text_files(Path(os.path.expanduser(source))) if is_local(source) else ()
    return [source, *([file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files)]


def evaluation_text(source: str, split: str | None = None, text_field: str = "text") -> str:
    """The text that perplexity is measured on, as in the pruning papers, which use the data code of SparseGPT.

    "wikitext2": the test rows joined by two newlines. "c4": the first 1,100 validation documents joined by a space.
    Any other source: the documents of the validation split joined by two newlines. `split` replaces these splits.
    The papers evaluate all windows of WikiText-2 and 256 windows of C4.
    """
    limit = None if is_local(source) else FIRST_DOCUMENTS
    of_the_papers, documents, separator = PAPERS_TEXTS.get(source, ("validation", limit, "\n\n"))
    return separator.join(load_texts(source, split or of_the_papers, text_field, documents))


def evaluation_split(source: str) -> str:
    """The split that pruning papers measure perplexity on: "test" for WikiText-2, else "validation"."""
    return PAPERS_TEXTS[source][0] if source in PAPERS_TEXTS else "validation"


def is_local(source: str) -> bool:
    """Whether the source is an existing file or folder; "c4" is a named source even if a file has that name."""
    return source not in NAMED_SOURCES and os.path.exists(os.path.expanduser(source))


def open_source(source: str, split: str) -> Rows:
    """The rows of a source. A named source takes precedence over a file of that name; "./c4" is the file."""
    if source in NAMED_SOURCES:
        return NAMED_SOURCES[source](split)
    check_source(source)
    if is_local(source):
        return read_path(Path(os.path.expanduser(source)))
    name, _, config = source.partition(":")
    return read_hub(name, config or None, split)


def check_source(source: str) -> None:
    """Raises InputError if the source looks like a file that does not exist; does not check names on the Hub."""
    if is_local(source):
        return
    if len(source) > LONGEST_NAME or "\n" in source:
        raise InputError(f"{source[:40]!r}...: a text, not the name of a source; give a list of texts")
    if "://" in source:
        raise InputError(f"{source!r}: a URL; give NAME or NAME:CONFIG of a data set on the Hub, or download the file")
    named_like_a_file = suffix_of(Path(source)) in FILE_READERS or source.lower().endswith(FOREIGN_SUFFIXES)
    if not source or source.startswith((".", "/", "~")) or named_like_a_file:
        raise InputError(f"{source!r}: no such file; check the path, or use builtin")


def text_of(row: object, where: str, text_field: str) -> str:
    """The text of one row: the row itself if it is a string, else its field `text_field`."""
    if isinstance(row, dict):
        if text_field not in row:
            fields = textwrap.shorten(", ".join(map(str, row)), 300) or "none"
            remedy = f"set --text_field to one of: {fields}; if another text needs {text_field!r}, rename the field"
            raise InputError(f"{where}: no field {text_field!r}; {remedy}")
        row, where = row[text_field], f"{where}, field {text_field!r}"
    if not isinstance(row, str):
        raise InputError(f"{where}: {reprlib.repr(row)} is not text; a row is a string or an object with a text field")
    if re.search("[\ud800-\udfff]", row):  # JSON can encode it, tokenizers reject it
        raise InputError(f"{where}: contains an unpaired surrogate (\\ud800 to \\udfff); fix or delete this row")
    return row


# ---------------------------------------------------------------------------------------------- local files


def suffix_of(path: Path) -> str:
    """The suffix that determines the format: "a.JSONL.gz" -> ".jsonl"."""
    return Path(path.name.lower().removesuffix(".gz")).suffix


def is_text(file: Path) -> bool:
    """Whether the name is that of a text file: not hidden, and not of a description of a data set."""
    return suffix_of(file) in FILE_READERS and file.name.lower() not in DESCRIPTIONS and file.name[0] != "."


def text_files(path: Path) -> list[Path]:
    """The file, or the files of a folder with a known suffix, sorted by name, except those that describe a data set."""
    if not path.is_dir():
        return [path]
    files = sorted(filter(is_text, path.iterdir()))
    if not files:
        inner = min((file.parent for file in path.glob("[!.]*/*") if is_text(file)), default=None)
        remedy = f"give {inner}" if inner else f"add files in one of {', '.join(FILE_READERS)}, except README.md"
        if any((path / name).exists() for name in SAVED):
            remedy = "it is a data set of save_to_disk; write it with to_parquet, or give prune_ the data set itself"
        raise InputError(f"{path}: no text file in this folder; {remedy}")
    if others := [file for file in files if not (file.is_file() and is_inside(file, path))]:  # a pipe would block
        raise InputError(f"{others[0]}: not a regular file in this folder; remove it, or give the file itself")
    return files


def read_path(path: Path) -> Rows:
    """The rows of `text_files`."""
    for file in text_files(path):
        if suffix_of(file) not in FILE_READERS:
            known = ", ".join(FILE_READERS)
            what = f"unknown format {suffix_of(file) or file.suffix!r}"
            raise InputError(f"{file}: {what}; decompress it, or convert it to one of {known} (.gz may follow)")
        yield from FILE_READERS[suffix_of(file)](file)


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """(line number, line with its newline) of a UTF-8 file, gzip or plain. An error names the line."""
    number, packed = 0, path.suffix.lower() == ".gz"
    try:
        with gzip.open(path) if packed else path.open("rb") as stream:
            for line in unpacked_lines(path, stream) if packed else stream:
                number += 1
                if number == 1 and line.startswith(GZIP) and not packed:
                    raise InputError(f"{path}: is compressed with gzip; rename it to {path.name}.gz")
                if b"\0" in line:
                    raise InputError(f"{path}, line {number}: has NUL characters, as UTF-16 has; convert it to UTF-8")
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}, line {number}: not UTF-8 ({error.reason}); convert the file to UTF-8") from error
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path}, after line {number}: cannot be read ({error}); repair or replace it") from error


def unpacked_lines(path: Path, stream: IO[bytes]) -> Iterator[bytes]:
    """The lines of a compressed file. Raises InputError before a line makes it longer than `unpacked_limit`."""
    left = unpacked_limit(path)
    while line := stream.readline(left + 1):
        left = within_limit(path, left - len(line))
        yield line


def unpacked_limit(path: Path) -> int:
    """Largest size in bytes that a compressed file may expand to."""
    return max(UNPACKED_ALWAYS, UNPACKED_RATIO * path.stat().st_size)


def within_limit(path: Path, left: int) -> int:
    """`left`, the bytes that the file may still expand to. Raises InputError if it is negative."""
    if left < 0:
        remedy = "if you trust it, decompress it, or convert Parquet to JSON lines"
        raise InputError(f"{path}: expands to over {UNPACKED_RATIO} times its size; {remedy}")
    return left


def read_json(path: Path) -> Rows:
    """The rows of a JSON list, or of a file with one row per line."""
    lines = read_lines(path)
    for number, line in lines:
        is_list = line.lstrip().startswith("[")
        text = line + "".join(rest for _, rest in lines) if is_list else line.strip()
        try:
            found = json.loads(text) if text else None
        except (ValueError, RecursionError) as error:  # also numbers of too many digits, lists nested too deeply
            where, reason = number + getattr(error, "lineno", 1) - 1, getattr(error, "msg", error)
            remedy = "use one list, or a row per line"
            raise InputError(f"{path}, line {where}: malformed JSON ({reason}); {remedy}") from error
        if is_list:
            yield from ((f"{path}, row {i}", row) for i, row in enumerate(found, 1))
        elif text:
            yield f"{path}, line {number}", found


def read_prose(path: Path) -> Rows:
    """Documents of whole paragraphs; blank lines separate paragraphs."""
    lines = (line for _, line in read_lines(path))
    paragraphs = ("".join(group) for blank, group in itertools.groupby(lines, str.isspace) if not blank)
    yield from ((str(path), document) for document in cut_documents(paragraphs))


def cut_documents(paragraphs: Iterable[str]) -> Iterator[str]:
    """Joins paragraphs into documents of at least `DOCUMENT_CHARACTERS`; the last one may be shorter."""
    document, length = [], 0
    for paragraph in paragraphs:
        document.append(paragraph.strip("\n"))
        length += len(document[-1])
        if length >= DOCUMENT_CHARACTERS:
            yield "\n\n".join(document)
            document, length = [], 0
    if document:
        yield "\n\n".join(document)


def read_wikitext(path: Path) -> Rows:
    """The rows of WikiText's raw format, as on the hub: a row is a line with its newline, a blank line is ""."""
    return ((f"{path}, line {number}", line if line.strip() else "") for number, line in read_lines(path))


def read_parquet(path: Path) -> Rows:
    """The rows of a Parquet file."""
    import pyarrow.parquet

    left, numbers = unpacked_limit(path), itertools.count(1)
    try:
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches(batch_size=1024):
            left = within_limit(path, left - sum(map(expanded_bytes, batch.columns)))
            yield from ((f"{path}, row {next(numbers)}", row) for row in batch.to_pylist())
    except InputError:
        raise
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError, RecursionError) as error:
        raise InputError(f"{path}: not a readable Parquet file ({error}); repair or replace it") from error


def expanded_bytes(column) -> int:
    """Size of an Arrow array in Python, where every row has its own copy of its entry of a dictionary."""
    from pyarrow import compute, types

    kind = column.type
    if types.is_dictionary(kind):  # of texts or bytes; pyarrow reads all others from Parquet as plain columns
        lengths = compute.binary_length(column.dictionary).take(column.indices)
        return compute.sum(lengths).as_py() or 0  # None if all are null
    if types.is_map(kind):
        return expanded_bytes(column.keys) + expanded_bytes(column.items)
    if types.is_struct(kind):
        return sum(map(expanded_bytes, column.flatten()))
    return expanded_bytes(column.flatten()) if types.is_nested(kind) else column.nbytes


FILE_READERS = {
    ".jsonl": read_json,
    ".json": read_json,
    ".txt": read_prose,
    ".md": read_prose,
    ".raw": read_wikitext,
    ".parquet": read_parquet,
}
# Names with these suffixes are files, not data sets of the Hub.
FOREIGN_SUFFIXES = (".csv", ".tsv", ".xml", ".html", ".zip", ".gz", ".bz2", ".xz", ".zst", ".tar", ".arrow")


# ---------------------------------------------------------------------------------------------- named sources


def read_hub(name: str, config: str | None, split: str, streaming: bool = True) -> Rows:
    """The rows of a data set of the Hugging Face hub."""
    import datasets

    what = f"{name}{f', config {config}' if config else ''}, split {split}"
    try:
        disable_bars()
        rows = datasets.load_dataset(name, config, split=split, streaming=streaming)
        yield from ((f"{what}, row {i}", row) for i, row in enumerate(rows, 1))
    except Exception as error:  # of many types: HTTP, OS, Arrow, the hub's own
        reason = textwrap.shorten(f"{type(error).__name__}: {error}", 300)
        remedy = "check the name (NAME or NAME:CONFIG), the split and the network, or use a local file or builtin"
        raise InputError(f"{what}: cannot be loaded from the Hugging Face hub ({reason}); {remedy}") from error


def disable_bars() -> None:
    """Disables the progress bars of `datasets`: `phase` shows the progress."""
    import datasets

    datasets.disable_progress_bars()


def read_builtin(split: str) -> Rows:
    """Python's language reference, split into documents of whole paragraphs; no paragraph occurs twice."""
    if split not in ("train", "validation"):
        raise InputError(f"builtin: no split {split!r}; choose train or validation")
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise InputError("builtin: this Python has no pydoc_data.topics; use a local text file") from error
    seen = set()
    for index, name in enumerate(sorted(topics)):
        paragraphs = []
        prose = re.sub(r"^[^\w\s]{4,}\n", "", topics[name], flags=re.MULTILINE)  # removes underlines and table borders
        for paragraph in re.split(r"\n\s*?\n", prose):
            key = " ".join(paragraph.split())  # topics quote each other with other indentation
            if key and key not in seen:
                paragraphs.append(paragraph)
            seen.add(key)
        if (index % BUILTIN_HELD_OUT_EVERY == 0) == (split == "validation"):
            yield from ((f"builtin, topic {name}", document) for document in cut_documents(paragraphs))


NAMED_SOURCES = {
    "builtin": read_builtin,
    "c4": partial(read_hub, "allenai/c4", "en"),
    # small, so downloaded completely: later runs need no network
    "wikitext2": partial(read_hub, "Salesforce/wikitext", "wikitext-2-raw-v1", streaming=False),
}
# The split, the number of documents, and their separator.
PAPERS_TEXTS = {"wikitext2": ("test", None, "\n\n"), "c4": ("validation", 1100, " ")}
