"""Why a process may have died."""

from __future__ import annotations

import contextlib
import signal


def oom_kills() -> int:
    """How many processes the kernel's memory killer has ended so far, on this machine and in this cgroup."""
    counts = [0]
    with contextlib.suppress(OSError, ValueError), open("/proc/vmstat", encoding="ascii") as vmstat:
        counts += [int(line.split()[1]) for line in vmstat if line.startswith("oom_kill ")]
    with contextlib.suppress(OSError, ValueError), open("/sys/fs/cgroup/memory.events", encoding="ascii") as events:
        counts += [int(line.split()[1]) for line in events if line.startswith("oom_kill ")]
    return max(counts)


def death_hint(exit_code: int, new_oom_kills: int) -> str:
    """The likely cause of an exit; ``exit_code`` as ``subprocess`` has it."""
    if exit_code == -signal.SIGKILL:
        if new_oom_kills > 0:
            return "the kernel's memory killer ended it: the machine, or the container's limit, ran out of memory"
        return "something killed it from outside: another user's or a container's limit, or `kill -9`"
    if exit_code in _SIGNAL_HINTS:
        return _SIGNAL_HINTS[exit_code]
    if exit_code < 0:
        return ""
    return "the process ended itself without an exception: `os._exit`, or a library's `exit()` or `abort()`"


_SIGNAL_HINTS = {
    -signal.SIGSEGV: "a crash in native code (C++, CUDA, an extension module); its last lines of output may tell where",
    -signal.SIGABRT: "native code gave up (an assertion, an uncaught C++ exception); its last lines may tell why",
    -signal.SIGBUS: "memory that was promised was not there: /dev/shm or a memory-mapped file ran out of space",
    -signal.SIGFPE: "a division by zero in native code",
    -signal.SIGILL: "an instruction that this CPU does not have: a library was built for another one",
    -signal.SIGTERM: "something asked it to end (SIGTERM)",
}
