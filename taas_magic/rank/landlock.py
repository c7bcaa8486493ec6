"""Take the right to write in the project from a process, by the kernel's hand (Landlock).

Landlock knows allow-lists only: a ruleset names kinds of access, and whoever restricts itself by it keeps those only
beneath the paths that a rule grants. So "all but the project" is written as rules for every entry that stands beside
the project or beside a directory above it. Reading and executing are not handled, hence free everywhere.

What follows from that, besides the project itself:

- *New* entries directly in a directory above the project are refused too, and so are entries that came there after
  the ruleset was built: no rule names them. :func:`build_ruleset`'s ``writable`` opens what is known beforehand.
- Symbolic links need no rule: the kernel checks where a link leads, and every such place has a rule of its own or
  must not have one. A link beside the project that points into it therefore opens nothing.
- Other mounts of the project (bind mounts) are found in ``/proc/self/mountinfo`` and closed as well.
- A move or a link out of the project would give its files more rights than they have, and is refused (``EXDEV`` or
  ``EACCES``).
- A restricted process can neither mount nor change mounts, and cannot trace (``ptrace``, ``pidfd_getfd``,
  ``process_vm_readv``) a process that is not under the same restriction; another rank's counts as another one.

Out of its reach: descriptors and memory maps opened for writing before; a file of the project that has a second name
(a hard link) in a granted directory, through that name; what was mounted or moved into the project from a granted
directory; mode, owner, times, extended attributes and locks (Landlock does not handle them); and whatever another
process does on request (a container daemon, an RPC to rank 0). It stops mistakes, and is no jail for hostile code.

Source: https://docs.kernel.org/userspace-api/landlock.html
"""

# Tens of thousands of paths may be handled here, as the strings that the kernel knows.
# ruff: noqa: PTH112, PTH118, PTH121, PTH208

from __future__ import annotations

import ctypes
import errno
import functools
import operator
import os
import re
import stat
import sys
from collections.abc import Iterator, Sequence
from enum import IntFlag
from pathlib import Path

# The numbers are the same on every architecture that Python 3.11 and torch run on.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_CREATE_RULESET_VERSION = 1
_RULE_PATH_BENEATH = 1
_PR_SET_NO_NEW_PRIVS = 38

#: Linux 5.19. ABI 1 (5.13 to 5.18) refuses every move between two directories, wherever they are, which breaks
#: Triton's cache and with it ``torch.compile``; a rule that does so much harm counts as no Landlock.
_LEAST_ABI = 2

#: Stay open whatever the project is: devices, shared memory, the process's own entries.
_SYSTEM = ("/dev", "/proc", "/sys")


class Right(IntFlag):
    """The kinds of access that we handle: those that write, by their numbers in ``linux/landlock.h``."""

    WRITE_FILE = 1 << 1
    REMOVE_DIR = 1 << 4
    REMOVE_FILE = 1 << 5
    MAKE_CHAR = 1 << 6
    MAKE_DIR = 1 << 7
    MAKE_REG = 1 << 8
    MAKE_SOCK = 1 << 9
    MAKE_FIFO = 1 << 10
    MAKE_BLOCK = 1 << 11
    MAKE_SYM = 1 << 12
    REFER = 1 << 13
    TRUNCATE = 1 << 14


#: A rule for anything but a directory may carry these only.
_FILE_RIGHTS = Right.WRITE_FILE | Right.TRUNCATE


class _RulesetAttr(ctypes.Structure):
    _fields_ = (("handled_access_fs", ctypes.c_uint64),)


class _PathBeneathAttr(ctypes.Structure):
    _pack_ = 1
    _layout_ = "ms"  # which _pack_ implies; Python 3.14 warns unless it is written
    _fields_ = (("allowed_access", ctypes.c_uint64), ("parent_fd", ctypes.c_int32))


_libc: ctypes.CDLL | None = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def abi_version() -> int:
    """The Landlock ABI that this kernel offers; 0 where there is none that can be used.

    None: another system than Linux, a kernel without Landlock or older than 5.19, a sandbox that forbids the call.
    """
    if _libc is None:
        return 0
    try:
        abi = _syscall(_CREATE_RULESET, None, 0, _CREATE_RULESET_VERSION)
    except OSError:
        return 0
    return abi if abi >= _LEAST_ABI else 0


def build_ruleset(project: Path, writable: Sequence[Path]) -> int:
    """Build the ruleset under which everything can be written except ``project``.

    Costs some microseconds for each entry beside the project and beside the directories above it. Build it once a run,
    after the directories that ``writable`` names are made, and let each rank that must not write call
    :func:`restrict` with it.

    Args:
        project: The directory to close; symbolic links in it are resolved.
        writable: Files and directories that stay open though they lie in the project or were not there to be
            found beside it. Those that do not exist are passed over; so is one that is the project or above it,
            because it would open the project as a whole.

    Returns:
        A descriptor of the ruleset, close-on-exec; the caller closes it. It holds no rights by itself.

    Raises:
        FileNotFoundError: ``project`` does not exist.
        NotADirectoryError: ``project`` is not a directory.
        OSError: The kernel refused the ruleset, such as ``EOPNOTSUPP`` where :func:`abi_version` is 0.
    """
    root = os.path.realpath(project, strict=True)
    if not os.path.isdir(root):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), root)
    closed = frozenset((root, *_other_mounts_of(root)))
    above = frozenset(parent for path in closed for parent in _parents(path))
    handled = _handled(abi_version())
    attr = _RulesetAttr(handled)
    ruleset_fd = _syscall(_CREATE_RULESET, ctypes.byref(attr), ctypes.sizeof(attr), 0)
    try:
        for path in _paths_beside(closed, above):
            _grant(ruleset_fd, path, handled, shared_files=False)
        for path in map(os.path.realpath, (*_SYSTEM, *map(str, writable))):
            if path not in closed and path not in above:
                _grant(ruleset_fd, path, handled, shared_files=True)
    except BaseException:
        os.close(ruleset_fd)
        raise
    return ruleset_fd


