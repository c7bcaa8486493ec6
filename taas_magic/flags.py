"""The flags of ``#pragma taas``: their one table, how they are read, and errors that point at the place.

Parser, spelling help and reference page all come from the table.

A new flag is one row of :data:`FLAGS` and one field of :class:`taas_magic.pragma.Pragma`.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

from taas_magic.errors import PragmaError

#: More ranks than any run of this design could have; it bounds what ``--show 0-99999999999`` can cost.
MAX_RANKS: Final = 65_536
MAX_CPUS: Final = 8
#: Units are counted in 64-bit integers on their way.
MAX_UNITS: Final = 2**63 - 1

#: One word by the shell's rules: plain characters, escapes, and quoted pieces.
_WORD: Final = re.compile(r"""(?:[^\s"'\\]|\\.|"(?:[^"\\]|\\.)*"|'[^']*')+""", re.DOTALL)
_WHOLE: Final = re.compile(r"[0-9]+(?:_[0-9]+)*")
_RANKS: Final = re.compile(r"([0-9]{1,6})(?:-([0-9]{1,6}))?")
_SHOW_EXPECTED: Final = f"rank numbers below {MAX_RANKS}, without spaces: 0 or 0,3 or 0-3, or the word all"
_NUMBER: Final = r"([0-9]{1,9}(?:\.[0-9]{1,9})?)"
_SECONDS: Final = re.compile(_NUMBER)
_TIME: Final = re.compile(rf"(?=.)(?:{_NUMBER}h)?(?:{_NUMBER}m)?(?:{_NUMBER}s)?")
_DASHES: Final = "-\N{EN DASH}\N{EM DASH}"
_FLAG_LIKE: Final = re.compile(rf"(?:^|\s)[{_DASHES}]{{1,2}}([A-Za-z][\w-]*)")


class BadValueError(ValueError):
    """A flag's value is wrong.

    Attributes:
        expected: What would have been right, in words.
        nearest: A valid value that the user may have meant, or an empty string.
        part: The piece of the value that is wrong, or an empty string for all of it.
    """

    def __init__(self, expected: str, *, nearest: str = "", part: str = "") -> None:
        super().__init__(expected)
        self.expected = expected
        self.nearest = nearest
        self.part = part


@dataclass(frozen=True, slots=True)
class Flag:
    """One row of the flag table."""

    #: As it is typed, with its two dashes.
    name: str
    #: What stands for the value in texts; empty for a switch, which takes no value.
    metavar: str
    #: From the value's text to the field's value; raises :class:`BadValueError`. A switch is given ``""``.
    parse: Callable[[str], Any]
    help: str
    #: The field of ``Pragma`` that it fills.
    field: str


def nearest_of(word: str, choices: Iterable[str]) -> str:
    """The choice that is spelt most like ``word``, or an empty string where none is close."""
    import difflib

    matches = difflib.get_close_matches(word.lower(), list(choices), n=1, cutoff=0.6)
    return matches[0] if matches else ""


def nearest_flag(word: str) -> str:
    """The flag that is spelt most like ``word`` (with one dash, a long dash or none), or an empty string."""
    bare = word.partition("=")[0].lstrip(_DASHES).replace("_", "-")
    match = nearest_of(bare, (flag.name[2:] for flag in FLAGS))
    return f"--{match}" if match else ""


def looks_like_flags(text: str) -> bool:
    """Whether ``text`` holds something that can only be meant as one of our flags."""
    return any(nearest_flag(name) for name in _FLAG_LIKE.findall(text))


def _whole_number(low: int, high: int) -> Callable[[str], int]:
    expected = f"a whole number, {low} or more" if high == MAX_UNITS else f"a whole number from {low} to {high}"

    def parse(text: str) -> int:
        if _WHOLE.fullmatch(text) and len(text) <= 30 and low <= int(text) <= high:
            return int(text)
        raise BadValueError(expected, nearest=_nearest_whole_number(text, low, high))

    return parse


def _nearest_whole_number(text: str, low: int, high: int) -> str:
    try:
        number = round(float(text.replace(",", "")))
    except (ValueError, OverflowError):
        return ""
    return str(min(max(number, low), high))


def _parse_writes(text: str) -> Literal["rank0", "all"]:
    choices: tuple[Literal["rank0"], Literal["all"]] = ("rank0", "all")
    for choice in choices:
        if text == choice:
            return choice
    raise BadValueError("rank0 or all", nearest=nearest_of(text, choices))


def _parse_show(text: str) -> frozenset[int] | Literal["all"]:
    if text == "all":
        return "all"
    if nearest := nearest_of(text, ("all",)):
        raise BadValueError(_SHOW_EXPECTED, nearest=nearest)
    ranks: set[int] = set()
    for part in text.split(","):
        ranks.update(_parse_rank_range(part))
    return frozenset(ranks)


def _parse_rank_range(part: str) -> range:
    match = _RANKS.fullmatch(part)
    if match is None:
        raise BadValueError(_SHOW_EXPECTED, part=part)
    first = int(match[1])
    last = int(match[2] or match[1])
    if first > last:
        raise BadValueError(_SHOW_EXPECTED, nearest=f"{last}-{first}", part=part)
    if last >= MAX_RANKS:
        raise BadValueError(_SHOW_EXPECTED, part=part)
    return range(first, last + 1)


def _parse_names(text: str) -> tuple[str, ...]:
    names = text.split(",")
    for name in names:
        if not name.isidentifier() or keyword.iskeyword(name):
            raise BadValueError("names of the notebook, separated by commas without spaces: a,b", part=name)
    return tuple(dict.fromkeys(map(_as_python_spells, names)))


def _as_python_spells(name: str) -> str:
    """Python stores identifiers in NFKC, so the notebook's namespace holds the name in that form only."""
    if name.isascii():
        return name
    import unicodedata

    return unicodedata.normalize("NFKC", name)


def _parse_timeout(text: str) -> float:
    timeout_s = _seconds(text)
    if timeout_s is not None and timeout_s > 0:
        return timeout_s
    shortened = re.sub(r"([hms])[a-z]*", r"\1", text.lower())
    raise BadValueError(
        "a time above 0: 90 or 90s, 30m, 2h, 1h30m",
        nearest=shortened if shortened != text and _seconds(shortened) else "",
    )


def _seconds(text: str) -> float | None:
    if _SECONDS.fullmatch(text):
        return float(text)
    match = _TIME.fullmatch(text)
    if match is None:
        return None
    hours, minutes, seconds = (float(group or 0) for group in match.groups())
    return hours * 3600 + minutes * 60 + seconds


def _parse_path(text: str) -> str:
    if text and "\0" not in text:
        return text
    raise BadValueError("the path of a file")


FLAGS: Final[tuple[Flag, ...]] = (
    Flag(
        "--gpus",
        "N",
        _whole_number(1, MAX_RANKS),
        "Number of ranks, one GPU each. The size in `#!pool.size` when left out; beyond one machine, a multiple of it.",
        "gpus",
    ),
    Flag(
        "--cpus",
        "K",
        _whole_number(1, MAX_CPUS),
        f"Number of machines without GPU that prepare what registered loaders yield, 1 to {MAX_CPUS}.",
        "cpus",
    ),
    Flag(
        "--units",
        "N",
        _whole_number(1, MAX_UNITS),
        "Number of units of data that those machines deliver; `20_480_000` is fine. Needs `--cpus`.",
        "units",
    ),
    Flag(
        "--writes",
        "rank0|all",
        _parse_writes,
        "Who may write in the project directory: rank 0 only (the default), or every rank.",
        "writes",
    ),
    Flag(
        "--show",
        "RANKS",
        _parse_show,
        "Ranks whose output is shown: `0` (the default), `0,3`, `0-3`, or `all`. All output is kept in any case.",
        "show",
    ),
    Flag(
        "--with",
        "NAMES",
        _parse_names,
        "Names of the notebook to send along that the cell reaches only dynamically, such as `--with model,data`.",
        "with_names",
    ),
    Flag(
        "--timeout",
        "TIME",
        _parse_timeout,
        "The run is stopped after this time: `90` or `90s`, `30m`, `2h`, `1h30m`. No limit when left out.",
        "timeout_s",
    ),
    Flag(
        "--env-file",
        "PATH",
        _parse_path,
        "A file of `KEY=VALUE` lines that are set in the environment of every rank.",
        "env_file",
    ),
    Flag(
        "--keep",
        "",
        lambda _: True,
        "The ranks stay when the cell is over, with their variables, process group and GPU memory, and the next cells "
        "with as many `--gpus` run in them, until `%taas release`.",
        "keep",
    ),
    Flag(
        "--detach",
        "",
        lambda _: True,
        "The run goes on without the notebook, which may be closed: the cell is over at once, with the run's id for "
        "`%taas attach`.",
        "detach",
    ),
    Flag(
        "--rank",
        "RANKS",
        _parse_show,
        "Which of the ranks that were kept run the cell: `3`, `0,3`, `1-3`, or `all` (the default).",
        "rank",
    ),
    Flag(
        "--rank-results",
        "",
        lambda _: True,
        "The cell's value is a list: what the last expression gave on every rank, in order.",
        "rank_results",
    ),
    Flag(
        "--dry-run",
        "",
        lambda _: True,
        "Run nothing: list what would travel (name, type, size, and why) and what would come home.",
        "dry_run",
    ),
)


def flags_reference() -> str:
    """The flag table as a Markdown table, one row a flag, without a final newline."""
    rows = ["| flag | meaning |", "| --- | --- |"]
    for flag in FLAGS:
        usage = f"{flag.name} {flag.metavar}".rstrip().replace("|", r"\|")
        rows.append(f"| `{usage}` | {flag.help} |")
    return "\n".join(rows)


# --- reading flags, and errors that point at the place in the line ---


class Span(NamedTuple):
    """Part of a line of the cell."""

    line_number: int
    line: str
    start: int
    end: int

    @property
    def part(self) -> str:
        """The text of it."""
        return self.line[self.start : self.end]

    def narrowed(self, part: str) -> Span:
        """Only ``part``, where it occurs and is not empty."""
        at = self.line.find(part, self.start, self.end) if part else -1
        return self if at < 0 else Span(self.line_number, self.line, at, at + len(part))


def line_span(line: str, line_number: int) -> Span:
    """All of a line but the white space around it."""
    return Span(line_number, line, len(line) - len(line.lstrip()), len(line.rstrip()))


def error_at(span: Span, found: str, *, expected: str = "", do: str = "") -> PragmaError:
    """An error that shows the line with carets under ``span``; the rest as in :meth:`TaasError.of`."""
    indent = "    "
    shown = "".join(char if char.isprintable() else " " for char in span.line.rstrip())
    carets = " " * _width(shown[: span.start]) + "^" * max(1, _width(shown[span.start : span.end]))
    where = f"line {span.line_number}: {found}\n{indent}{shown}\n{indent}{carets}"
    return PragmaError.of(where, expected=expected, do=do)


def _width(text: str) -> int:
    """Columns that a terminal or a notebook takes for ``text``."""
    if text.isascii():
        return len(text)
    import unicodedata

    wide = sum(unicodedata.east_asian_width(char) in "WF" for char in text)
    return len(text) + wide - sum(unicodedata.combining(char) > 0 for char in text)


def words_of(line: str, start: int, line_number: int) -> Iterator[Span]:
    """The words of a line from column ``start``, by the shell's rules, quotes still on."""
    at = start
    while line[at:].strip():
        at += len(line[at:]) - len(line[at:].lstrip())
        word = _WORD.match(line, at)
        end = word.end() if word else at
        if end < len(line) and not line[end].isspace():
            raise _unfinished(Span(line_number, line, end, end + 1))
        yield Span(line_number, line, at, end)
        at = end


def _unfinished(span: Span) -> PragmaError:
    if span.part == "\\":
        do = "delete it; more flags go into another #pragma taas line below"
        return error_at(span, "a backslash with nothing behind it", do=do)
    return error_at(span, "a quote that is not closed in this line", do=f"close it with another {span.part}")


class Given(NamedTuple):
    """One flag as it was typed."""

    flag: Flag
    value: Any
    name_at: Span
    value_at: Span


def read_flags(words: Iterable[Span]) -> Iterator[Given]:
    """The flags that the words make, in their order, values parsed.

    Raises:
        PragmaError: A word is no flag, or a flag's value is missing or wrong.
    """
    flags = {flag.name: flag for flag in FLAGS}
    rest = iter(words)
    for word in rest:
        name, equals, _ = word.part.partition("=")
        flag = flags.get(name)
        if flag is None:
            raise _unknown(word)
        name_at = Span(word.line_number, word.line, word.start, word.start + len(name))
        if equals:
            value_at = Span(word.line_number, word.line, name_at.end + 1, word.end)
        else:
            value_at = next(rest, name_at) if flag.metavar else name_at
        yield Given(flag, _read_value(flag, name_at, value_at), name_at, value_at)


def _read_value(flag: Flag, name_at: Span, value_at: Span) -> Any:
    given = value_at is not name_at
    if given and not flag.metavar:
        raise error_at(value_at, f"{flag.name} takes no value", do=f"write {flag.name} alone")
    if flag.metavar and (not given or _is_flag(value_at) or not value_at.part):
        do = f"write {flag.name} and a value: {flag.help}"
        raise error_at(name_at, f"{flag.name} has no value", expected=f"{flag.name} {flag.metavar}", do=do)
    try:
        return flag.parse(_unquoted(value_at.part) if given else "")
    except BadValueError as bad:
        raise _bad_value(flag, value_at, bad) from None


def _bad_value(flag: Flag, value_at: Span, bad: BadValueError) -> PragmaError:
    wrong = value_at.narrowed(bad.part)
    nearest = value_at.part.replace(bad.part, bad.nearest, 1) if bad.part else bad.nearest
    return error_at(
        wrong,
        f"{wrong.part} is not a value of {flag.name}",
        expected=bad.expected,
        do=f"write {flag.name} {nearest}" if bad.nearest else f"correct the value of {flag.name}",
    )


def _is_flag(span: Span) -> bool:
    """A word with dashes where a value should be, unless it is joined to its flag by ``=``."""
    return span.part.startswith("--") and not span.line[: span.start].endswith("=")


def _unquoted(word: str) -> str:
    import shlex

    return "".join(shlex.split(word, comments=False))


def _unknown(word: Span) -> PragmaError:
    nearest = nearest_flag(word.part)
    do = f"write {nearest}" if nearest else "delete it; a comment goes into a line of its own"
    return error_at(word, f"{word.part} is not a flag", expected=", ".join(flag.name for flag in FLAGS), do=do)
