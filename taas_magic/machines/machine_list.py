"""Machine lists: the machines of a pool or a launch, one a line.

What a line may be::

    # a comment, or nothing
    node1
    node2 slots=4             # ranks, where they are not to be as many as the machine has GPUs
    me@node3:2222             # user and port of ssh
    node4 address=10.0.0.4    # by which the other machines reach it
    [fe80::1]:2222
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from taas_magic.errors import SettingsError
from taas_magic.settings_text import read_text

_HOST: Final = re.compile(
    r"(?:(?P<user>[^@\s\[\]:]+)@)?(?:\[(?P<ip6>[0-9A-Fa-f:.%\w]+)\]|(?P<host>[^\s\[\]:@=#/]+))(?::(?P<port>[0-9]{1,5}))?"
)
_SLOTS: Final = re.compile(r"[1-9][0-9]{0,5}")
_EXPECTED: Final = "[user@]host[:port] [slots=N] [address=A]"


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine as it was typed; None is what ssh's configuration, or the machine itself, says."""

    host: str
    user: str | None = None
    port: int | None = None
    #: The most ranks on it.
    slots: int | None = None
    #: By which other machines reach it.
    address: str | None = None

    @property
    def name(self) -> str:
        """What to call it: with the port, since one host may be several machines."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        user = f"{self.user}@" if self.user else ""
        return f"{user}{host}" + (f":{self.port}" if self.port else "")


class MachineError(ValueError):
    """A line is no machine; says what was found."""


def parse_machine(text: str) -> Machine:
    """Read one machine.

    Raises:
        MachineError: if it is none.
    """
    words = text.split()
    match = _HOST.fullmatch(words[0]) if words else None
    if match is None:
        raise MachineError(f"{text!r} is no machine")
    port = int(match["port"]) if match["port"] else None
    if port is not None and not 0 < port < 2**16:
        raise MachineError(f"port {port} in {text!r}")
    options: dict[str, str] = {}
    for word in words[1:]:
        name, equals, value = word.partition("=")
        if name not in ("slots", "address") or not equals or not value or name in options:
            raise MachineError(f"{word!r} in {text!r}")
        options[name] = value
    slots = options.get("slots")
    if slots is not None and not _SLOTS.fullmatch(slots):
        raise MachineError(f"slots={slots} in {text!r}")
    return Machine(
        match["ip6"] or match["host"], match["user"], port, int(slots) if slots else None, options.get("address")
    )


def read_machine_list(path: Path) -> tuple[Machine, ...]:
    """Read a machine list.

    Raises:
        SettingsError: if the file cannot be read, a line is no machine, or a machine stands there twice.
    """
    machines: dict[tuple[str, int | None], int] = {}
    found: list[Machine] = []
    for number, line in _lines(path):
        try:
            machine = parse_machine(line)
        except MachineError as error:
            raise SettingsError.of(
                f"{path}, line {number}: {error}", expected=_EXPECTED, do="correct it, or put # before it"
            ) from None
        key = machine.host, machine.port
        if key in machines:
            raise SettingsError.of(
                f"{path}, line {number}: {machine.name} stands in line {machines[key]} already",
                expected="each machine once",
                do="delete one of the lines; for more ranks on it, write slots=N",
            )
        machines[key] = number
        found.append(machine)
    if not found:
        raise SettingsError.of(f"{path} names no machine", expected=f"a line for each: {_EXPECTED}", do="add one")
    return tuple(found)


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        text = re.sub(r"(^|\s)#.*", "", line).strip()
        if text:
            yield number, text
