"""Shared by the benchmarks: flags, the provenance of a result, files of rows, tables."""

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import torch

from proxsparse.errors import InputError
from proxsparse.io.text_table import text_table
from proxsparse.patterns import FLOAT_DTYPES
from proxsparse.run.sections import shortened
from proxsparse.runtime.device import environment, version

FOLDER = Path(__file__).resolve().parents[1]
GPU_STATE = ["driver_version", "clocks.sm", "clocks.mem", "temperature.gpu", "power.draw", "power.limit"]


def new_parser(description: str | None, **settings) -> argparse.ArgumentParser:
    """A parser that prints the description with its line breaks."""
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, **settings
    )


def command_line(description: str | None) -> argparse.ArgumentParser:
    """A parser with the flags of every benchmark on random weights."""
    parser = new_parser(description)
    names = [dtype_name(dtype) for dtype in FLOAT_DTYPES]
    parser.add_argument("--dtypes", nargs="+", choices=names, default=["bfloat16", "float32"], metavar="DTYPE")
    parser.add_argument("--sigma", type=float, default=0.02, help="standard deviation of the weights")
    parser.add_argument("--devices", nargs="+", default=devices())
    parser.add_argument("--no-save", action="store_true", help="print only")
    return parser


def with_defaults(args: argparse.Namespace, defaults: dict[str, dict], device: torch.device) -> argparse.Namespace:
    """The flags, with the defaults of this kind of device for those that were not given."""
    of_device = defaults.get(device.type, defaults["cuda"])
    given = {name: value for name, value in vars(args).items() if value is not None}
    return argparse.Namespace(**vars(args) | of_device | given)


def matrix_shape(text: str) -> tuple[int, int]:
    """ "4096x11008" -> (4096, 11008)."""
    out_features, _, in_features = text.partition("x")
    if not (out_features.isdecimal() and in_features.isdecimal()) or int(in_features) % 4:
        raise argparse.ArgumentTypeError(f"{text!r}: write OUTxIN, in_features a multiple of 4, such as 4096x11008")
    return int(out_features), int(in_features)


def dtype_name(dtype: torch.dtype) -> str:
    """torch.bfloat16 -> "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def devices() -> list[str]:
    """The default device: the GPU if there is one, else the CPU."""
    return ["cuda"] if torch.cuda.is_available() else ["cpu"]


def command(benchmark: str, arguments: list[str] | None) -> str:
    """The command line that repeats a measurement, without the folders of this machine; None: that of this process."""
    words = sys.argv[1:] if arguments is None else arguments
    words = ["=".join(str(shortened(part)) for part in word.split("=")) for word in words]
    return shlex.join(["python", f"benchmarks/{benchmark}.py", *words])


def provenance(device: torch.device) -> dict[str, object]:
    """Device, threads, versions and commit of a result; on a GPU also its driver, clocks, temperature and power."""
    gpu = {}
    if device.type == "cuda":
        gpu["triton"] = version("triton")
        if shutil.which("nvidia-smi"):
            query = ["nvidia-smi", f"--query-gpu={','.join(GPU_STATE)}", "--format=csv,noheader"]
            values = subprocess.run(query, capture_output=True, text=True).stdout.partition("\n")[0].split(", ")
            gpu["gpu"] = dict(zip(GPU_STATE, values, strict=False))
    return environment(device) | gpu | {"commit": commit()}


def commit() -> str:
    """The commit of the code, followed by "-dirty" if files other than results differ.

    Outside a checkout it is the value of PROXSPARSE_COMMIT, or "unknown".
    """

    def git(*arguments: str) -> str:
        line = ["git", "-C", str(FOLDER), *arguments]
        return subprocess.run(line, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--", "..", ":!results")
        return git("rev-parse", "--short=12", "HEAD") + "-dirty" * bool(changed)
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("PROXSPARSE_COMMIT", "unknown")


def results_file(benchmark: str) -> Path:
    return FOLDER / "results" / f"{benchmark}.jsonl"


def append_rows(file: Path, rows: Iterable[dict[str, object]]) -> None:
    """Each row as a line of JSON at the end of the file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as lines:
        lines.writelines(json.dumps(row) + "\n" for row in rows)


def read_rows(file: Path) -> list[dict]:
    """All rows of a file; [] if it does not exist. Raises InputError for a damaged file."""
    try:
        return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except FileNotFoundError:
        return []
    except json.JSONDecodeError as error:
        raise InputError(f"{file}: a row is not JSON ({error}); fix or delete it") from error


def table(formats: dict[str, str], rows: Iterable[dict]) -> str:
    """The rows as a table.

    formats: column -> format string of the fields of a row; the cell is empty where the row lacks them.
    """

    def cell(text: str, row: dict) -> str:
        try:
            return text.format_map(row)
        except (KeyError, TypeError):  # TypeError: the figure is None
            return ""

    return text_table(list(formats), [[cell(text, row) for text in formats.values()] for row in rows])


class Results:
    """The rows of a benchmark on one device: appended to its file as they are measured, printed at the end.

    Args:
        save: whether rows are appended to the file.
        arguments: the command line; None: that of this process.
        fields: further fields of every row.
    """

    def __init__(self, benchmark: str, device: torch.device, save: bool, arguments: list[str] | None, **fields):
        self.file, self.save = results_file(benchmark), save
        self.where = provenance(device) | {"command": command(benchmark, arguments)} | fields
        self.rows: list[dict] = []

    def add(self, rows: list[dict]) -> list[dict]:
        """The rows with their provenance, appended."""
        rows = [self.where | row for row in rows]
        self.rows += rows
        if self.save:
            append_rows(self.file, rows)
        return rows

    def show(self, formats: dict[str, str], summary: str = "") -> None:
        """Prints all rows as a `table`."""
        where = self.where
        print(f"\n{where['device']}, torch {where['torch']}, {where['threads']} threads, commit {where['commit']}\n")
        print(f"{table(formats, self.rows)}\n\n{summary}")
        if self.save:
            print(f"appended to {self.file}")

    def picture(self, device: torch.device) -> Path:
        """The file of the picture for this kind of device."""
        return self.file.with_name(f"{self.file.stem}_{device.type}.png")


def error_note(error: Exception) -> str:
    """The note in the row of a failed measurement: type and beginning of the error's message, in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:100]}"
