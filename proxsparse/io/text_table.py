"""The plain-text table that commands and benchmarks print."""

from collections.abc import Sequence


def text_table(header: Sequence[str] | None, rows: Sequence[Sequence[str]], indent: str = "") -> str:
    """Aligned columns, two spaces apart, columns of numbers to the right; one line for the header and for each row."""
    lines = [*([header] if header else []), *rows]
    columns = []
    for cells in zip(*lines, strict=True):
        width, right = max(map(len, cells)), is_numeric(cells[1:] if header else cells)
        columns.append([cell.rjust(width) if right else cell.ljust(width) for cell in cells])
    return "\n".join((indent + "  ".join(cells)).rstrip() for cells in zip(*columns, strict=True))


def is_numeric(cells: Sequence[str]) -> bool:
    """Whether every cell that is not empty or "-" starts like a number, and at least one does."""
    filled = [cell for cell in cells if cell not in ("", "-")]
    return bool(filled) and all(cell.lstrip("+-<")[:1].isdigit() for cell in filled)
