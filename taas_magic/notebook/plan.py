"""What a cell would send to its ranks, as a table."""

from __future__ import annotations

from taas_magic.namespace.pack import PackedNamespace
from taas_magic.units import format_bytes

_COLUMNS = ("name", "type", "size", "why")


def describe_plan(packed: PackedNamespace, bound: list[str]) -> str:
    """Describe a packed namespace for people.

    Args:
        packed: What would travel.
        bound: Names that the cell binds, so what would come home beside changes of what travelled.
    """
    items = sorted(packed.items, key=lambda item: -item.size_bytes)
    rows = [(item.name, item.type_name, format_bytes(item.size_bytes), item.why) for item in items]
    total, new = packed.parcel.mapped_bytes, packed.parcel.size_bytes
    lines = [f"to the ranks, once for all of them: {format_bytes(total)}, of which {format_bytes(new)} are new"]
    lines += _table([_COLUMNS, *rows]) if rows else ["  nothing of the notebook"]
    lines += [f"  left out: {name} ({reason})" for name, reason in packed.left_out.items()]
    lines.append("home from rank 0: what the cell changes in these, and the names it binds")
    lines.append(f"  {', '.join(bound) if bound else 'it binds none'}")
    return "\n".join(lines)


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