def restrict(ruleset_fd: int) -> None:
    """Put the calling thread, and all that it starts from now on, under the ruleset. There is no way back.

    Also sets ``no_new_privs``, which the kernel asks for: set-user-ID programs (``sudo``, ``fusermount``) get no
    privileges from here on. The descriptor stays open.

    Raises:
        RuntimeError: The process has more threads than this one; the others would still write.
        OSError: The kernel refused, such as ``E2BIG`` beneath 16 rulesets already.
    """
    num_threads = len(os.listdir("/proc/self/task"))
    if num_threads != 1:
        raise RuntimeError(
            f"Landlock would restrict one of {num_threads} threads\nexpected: a process with one thread\n"
            "to do: call restrict() right after the fork, before anything starts a thread"
        )
    assert _libc is not None
    if _libc.prctl(_PR_SET_NO_NEW_PRIVS, *map(ctypes.c_ulong, (1, 0, 0, 0))):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_NO_NEW_PRIVS) failed")
    _syscall(_RESTRICT_SELF, ruleset_fd, 0)


def _handled(abi: int) -> Right:
    return functools.reduce(operator.or_, (right for right in Right if right != Right.TRUNCATE or abi >= 3))


def _syscall(number: int, *arguments: object) -> int:
    if _libc is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    # A variadic call passes int as 32 bits and leaves the rest of the register undefined.
    wide = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    result = int(_libc.syscall(ctypes.c_long(number), *wide))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def _grant(ruleset_fd: int, path: str, rights: Right, *, shared_files: bool) -> None:
    """Open ``path`` and what is beneath it; quietly nothing where it is gone, out of reach, or a symbolic link.

    ``shared_files`` says whether a file with several names may be opened: a rule belongs to the inode, so it would
    open the file under all of its names, and one of them may be in the project.
    """
    try:
        path_fd = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return
    try:
        status = os.fstat(path_fd)
        if stat.S_ISLNK(status.st_mode):
            return
        if not stat.S_ISDIR(status.st_mode):
            if status.st_nlink > 1 and not shared_files:
                return
            rights &= _FILE_RIGHTS
        rule = _PathBeneathAttr(rights, path_fd)
        _syscall(_ADD_RULE, ruleset_fd, _RULE_PATH_BENEATH, ctypes.byref(rule), 0)
    except OSError as error:
        # EBADFD: an inode of the kernel's own (a pipe, a namespace). Those are never restricted.
        if error.errno != errno.EBADFD:
            raise
    finally:
        os.close(path_fd)


def _paths_beside(closed: frozenset[str], above: frozenset[str]) -> Iterator[str]:
    """Every entry of the directories ``above`` that neither is closed nor leads down to what is closed."""
    for directory in above:
        try:
            names = os.listdir(directory)
        except OSError:  # not ours to list, hence hardly ours to write in; `writable` can still name what is
            continue
        for name in names:
            path = os.path.join(directory, name)
            if path not in closed and path not in above:
                yield path


def _parents(path: str) -> list[str]:
    return [str(parent) for parent in Path(path).parents]


def _other_mounts_of(project: str) -> list[str]:
    """Paths outside the project at which the project, or a part of it, is mounted a second time."""
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as table:
            mounts = [_mount(line) for line in table]
    except OSError:
        return []
    holding = [mount for mount in mounts if _within(project, mount[2])]
    if not holding:
        return []
    device, root, point = max(holding, key=lambda mount: len(mount[2]))
    inner = os.path.normpath(os.path.join(root, os.path.relpath(project, point)))
    found = []
    for other_device, other_root, other_point in mounts:
        if other_device != device or _within(other_point, project):
            continue
        if _within(inner, other_root):
            path = os.path.normpath(os.path.join(other_point, os.path.relpath(inner, other_root)))
            twin = project
        elif _within(other_root, inner):
            path = other_point
            twin = os.path.normpath(os.path.join(project, os.path.relpath(other_root, inner)))
        else:
            continue
        if path != project and _same(path, twin):
            found.append(path)
    return found


def _mount(line: str) -> tuple[str, str, str]:
    """Device, root within its file system, and mount point of a line of mountinfo (man 5 proc_pid_mountinfo)."""
    fields = line.split(" ")
    return fields[2], _unescaped(fields[3]), _unescaped(fields[4])


def _unescaped(field: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)


def _within(path: str, directory: str) -> bool:
    return path == directory or path.startswith(directory.rstrip("/") + "/")


def _same(one: str, other: str) -> bool:
    try:
        return os.path.samefile(one, other)
    except OSError:
        return False
