"""Quantities as people read them."""

from __future__ import annotations


def format_bytes(size_bytes: float) -> str:
    """Format a size with binary units: ``format_bytes(3 * 2**20) == '3.0 MiB'``."""
    value = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def format_seconds(duration_s: float) -> str:
    """Format a duration: ``0.5 s``, ``42 s``, ``3 min 05 s``, ``2 h 10 min``."""
    if duration_s < 10:
        return f"{duration_s:.1f} s"
    seconds = round(duration_s)
    if seconds < 60:
        return f"{seconds} s"
    if seconds < 3600:
        return f"{seconds // 60} min {seconds % 60:02d} s"
    return f"{seconds // 3600} h {seconds % 3600 // 60:02d} min"


def plural(count: int, noun: str) -> str:
    """``plural(1, 'rank') == '1 rank'``, ``plural(2, 'rank') == '2 ranks'``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def format_exit(exit_code: int | None) -> str:
    """Say how a process ended; a negative code is a signal's number, as ``subprocess.Popen.returncode`` has it."""
    if exit_code is not None and exit_code < 0:
        return f"was killed by signal {-exit_code}"
    return f"exited with code {exit_code}"
