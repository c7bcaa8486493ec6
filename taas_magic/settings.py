"""Settings: ``taas.toml`` of the project over the user's ``config.toml``, key by key.

The dataclasses below are the schema: a table of the files is a dataclass, and a key is a field whose metadata, made by
:func:`_key`, say how it is read and what it means. A new key is one field; a new table is a dataclass, a field
of :class:`Settings` and a row of ``_TABLES``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import Field, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final, Literal

from taas_magic.errors import SettingsError
from taas_magic.machines.keys import is_key
from taas_magic.machines.machine_list import Machine, MachineError, parse_machine, read_machine_list
from taas_magic.settings_text import expand_home, read_text

PROJECT_FILE: Final = "taas.toml"


@dataclass(frozen=True, slots=True)
class _File:
    """A settings file, and what paths in it are relative to."""

    path: Path
    text: str
    environ: Mapping[str, str]

    def resolve(self, path: str) -> Path:
        return (self.path.parent / expand_home(path, self.environ)).resolve()

    def at(self, *keys: str) -> str:
        """File and line where ``keys`` are set, for an error's text."""
        return f"{self.path}, line {_line_of(self.text, keys)}"


class _UnfitError(ValueError):
    """A value does not fit its key; what would fit stands with the key."""


#: Reads a TOML value; raises _UnfitError.
_Read = Callable[[Any, _File], Any]


def _key(read: _Read, *, expected: str, default: str, meaning: str) -> dict[str, Any]:
    """The metadata that make a dataclass field a key: ``default`` and the rest are words for the reader."""
    return {"read": read, "expected": expected, "default": default, "meaning": meaning}


def _directory(value: Any, file: _File) -> Path:
    path = _path(value, file)
    if not path.is_dir():
        raise _UnfitError
    return path


def _path(value: Any, file: _File) -> Path:
    if not isinstance(value, str) or not value or "\0" in value:
        raise _UnfitError
    return file.resolve(value)


def _paths(value: Any, file: _File) -> tuple[Path, ...]:
    if not isinstance(value, list):
        raise _UnfitError
    return tuple(_path(item, file) for item in value)


def _number(low: float) -> _Read:
    def read(value: Any, _file: _File) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value < math.inf:
            raise _UnfitError
        return float(value)

    return read


def _whole_number(low: int) -> _Read:
    def read(value: Any, _file: _File) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise _UnfitError
        return value

    return read


def _one_of(*choices: str) -> _Read:
    def read(value: Any, _file: _File) -> str:
        if value not in choices:
            raise _UnfitError
        return str(value)

    return read


@dataclass(frozen=True, slots=True)
class RunnerAddress:
    """A machine whose runner is up: where it listens, and its public key."""

    name: str
    address: str
    key: str


def _flag(value: Any, _file: _File) -> bool:
    if not isinstance(value, bool):
        raise _UnfitError
    return value


def _text(value: Any, _file: _File) -> str:
    if not isinstance(value, str) or not value.strip() or "\0" in value:
        raise _UnfitError
    return value


def _machines(value: Any, _file: _File) -> tuple[Machine, ...]:
    if not isinstance(value, list) or not value or not all(isinstance(each, str) for each in value):
        raise _UnfitError
    try:
        machines = tuple(parse_machine(each) for each in value)
    except MachineError as error:
        raise _UnfitError from error
    if len({(each.host, each.port) for each in machines}) < len(machines):
        raise _UnfitError
    return machines


def _machine_list(value: Any, file: _File) -> tuple[Machine, ...]:
    return read_machine_list(_path(value, file))


