"""Where things are on a machine that is not the notebook's."""

from __future__ import annotations

from pathlib import Path

import msgspec

from taas_magic.wire import CellTask


def in_directory(task: CellTask, project: str) -> CellTask:
    """A task whose project is in another directory."""
    there = Path(task.project)
    writable = [
        str(Path(project) / Path(path).relative_to(there)) for path in task.writable if Path(path).is_relative_to(there)
    ]
    origins = [origin for origin, _ in task.moved] or [task.project]
    moved = [(origin, project) for origin in origins]
    return msgspec.structs.replace(task, project=project, writable=writable, moved=moved)
