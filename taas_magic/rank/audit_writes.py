"""Refuse writes to the project from inside Python, where the kernel has no Landlock.

An audit hook sees what Python's own functions are about to do, before they do it; PyTorch's C++ writers and SQLite
are wrapped, because they do not pass through it. Other C and C++ code and subprocesses are out of reach.

Source: https://docs.python.org/3/library/audit_events.html
"""

# Paths come as the audited call got them: bytes, or relative to a descriptor.
# ruff: noqa: PTH110, PTH115, PTH117, PTH118

from __future__ import annotations

import fcntl
import functools
import os
import sqlite3
import sys
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import unquote, urlsplit

from taas_magic.rank.refusal import Territory

_WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC

# Per event, (index of the path, index of the directory descriptor that it is relative to) for each path that it takes
# something from or puts something at.
_CHANGED: dict[str, tuple[tuple[int, int], ...]] = {
    "os.remove": ((0, 1),),
    "os.rmdir": ((0, 1),),
    "os.rename": ((0, 2), (1, 3)),
    "os.link": ((0, 2), (1, 3)),
}
_CREATED = {"os.mkdir": (0, 2), "os.symlink": (1, 2)}


def install(territory: Territory) -> None:
    """Refuse, with PermissionError, what this process attempts to write in the project. There is no way back.

    What would fail anyway, such as removing a file that is not there, is left to fail in its own way.
    """

    def hook(event: str, args: tuple[Any, ...]) -> None:
        # Every import and attribute audit comes through here too: one look-up for those.
        paths = _READERS.get(event)
        if paths is not None:
            for path, follow in paths(event, args):
                if territory.holds(path, follow=follow):
                    raise territory.refusal(path)

    sys.addaudithook(hook)
    _wrap_nodes(territory)
    _wrap_sqlite(territory)
    _wrap_torch(territory)


def _opened(_event: str, args: tuple[Any, ...]) -> Iterator[tuple[object, bool]]:
    path, _mode, flags = args
    if flags & _WRITE_FLAGS:
        yield path, True


def _truncated(_event: str, args: tuple[Any, ...]) -> Iterator[tuple[object, bool]]:
    yield args[0], True


def _created(event: str, args: tuple[Any, ...]) -> Iterator[tuple[object, bool]]:
    path_at, dir_at = _CREATED[event]
    path = _anchored(args[path_at], args[dir_at])
    if not os.path.lexists(path):
        yield path, False


def _changed(event: str, args: tuple[Any, ...]) -> Iterator[tuple[object, bool]]:
    paths = [_anchored(args[path_at], args[dir_at]) for path_at, dir_at in _CHANGED[event]]
    if os.path.lexists(paths[0]):
        yield from ((path, False) for path in paths)


_READERS: dict[str, Callable[[str, tuple[Any, ...]], Iterator[tuple[object, bool]]]] = {
    "open": _opened,
    "os.truncate": _truncated,
    **dict.fromkeys(_CREATED, _created),
    **dict.fromkeys(_CHANGED, _changed),
}


def _anchored(path: Any, dir_fd: int) -> Any:
    """``path`` made independent of the descriptor that it is relative to; -1 stands for the current directory."""
    if dir_fd == -1 or os.path.isabs(path):
        return path
    return os.path.join(_directory_of(dir_fd), os.fsdecode(path))


def _directory_of(fd: int) -> str:
    if sys.platform == "darwin":
        return os.fsdecode(fcntl.fcntl(fd, fcntl.F_GETPATH, bytes(1024)).rstrip(b"\0"))
    return os.readlink(f"/proc/self/fd/{fd}")


def _wrap_nodes(territory: Territory) -> None:
    """Cover ``os.mkfifo`` and ``os.mknod``, which raise no audit event."""
    for name in ("mkfifo", "mknod"):
        setattr(os, name, _checked(territory, getattr(os, name)))


def _checked(territory: Territory, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def checked(path: Any, *args: Any, **kwargs: Any) -> Any:
        if territory.holds(path, follow=False):
            raise territory.refusal(path)
        return original(path, *args, **kwargs)

    return checked


def _wrap_sqlite(territory: Territory) -> None:
    """Make databases of the project read-only, and new ones impossible, with the errors that SQLite has for that."""
    original = sqlite3.connect

    @functools.wraps(original)
    def connect(database: Any, *args: Any, **kwargs: Any) -> Any:
        path = _database_path(database)
        inside = territory.holds(path)
        if inside and not os.path.exists(path):
            raise sqlite3.OperationalError(f"unable to open database file: {territory.refusal(path)}")
        connection = original(database, *args, **kwargs)
        if inside:
            connection.execute("PRAGMA query_only = ON").close()
        return connection

    sqlite3.connect = sqlite3.dbapi2.connect = connect


def _database_path(database: Any) -> Any:
    text = os.fsdecode(database) if isinstance(database, (str, bytes, os.PathLike)) else ""
    if text in ("", ":memory:"):
        return None
    return unquote(urlsplit(text).path) if text.startswith("file:") else text


def _wrap_torch(territory: Territory) -> None:
    import torch

    class Writer(torch._C.PyTorchFileWriter):
        def __init__(self, target: Any, *args: Any, **kwargs: Any) -> None:
            if territory.holds(target):
                raise territory.refusal(target)
            super().__init__(target, *args, **kwargs)

    Writer.__name__ = Writer.__qualname__ = torch._C.PyTorchFileWriter.__name__
    torch._C.PyTorchFileWriter = Writer  # type: ignore[misc,assignment]
    # Scripted modules open their file in C++ alone.
    _wrap_script_save(territory, torch.jit._script.RecursiveScriptModule)


def _wrap_script_save(territory: Territory, module_type: Any) -> None:
    original = module_type.save

    @functools.wraps(original)
    def save(self: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
        if territory.holds(f):
            raise territory.refusal(f)
        return original(self, f, *args, **kwargs)

    module_type.save = save
