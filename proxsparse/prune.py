"""`proxsparse prune --method NAME`: prune a pretrained language model by any of the methods.

--list prints the methods with their options. A run writes the pruned model as a Hugging Face checkpoint with its
tokenizer, masks.safetensors, config.yaml with every flag, and result.json. The same command line with
--resume_from_checkpoint last continues a stopped run, starts a new one, or leaves a complete one as it is.
"""

import sys
import textwrap

from proxsparse.allocations.registry import get_allocation, list_allocations
from proxsparse.errors import run_command
from proxsparse.io.text_table import text_table
from proxsparse.methods import get_method, list_methods
from proxsparse.run import job
from proxsparse.run.args import PROXSPARSE, SHARED
from proxsparse.run.parse import parse_prune


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if "--list" in arguments:
        print(tables())
        return 0
    return job.prune(parse_prune(arguments))


def tables() -> str:
    """The text of --list: each method and each allocation with its options and their defaults."""
    yes_no = {True: "yes", False: "no"}
    method_rows = [
        (
            (row.name, yes_no[row.needs_data], yes_no[row.updates_weights], row.paper),
            {} if row.name == PROXSPARSE else row.options,
        )
        for row in map(get_method, list_methods())
    ]
    allocation_rows = [
        ((row.name, yes_no[row.needs_data], row.paper), row.options) for row in map(get_allocation, list_allocations())
    ]
    return "\n\n".join(
        [
            table(("method", "needs data?", "updates weights?", "paper"), method_rows),
            table(("allocation", "needs data?", "paper"), allocation_rows),
        ]
    )


def table(header: tuple[str, ...], rows: list[tuple[tuple[str, ...], dict]]) -> str:
    """A table of the cells, with the options below each row. `rows`: pairs (cells, options)."""
    table = text_table(header, [cells for cells, _ in rows]).splitlines()
    lines = table[:1]
    for line, (cells, options) in zip(table[1:], rows, strict=True):
        lines.append(line)
        if cells[0] == PROXSPARSE:
            lines.append("    the flags of proxsparse train, see proxsparse train --help")
        if options:
            own = {name: str(value).lower() for name, value in options.items() if name not in SHARED}
            flags = " ".join(f"--{name}={value}" for name, value in own.items())
            lines += textwrap.wrap(flags, 120, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False)
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(run_command(main))
