"""Tables of what owners do, for terminals (by rich) and for pipes and files (aligned columns)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from rich.console import Group

Row: TypeAlias = tuple[str, ...]
Section: TypeAlias = tuple[str, Row, Sequence[Row]]  # title, columns, rows


def plain_text(sections: Sequence[Section]) -> str:
    return "\n\n".join(_plain(*section) for section in sections)


def _plain(title: str, columns: Row, rows: Sequence[Row]) -> str:
    table = [columns, *rows] if any(columns) else rows
    widths = [max(len(row[i]) for row in table) for i in range(len(columns))]
    lines = [title]
    for row in table:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  " + "  ".join(cells).rstrip())
    return "\n".join(lines)


def drawn(sections: Sequence[Section]) -> Group:
    """The sections for a terminal, without frames: 80 columns have no room for them."""
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    parts: list[Table | Text] = []
    for title, columns, rows in sections:
        table = Table(
            box=box.SIMPLE_HEAD,
            show_edge=False,
            show_header=any(columns),
            pad_edge=False,
            padding=(0, 1, 0, 0),
        )
        for column in columns:
            table.add_column(column, overflow="fold")
        for row in rows:
            table.add_row(*(Text(cell) for cell in row))  # a name is no markup
        parts += [Text(title, style="bold"), table, Text()]
    return Group(*parts[:-1])


def drawn_text(sections: Sequence[Section], *, stderr: bool = False) -> str:
    """As `drawn`, with the terminal's own colours and width."""
    from rich.console import Console

    console = Console(stderr=stderr)
    with console.capture() as capture:
        console.print(drawn(sections))
    return capture.get().rstrip("\n")
