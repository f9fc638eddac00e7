"""Plain-text tables for commands and benchmarks."""

from collections.abc import Sequence


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns two spaces apart, numeric columns right-aligned; one line for the header and one for each row."""
    columns = []
    for cells in zip(header, *rows, strict=True):
        filled, width = [cell for cell in cells[1:] if cell not in ("", "-")], max(map(len, cells))
        numeric = filled and all(cell.lstrip("+-<")[:1].isdigit() for cell in filled)
        columns.append([cell.rjust(width) if numeric else cell.ljust(width) for cell in cells])
    return "\n".join("  ".join(cells).rstrip() for cells in zip(*columns, strict=True))
