"""`proxsparse prune --method NAME`: prune a pretrained language model by any of the methods; --list prints them."""

import sys

from proxsparse.allocations.registry import ALLOCATIONS
from proxsparse.errors import run_command
from proxsparse.io.text_table import text_table
from proxsparse.methods import get_method, list_methods
from proxsparse.run import job
from proxsparse.run.args import PROXSPARSE
from proxsparse.run.parse import parse_prune


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if "--list" in arguments:
        print(tables())
        return 0
    return job.prune(parse_prune(arguments))


def tables() -> str:
    """The text of --list: the methods and the allocations."""
    methods, allocations, yes_no = map(get_method, list_methods()), ALLOCATIONS.values(), ("no", "yes")
    method_rows = [(row.name, yes_no[row.needs_data], yes_no[row.updates_weights], row.paper) for row in methods]
    allocation_rows = [(row.name, yes_no[row.needs_data], row.paper) for row in allocations]
    method_table = text_table(("method", "needs data?", "updates weights?", "paper"), method_rows)
    allocation_table = text_table(("allocation", "needs data?", "paper"), allocation_rows)
    hint = f"prune --method NAME --help describes the options of a method, train --help those of {PROXSPARSE}"
    return f"{method_table}\n\n{allocation_table}\n\n{hint}"


if __name__ == "__main__":
    sys.exit(run_command(main))
