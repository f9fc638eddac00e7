"""Plain-text tables for commands and benchmarks."""

from collections.abc import Sequence


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns two spaces apart, numeric columns right-aligned; one line for the header and one for each row."""
    columns = []
    for cells in zip(header, *rows, strict=True):
        width, right = max(map(len, cells)), is_numeric(cells[1:])
        columns.append([cell.rjust(width) if right else cell.ljust(width) for cell in cells])
    return "\n".join("  ".join(cells).rstrip() for cells in zip(*columns, strict=True))


def is_numeric(cells: Sequence[str]) -> bool:
    """Whether at least one cell starts like a number, and all others do too or are empty or "-"."""
    filled = [cell for cell in cells if cell not in ("", "-")]
    return bool(filled) and all(cell.lstrip("+-<")[:1].isdigit() for cell in filled)