def _runners(value: Any, _file: _File) -> tuple[RunnerAddress, ...]:
    if not isinstance(value, list) or not value:
        raise _UnfitError
    found = []
    for each in value:
        if not isinstance(each, dict) or not {"address", "key"} <= each.keys() <= {"address", "key", "name"}:
            raise _UnfitError
        address, key = each["address"], each["key"]
        is_right = isinstance(address, str) and re.fullmatch(r"tcp://\S+:\d+", address) and isinstance(key, str)
        if not is_right or not is_key(key):
            raise _UnfitError
        found.append(RunnerAddress(str(each.get("name", address.removeprefix("tcp://"))), address, key))
    # Machines are told apart by their names, too.
    if min(len({each.address for each in found}), len({each.name for each in found})) < len(found):
        raise _UnfitError
    return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectSettings:
    """``[project]``: the files that only rank 0 may change."""

    #: Absolute, symbolic links resolved.
    directory: Path = field(
        metadata=_key(
            _directory,
            expected='the path of a directory that exists, such as "."',
            default="the kernel's working directory",
            meaning="The directory in which ranks other than 0 cannot write.",
        ),
    )
    #: Absolute, symbolic links resolved; need not exist.
    writable: tuple[Path, ...] = field(
        default=(),
        metadata=_key(
            _paths,
            expected='a list of paths, such as ["cache", "logs"]',
            default="no path",
            meaning="Paths in the project directory where every rank may write all the same.",
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StopSettings:
    """``[stop]``: how a run is stopped."""

    grace_s: float = field(
        default=5.0,
        metadata=_key(
            _number(0),
            expected="seconds, 0 or more",
            default="5.0",
            meaning="Time that a rank has from an interrupt to SIGTERM, and again from SIGTERM to SIGKILL.",
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSettings:
    """``[local]``: this machine as a place for ranks."""

    max_ranks: int = field(
        default=64,
        metadata=_key(
            _whole_number(1),
            expected="a whole number, 1 or more",
            default="64",
            meaning="The most ranks that one run may have on this machine.",
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputSettings:
    """``[output]``: what of a run's output is shown."""

    tail_lines: int = field(
        default=20,
        metadata=_key(
            _whole_number(0),
            expected="a whole number, 0 or more",
            default="20",
            meaning="Number of last lines of output that are shown of a rank that failed.",
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSettings:
    """``[state]``: what of the notebook's state is kept for the next run."""

    budget_gib: float | None = field(
        default=None,
        metadata=_key(
            _number(0),
            expected="GiB, 0 or more",
            default="a quarter of this machine's memory",
            meaning="Memory for what was sent, so that it is not sent again; what was used least recently goes first.",
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepSettings:
    """``[keep]``: ranks that stay between cells."""

    idle_s: float = field(
        default=3600.0,
        metadata=_key(
            _number(0),
            expected="seconds, 0 or more",
            default="3600.0",
            meaning="Time without a cell after which ranks that were kept end by themselves.",
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliverySettings:
    """``[delivery]``: what producers prepare for the ranks."""

    processes: int = field(
        default=4,
        metadata=_key(
            _whole_number(1),
            expected="a whole number, 1 or more",
            default="4",
            meaning="Producers that `--cpus` starts for each machine, one a core.",
        ),
    )
    memory_mib: float | None = field(
        default=None,
        metadata=_key(
            _number(0),
            expected="MiB, 0 or more",
            default="an eighth of this machine's memory, and at most 4096",
            meaning="The most memory for elements that are prepared, or in use by the ranks.",
        ),
    )
    prepare_mib: float | None = field(
        default=None,
        metadata=_key(
            _number(0),
            expected="MiB, 0 or more",
            default="256, or `memory_mib` where that is less",
            meaning="The ranks start when so much is prepared, or a loader is exhausted,",
        ),
    )
    prepare_s: float = field(
        default=5.0,
        metadata=_key(
            _number(0),
            expected="seconds, 0 or more",
            default="5.0",
            meaning="or when it was prepared for so long.",
        ),
    )
    transport: Literal["shared", "tcp"] = field(
        default="shared",
        metadata=_key(
            _one_of("shared", "tcp"),
            expected='"shared" or "tcp"',
            default='"shared"',
            meaning="How elements get to the ranks: shared memory, or a connection, as from another machine.",
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSettings:
    """``[pools.NAME]``: machines of one kind, which `#!NAME.8` names."""

    #: What cells call it; it stands in the table's head.
    name: str = ""
    engine: Literal["local", "ssh", "runner", "ray"] = field(
        default="local",
        metadata=_key(
            _one_of("local", "ssh", "runner", "ray"),
            expected='"local", "ssh" or "runner"',
            default='"local"',
            meaning="This machine; machines on which runners are started over ssh; or machines whose runners are up.",
        ),
    )
    machines: tuple[Machine, ...] = field(
        default=(),
        metadata=_key(
            _machines,
            expected='a list such as ["node1", "me@node2:2222 slots=4"], each machine once',
            default="none",
            meaning="For `ssh`: the machines, as ssh knows them; the first one is the head.",
        ),
    )
    machine_list: tuple[Machine, ...] = field(
        default=(),
        metadata=_key(
            _machine_list,
            expected="the path of a machine list",
            default="none",
            meaning="The same in a file of its own, a machine a line.",
        ),
    )
    runners: tuple[RunnerAddress, ...] = field(
        default=(),
        metadata=_key(
            _runners,
            expected='a list such as [{ address = "tcp://node1:7777", key = "..." }], `name` if you like, each once',
            default="none",
            meaning="For `runner`: where the runners listen, and their public keys; the first one is the head.",
        ),
    )
    gpus: int | None = field(
        default=None,
        metadata=_key(
            _whole_number(1),
            expected="a whole number, 1 or more",
            default="all of them",
            meaning="The GPUs of a machine that runs may take; without a GPU, the ranks that may rehearse there.",
        ),
    )
    role: Literal["gpu", "cpu"] = field(
        default="gpu",
        metadata=_key(
            _one_of("gpu", "cpu"), expected='"gpu" or "cpu"', default='"gpu"', meaning="What the machines are for."
        ),
    )
    env_file: Path | None = field(
        default=None,
        metadata=_key(
            _path,
            expected="the path of an environment file",
            default="none",
            meaning="Variables for all ranks of the pool, as `--env-file` has them.",
        ),
    )
    code_dir: Path | None = field(
        default=None,
        metadata=_key(
            _directory,
            expected="the path of a directory that exists",
            default="the project's directory",
            meaning="What the machines get of the project, with what git would take of it.",
        ),
    )
    code_limit_mib: float = field(
        default=100.0,
        metadata=_key(
            _number(0),
            expected="MiB, 0 or more",
            default="100.0",
            meaning="The most that is sent of it.",
        ),
    )
    python: str | None = field(
        default=None,
        metadata=_key(
            _text,
            expected='a path or a name, such as "~/venv/bin/python"',
            default='"python3"',
            meaning="The Python of the machines, in which taas-magic is installed.",
        ),
    )
    ssh_config: Path | None = field(
        default=None,
        metadata=_key(
            _path,
            expected="the path of an ssh configuration file",
            default="~/.ssh/config and the system's",
            meaning="Read by ssh in place of the user's own.",
        ),
    )
    tunnel: bool = field(
        default=False,
        metadata=_key(
            _flag,
            expected="true or false",
            default="false",
            meaning="Reach the head through ssh, where no other port of it is open.",
        ),
    )
    budget: int | None = field(
        default=None,
        metadata=_key(
            _whole_number(1),
            expected="a whole number, 1 or more",
            default="no bound",
            meaning="The most GPUs that one run may take.",
        ),
    )
    lease_s: float = field(
        default=60.0,
        metadata=_key(
            _number(10),
            expected="seconds, 10 or more",
            default="60.0",
            meaning="How long a run goes on when nothing is heard of its notebook.",
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All settings, validated. Each field is a table of the files."""

    project: ProjectSettings
    stop: StopSettings = field(default_factory=StopSettings)
    local: LocalSettings = field(default_factory=LocalSettings)
    output: OutputSettings = field(default_factory=OutputSettings)
    state: StateSettings = field(default_factory=StateSettings)
    keep: KeepSettings = field(default_factory=KeepSettings)
    delivery: DeliverySettings = field(default_factory=DeliverySettings)
    pools: Mapping[str, PoolSettings] = field(default_factory=dict)


_POOLS: Final = "pools"
_POOL: Final = "pools."
#: Two ways to say the same: of two files, what the one says replaces what the other says.
_INSTEAD: Final = {"machines": "machine_list", "machine_list": "machines"}
#: As `#!NAME.8` can name it.
_POOL_NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")
_TABLES: Final[dict[str, type[Any]]] = {
    "project": ProjectSettings,
    "stop": StopSettings,
    "local": LocalSettings,
    "output": OutputSettings,
    "state": StateSettings,
    "keep": KeepSettings,
    "delivery": DeliverySettings,
}


def load_settings(cwd: Path, environ: Mapping[str, str]) -> Settings:
    """Read the settings that hold for a kernel in ``cwd``.

    ``taas.toml`` is looked for in ``cwd`` and the directories above it, and the nearest one counts; below it, key by
    key, ``$XDG_CONFIG_HOME/taas/config.toml``, or else ``~/.config/taas/config.toml``. A missing file is no error.

    Args:
        cwd: The kernel's working directory.
        environ: The kernel's environment; ``XDG_CONFIG_HOME`` and ``HOME`` are read.

    Raises:
        SettingsError: A file cannot be read, is not TOML, or has a table, key or value that is not known. The text
            names file, line and key.
    """
    merged: dict[str, dict[str, Any]] = {table: {} for table in _TABLES}
    merged["project"]["directory"] = cwd.resolve()
    pools: dict[str, dict[str, Any]] = {}
    for path in _files(cwd, environ):
        for table, key, value in _read_file(path, environ):
            if table.startswith(_POOL):
                pool = pools.setdefault(table.removeprefix(_POOL), {})
                pool.pop(_INSTEAD.get(key, ""), None)
                pool[key] = value
            else:
                merged[table][key] = value
    return Settings(
        **{table: schema(**merged[table]) for table, schema in _TABLES.items()},
        pools={name: _pool(name, values) for name, values in pools.items()},
    )


def _pool(name: str, values: dict[str, Any]) -> PoolSettings:
    pool = PoolSettings(name=name, **values)
    return replace(pool, machines=pool.machines or pool.machine_list)


def settings_reference() -> str:
    """All keys as a Markdown table, one row a key, without a final newline."""
    rows = ["| key | value | default | meaning |", "| --- | --- | --- | --- |"]
    for table, schema in {**_TABLES, f"{_POOL}NAME": PoolSettings}.items():
        for name, spec in _keys_of(schema).items():
            meta = spec.metadata
            rows.append(f"| `{table}.{name}` | {meta['expected']} | {meta['default']} | {meta['meaning']} |")
    return "\n".join(rows)


def nearest_name(name: str, choices: Mapping[str, object]) -> str:
    """The choice that is spelt most like ``name``, or an empty string where none is close."""
    import difflib

    return next(iter(difflib.get_close_matches(name, choices, n=1)), "")


def _files(cwd: Path, environ: Mapping[str, str]) -> Iterator[Path]:
    """The files that exist, what counts less first."""
    user = _user_file(environ)
    if user is not None and user.exists():
        yield user
    directory = cwd.resolve()
    for above in (directory, *directory.parents):
        if (above / PROJECT_FILE).exists():
            yield above / PROJECT_FILE
            return


def _user_file(environ: Mapping[str, str]) -> Path | None:
    # The XDG base directory specification has a relative path ignored.
    config_home = environ.get("XDG_CONFIG_HOME", "")
    if config_home.startswith("/"):
        return Path(config_home, "taas", "config.toml")
    home = environ.get("HOME", "")
    return Path(home, ".config", "taas", "config.toml") if home else None


def _read_file(path: Path, environ: Mapping[str, str]) -> Iterator[tuple[str, str, Any]]:
    """Table, key and value of everything that a file sets, validated."""
    file = _File(path, read_text(path), environ)
    for table, content in _parse_toml(file).items():
        if table == _POOLS:
            yield from _read_pools(file, content)
            continue
        schema = _TABLES.get(table)
        if schema is None or not isinstance(content, dict):
            raise _unknown_table(file, table)
        yield from _read_table(file, table, schema, content)


def _read_table(file: _File, table: str, schema: type[Any], content: dict[str, Any]) -> Iterator[tuple[str, str, Any]]:
    keys = _keys_of(schema)
    for key, value in content.items():
        if key not in keys:
            raise _unknown_key(file, table, keys, key)
        yield table, key, _read_value(file, table, keys[key], value)


def _read_pools(file: _File, content: Any) -> Iterator[tuple[str, str, Any]]:
    for name, pool in content.items() if isinstance(content, dict) else [("", None)]:
        if not isinstance(pool, dict) or not _POOL_NAME.fullmatch(name):
            at = file.at(_POOLS, name) if name else file.at(_POOLS)
            raise SettingsError.of(
                f"{at}: {name or _POOLS} is no pool",
                expected="tables [pools.NAME], with names of letters, digits, - and _, such as [pools.g2]",
                do="write such a line, and the pool's keys below it",
            )
        if _INSTEAD.keys() <= pool.keys():
            raise SettingsError.of(
                f"{file.at(_POOLS, name, 'machine_list')}: [{_POOL}{name}] has machines and machine_list",
                expected="one of them: they say the same thing",
                do="delete the other",
            )
        yield from _read_table(file, f"{_POOL}{name}", PoolSettings, pool)


def _parse_toml(file: _File) -> dict[str, Any]:
    import tomllib

    try:
        return tomllib.loads(file.text)
    except tomllib.TOMLDecodeError as error:
        at = re.search(r"\s*\(at (?:line (\d+), column \d+|end of document)\)$", str(error))
        line = int(at[1]) if at and at[1] else file.text.rstrip().count("\n") + 1
        what = str(error)[: at.start()] if at else str(error)
        raise SettingsError.of(f"{file.path}, line {line}: {what}", expected="TOML", do="correct this line") from error


def _read_value(file: _File, table: str, spec: Field[Any], value: Any) -> Any:
    try:
        return spec.metadata["read"](value, file)
    except (_UnfitError, OSError):  # OSError: a path that the system refuses to look up, such as one too long
        raise SettingsError.of(
            f"{file.at(*table.split('.'), spec.name)}: {table}.{spec.name} is {value!r}",
            expected=spec.metadata["expected"],
            do=f"correct it, or delete it: then it is {spec.metadata['default']}",
        ) from None


def _unknown_table(file: _File, table: str) -> SettingsError:
    nearest = nearest_name(table, _TABLES)
    wrong = "is not written as a table" if table in _TABLES else "is not a table of the settings"
    return SettingsError.of(
        f"{file.at(table)}: {table} {wrong}",
        expected=", ".join(f"[{name}]" for name in (*_TABLES, "pools.NAME")),
        do=f"write [{nearest}] as a line, and its keys below" if nearest else "delete it",
    )


def _unknown_key(file: _File, table: str, keys: Mapping[str, object], key: str) -> SettingsError:
    nearest = nearest_name(key, keys)
    return SettingsError.of(
        f"{file.at(*table.split('.'), key)}: {key} is not a key of [{table}]",
        expected=", ".join(keys),
        do=f"write {nearest}" if nearest else "delete it",
    )


def _keys_of(schema: type[Any]) -> dict[str, Field[Any]]:
    return {spec.name: spec for spec in fields(schema) if "read" in spec.metadata}


_HEADER: Final = re.compile(r"\s*\[+([^\]=]+)\]")
_ASSIGNMENT: Final = re.compile(r"\s*([^=#\[]+?)\s*=")


def _line_of(text: str, wanted: tuple[str, ...]) -> int:
    """The line that sets ``wanted``, or the one of the nearest table around it (tomllib keeps no positions)."""
    header: tuple[str, ...] = ()
    best_line, best_depth = 1, 0
    for number, line in enumerate(text.split("\n"), start=1):
        if match := _HEADER.match(line):
            here = header = _dotted(match[1])
        elif match := _ASSIGNMENT.match(line):
            here = header + _dotted(match[1])
        else:
            continue
        if here[: len(wanted)] == wanted:
            return number
        if here == wanted[: len(here)] and len(here) > best_depth:
            best_line, best_depth = number, len(here)
    return best_line


def _dotted(name: str) -> tuple[str, ...]:
    return tuple(part.strip().strip("\"'") for part in name.split("."))
