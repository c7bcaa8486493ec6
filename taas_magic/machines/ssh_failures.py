"""Why a process could not be started on a machine, in ssh's own words, and what a user can do about it."""

from __future__ import annotations

import re
from collections.abc import Sequence

from taas_magic.errors import TaasError
from taas_magic.units import format_exit

_NOT_EXECUTABLE, _NOT_FOUND = 126, 127  # exit codes of every shell
_NAME_ANOTHER = 'or name the one to take: `python = "..."` of the pool'

#: What ssh says, and what to do about it.
_SYMPTOMS = {
    r"Permission denied \(|Too many authentication failures|no mutual signature": (
        "`{by_hand}` in a terminal has to get in without a question, since a notebook cannot answer one: put your"
        " public key there (`ssh-copy-id`), or unlock the key (`ssh-add`)"
    ),
    r"Host key verification failed": (
        "the machine's key is not known here: run `{by_hand}` in a terminal once, and compare the fingerprint"
    ),
    r"Connection refused": "see that sshd runs there, and that the port is right",
    r"Could not resolve hostname": "see how the host is spelled, here and in the ssh configuration",
    r"timed out|No route to host|Network is unreachable|not responding": (
        "see that the machine is up and can be reached from here: `{by_hand}`"
    ),
    r"local forwarding|bind \[|unix_listener|cannot listen": (
        "see which `LocalForward` the ssh configuration has for this machine, and whether another ssh holds it open"
    ),
}
#: Said at length before the words that also stand for a key that was never known.
_KEY_CHANGED = "REMOTE HOST IDENTIFICATION HAS CHANGED"
_REMEDY_KEY_CHANGED = (
    "somebody else may be answering in its place; if you know why its key changed, remove the old one with"
    " `ssh-keygen -R {host}`, and confirm the new one with `{by_hand}` in a terminal"
)
#: What ssh says when it has said what happened, as where a jump host was the matter.
_ECHOES = re.compile(
    r"kex_exchange_identification: |banner exchange: |Connection (closed|reset) by UNKNOWN|stdio forwarding failed"
    r"|Killed by signal"
)


class MachineStartError(TaasError, ConnectionError):
    """A process could not be started on a machine. Nothing runs there.

    Attributes:
        machine_name: The machine's.
        reason: What was found and what to do, in one line and without the machine's name.
    """

    machine_name: str = ""
    reason: str = ""

    @classmethod
    def on(cls, machine_name: str, found: str, do: str) -> MachineStartError:
        """Compose it for a machine."""
        error = cls.of(f"machine {machine_name!r}: {found}", do=do)
        error.machine_name = machine_name
        error.reason = f"{found} (to do: {do})"
        return error


def telling(lines: Sequence[str]) -> str:
    """The last line that says what happened; the last one where none does; "" where there is none."""
    return next((line.strip() for line in reversed(lines) if not _ECHOES.match(line)), lines[-1] if lines else "")


def explain_ssh(lines: Sequence[str], *, host: str, by_hand: str) -> tuple[str, str]:
    """What was found and what to do, where ssh itself has failed.

    Args:
        lines: What it has written to stderr.
        host: Where it was to go.
        by_hand: What a user can type to see for themselves.
    """
    known = ((line.strip(), remedy) for line in reversed(lines) if (remedy := _remedy(line)))
    unknown = telling(lines) or "ssh failed without a word, or what it had started was killed"
    found, remedy = next(known, (unknown, "see what `{by_hand}` says in a terminal"))
    if any(_KEY_CHANGED in line for line in lines):
        remedy = _REMEDY_KEY_CHANGED
    return found, remedy.format(by_hand=by_hand, host=host)


def _remedy(line: str) -> str | None:
    return next((remedy for symptom, remedy in _SYMPTOMS.items() if re.search(symptom, line)), None)


def explain_program(command: Sequence[str], exit_code: int, lines: Sequence[str]) -> tuple[str, str]:
    """What was found and what to do, where a program has ended before its answer.

    Args:
        command: What was started.
        exit_code: What it, or the shell there, has ended with.
        lines: What it has written last.
    """
    program, text = command[0], "\n".join(lines)
    said = f" ({telling(lines)})" if lines else ""
    if exit_code in (_NOT_FOUND, _NOT_EXECUTABLE):
        return f"`{program}` cannot be run there{said}", f"install Python 3.11 or later there, {_NAME_ANOTHER}"
    if "Unknown option: -P" in text:
        return f"`{program}` there is older than Python 3.11", f"install a later one there, {_NAME_ANOTHER}"
    if missing := re.search(r"No module named '?([\w.]+)", text):
        found = f"`{program}` there has no {missing[1].partition('.')[0]}{said}"
        return found, f"`{program} -m pip install --upgrade taas-magic` there, {_NAME_ANOTHER}"
    return (
        f"`{program}` {format_exit(exit_code)} before it answered{said}",
        f"see what `{' '.join(command)}` says there",
    )


def explain_missing(program: str, error: OSError) -> tuple[str, str]:
    """What was found and what to do, where a program of this machine could not be started."""
    remedy = "install OpenSSH's client" if program == "ssh" else 'name another one: `python = "..."` of the pool'
    return f"`{program}` cannot be run here ({error.strerror})", remedy
