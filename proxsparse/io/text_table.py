"""The plain-text table that commands and benchmarks print."""

from collections.abc import Sequence


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligned columns, two spaces apart, columns of numbers to the right; one line for the header and for each row."""
    columns = list(zip(header, *rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    right = [is_numeric(column[1:]) for column in columns]
    lines = []
    for row in (header, *rows):
        cells = zip(row, widths, right, strict=True)
        lines.append("  ".join(cell.rjust(width) if to_right else cell.ljust(width) for cell, width, to_right in cells))
    return "\n".join(line.rstrip() for line in lines)


def is_numeric(cells: Sequence[str]) -> bool:
    """Whether every cell that is not empty or "-" starts like a number, and at least one does."""
    filled = [cell for cell in cells if cell not in ("", "-")]
    return bool(filled) and all(cell.lstrip("+-<")[:1].isdigit() for cell in filled)
