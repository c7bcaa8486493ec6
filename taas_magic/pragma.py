"""From the head of a cell to a :class:`Pragma`, and to the code that the ranks run.

``#!<pool>.<size>`` and ``#pragma taas <flags>`` head a cell, or ``%%taas <flags>`` does. This module reads text only:
it knows neither what the place can hold nor whether a flag can be honoured yet.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Final, Literal, NamedTuple

from taas_magic.errors import PragmaError
from taas_magic.flags import (
    MAX_CPUS,
    Given,
    Span,
    error_at,
    flags_reference,
    line_span,
    looks_like_flags,
    read_flags,
    words_of,
)

__all__ = [
    "ParsedCell",
    "Pragma",
    "flags_reference",
    "parse_cell",
    "parse_flags",
    "parse_magic_cell",
    "parse_plain_cell",
]

MAX_GPUS_PER_MACHINE: Final = 1024

#: Cell magics whose body is Python that runs in the same process, so that a pragma in the body is meant for us.
#: The body of any other cell magic is text of another language, or of a file, and never read.
PYTHON_CELL_MAGICS: Final = frozenset(
    {"capture", "debug", "memit", "prun", "pyinstrument", "scalene", "snakeviz", "time", "timeit", "wandb"}
)

_PRAGMA_LINE: Final = re.compile(
    r"\s*(?P<head>#\s*(?P<keyword>\w+)(?P<colon>\s*:)?\s+(?P<tool>\w+))(?P<rest>.*)", re.DOTALL
)
_PLACE_LINE: Final = re.compile(r"\s*#(?P<gap>\s*)!\s*(?P<place>\S*)(?P<rest>.*)", re.DOTALL)
_PLACE: Final = re.compile(r"(?P<pool>[A-Za-z][A-Za-z0-9_-]*)\.(?P<size>[0-9]{1,9})")
#: A word that is no place, and can hardly be anything else: ``g2.x``, ``g2.8.``, ``g2``, ``g2:8``.
_ALMOST_PLACE: Final = re.compile(r"[\w-]+\.\S*|[A-Za-z]+[0-9]+(?:[:;,=_-][0-9]*)?")
#: What is no place though ``python3.11`` has the form of one: what shebangs and commented-out shell lines name.
_PROGRAM: Final = re.compile(r"/.*|(?:python|pip|pypy|perl|ruby|lua|php|node|tclsh|wish)[0-9.]*", re.DOTALL)
_CELL_MAGIC: Final = re.compile(r"\s*%%(?!\w+\?)(\S+)")
#: A line of the head that has the cell planned, and not run.
_PLAN: Final = re.compile(r"(\s*)(%?taas\s+plan\s*)")
#: Lines that mean the kernel wherever they stand alone.
_OUR_LINE: Final = re.compile(r"\s*(#.*|(\w+\s*=\s*)?%?taas(\s.*)?|%?(re|un)?load_ext\s.*)")
_LOAD_US: Final = re.compile(r"(\s*)(%?(?:re)?load_ext\s+taas_magic\s*)")
#: Python as far as it is needed to tell comments from strings, IPython's lines included. A quote left open ends
#: with its line, as in ``!echo it's``; a triple quote left open takes the rest.
_TOKEN: Final = re.compile(
    r'''
      (?P<comment>\#[^\n]*)
    | ^[^\S\n]*(?:![^\n]*|%[A-Za-z%][^\n]*)
    | """(?:[^"\\]|\\.|"(?!""))*+(?:"""|\\?\Z)
    | \'\'\'(?:[^'\\]|\\.|'(?!''))*+(?:\'\'\'|\\?\Z)
    | "(?:[^"\\\n]|\\.)*+"?
    | '(?:[^'\\\n]|\\.)*+'?
    | [^\#"'\n]+ | \n
    ''',
    re.DOTALL | re.MULTILINE | re.VERBOSE,
)


class _ConflictError(PragmaError):
    """Fields of a :class:`Pragma` contradict each other; ``field`` is the one to point at."""

    def __init__(self, field: str, found: str, expected: str, do: str) -> None:
        super().__init__(str(PragmaError.of(found, expected=expected, do=do)))
        self.field, self.found, self.expected, self.do = field, found, expected, do


@dataclass(frozen=True, slots=True, kw_only=True)
class Pragma:
    """What a cell asks for.

    Raises:
        PragmaError: The fields contradict each other.
    """

    #: The pool of ``#!pool.size``; None is the default place.
    pool: str | None = None
    #: The size in ``#!pool.size``, 1 to 1024; None together with ``pool``.
    gpus_per_machine: int | None = None
    #: Number of ranks, 1 or more.
    gpus: int
    #: Number of machines that produce data, 1 to 8. Carried: the caller refuses what it cannot honour.
    cpus: int | None = None
    #: Number of units of data to deliver, 1 or more; only with ``cpus``. Carried as well.
    units: int | None = None
    #: Which ranks may write in the project directory.
    writes: Literal["rank0", "all"] = "rank0"
    #: Ranks whose output is shown.
    show: frozenset[int] | Literal["all"] = field(default=frozenset({0}))
    #: Names to send along whether or not the cell visibly uses them, in the order given.
    with_names: tuple[str, ...] = ()
    #: Seconds after which the run is stopped.
    timeout_s: float | None = None
    #: Path of a file with environment variables, as it was typed.
    env_file: str | None = None
    #: The ranks stay when the cell is over.
    keep: bool = False
    #: The run goes on without the notebook.
    detach: bool = False
    #: Which of the kept ranks run the cell.
    rank: frozenset[int] | Literal["all"] = "all"
    #: The cell's value is the list of all ranks' values.
    rank_results: bool = False
    #: Only list what would travel.
    dry_run: bool = False

    def __post_init__(self) -> None:
        self._check_ranges()
        self._check_machines()
        if self.show != "all" and max(self.show, default=0) >= self.gpus:
            found = f"--show names rank {max(self.show)} of a run on --gpus {self.gpus}"
            raise _ConflictError("show", found, f"ranks from 0 to {self.gpus - 1}, or all", "write --show all")
        if self.rank != "all" and max(self.rank, default=0) >= self.gpus:
            found = f"--rank names rank {max(self.rank)} of {self.gpus}"
            raise _ConflictError(
                "rank", found, f"ranks from 0 to {self.gpus - 1}, or all", "correct the value of --rank"
            )
        for name in ("keep", "cpus", "rank_results"):
            if self.detach and getattr(self, name):
                flag = f"--{name.replace('_', '-')}"
                found = f"--detach with {flag}"
                raise _ConflictError("detach", found, "one of the two", f"leave {flag} out: nobody is there for it")
        if self.units is not None and self.cpus is None:
            raise _ConflictError("units", "--units without --cpus", "both or neither", "add --cpus K, or drop --units")

    def _check_ranges(self) -> None:
        ranges = (
            ("gpus", self.gpus, None),
            ("gpus_per_machine", self.gpus_per_machine, MAX_GPUS_PER_MACHINE),
            ("cpus", self.cpus, MAX_CPUS),
            ("units", self.units, None),
        )
        for name, value, high in ranges:
            if value is not None and (value < 1 or (high is not None and value > high)):
                raise _ConflictError(name, f"{name} is {value}", f"1 to {high}" if high else "1 or more", "")
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise _ConflictError("timeout_s", f"timeout_s is {self.timeout_s}", "more than 0 seconds", "")

    def _check_machines(self) -> None:
        size = self.gpus_per_machine
        if (self.pool is None) != (size is None):
            raise _ConflictError("pool", "pool and gpus_per_machine: one of them is None", "both or neither", "")
        if size is not None and self.gpus > size and self.gpus % size:
            below = self.gpus // size * size
            found = f"{self.gpus} GPUs are not a whole number of machines with {size} GPUs each"
            expected = f"at most {size}, or a multiple of {size}"
            raise _ConflictError("gpus", found, expected, f"write --gpus {below} or --gpus {below + size}")

    @property
    def num_machines(self) -> int:
        """Number of machines that hold the ranks; 1 for the default place."""
        return -(-self.gpus // self.gpus_per_machine) if self.gpus_per_machine else 1


@dataclass(frozen=True, slots=True)
class ParsedCell:
    """A pragma cell, taken apart."""

    pragma: Pragma
    #: What the ranks run. As many lines as the cell, each statement in the line where the user sees it. Cell magics
    #: come first, as they must, and other lines of the head after them. Only the head above a cell magic of another
    #: language is left out, since it would become part of that magic's body.
    code: str


def parse_cell(source: str) -> ParsedCell | None:
    """Read a raw cell; None when it has no pragma of ours, which substring searches mostly decide.

    Raises:
        PragmaError: The cell has a pragma of ours, and it is wrong or stands after the first statement.
    """
    folded = source.lower()
    if not ("pragma" in folded or "taas" in folded or "#!" in folded):
        return None
    lines = source.split("\n")
    head = _read_head(lines)
    pragma = _pragma_of(head)
    for stray in _strays_after(lines, head):
        raise _misplaced(stray, first_statement=head.end + 1)
    if pragma is None:
        return None
    if head.foreign_magic == "taas":
        raise _given_twice(line_span(lines[head.end - 1], head.end))
    return ParsedCell(_planned(pragma, head), _arrange(lines, head))


def parse_flags(line: str, *, line_number: int = 1) -> Pragma:
    """Read what follows ``%%taas`` in its line: ``--gpus 8``, or ``g2.8 --gpus 8``.

    Args:
        line: The rest of the line.
        line_number: Where the line stands in the cell, for the error's text.

    Raises:
        PragmaError: The flags are wrong.
    """
    prefix = "%%taas "
    text = prefix + line.replace("\n", " ")
    words = list(words_of(text, len(prefix), line_number))
    place = None
    if words and not _PROGRAM.fullmatch(words[0].part) and _ALMOST_PLACE.fullmatch(words[0].part):
        place = _read_place(words.pop(0))
    return _build(place, words, Span(line_number, text, 0, len(prefix) - 1))


def parse_magic_cell(line: str, body: str) -> ParsedCell:
    """Read a ``%%taas`` cell, of which IPython gives the rest of the first line, and the lines below it.

    Raises:
        PragmaError: The flags are wrong, or the body has a pragma of its own.
    """
    pragma = parse_flags(line)
    # A line in place of the magic's own keeps all line numbers; a comment says in tracebacks what stood there.
    lines = [f"# %%taas {line}".replace("\n", " ").rstrip(), *body.split("\n")]
    head = _read_head(lines)
    for number, text in head.comments:
        if _pragma_match(text) or _is_certain_place(text):
            raise _given_twice(line_span(text, number))
    for stray in _strays_after(lines, head):
        raise _given_twice(stray)
    return ParsedCell(_planned(pragma, head), _arrange(lines, head))


def parse_plain_cell(pragma: Pragma, source: str) -> ParsedCell | None:
    """A cell without a pragma as if it had one; None where it is the kernel's by its kind.

    That are cells with nothing but lines for taas or for extensions, and those with a cell magic of another language.
    """
    lines = source.split("\n")
    head = _read_head(lines)
    is_code = any(line.strip() and not _OUR_LINE.fullmatch(line) for line in lines)
    return ParsedCell(_planned(pragma, head), _arrange(lines, head)) if is_code and not head.foreign_magic else None


def _planned(pragma: Pragma, head: _Head) -> Pragma:
    return replace(pragma, dry_run=True) if head.wants_plan else pragma


def _misplaced(span: Span, first_statement: int) -> PragmaError:
    return error_at(
        span,
        f"a pragma after the first statement, which is in line {first_statement}",
        expected="the pragma at the head of the cell, with only comments, blank lines and cell magics above it",
        do=f"move it above line {first_statement}, or put another # before it to turn it off",
    )


def _given_twice(span: Span) -> PragmaError:
    return error_at(
        span,
        "the cell has both a %%taas line and pragma lines",
        expected="one of the two",
        do="put place and flags into one of them, as in %%taas g2.8 --gpus 8, and delete the other",
    )


# --- the head of a cell ---


class _Head(NamedTuple):
    """The lines above the first statement; indices count from 0, line numbers from 1."""

    #: Line number and text of every comment line.
    comments: list[tuple[int, str]]
    #: Indices of lines with a cell magic.
    magics: list[int]
    #: Index of the first line that is not in the head.
    end: int
    #: The cell magic of another language that ends the head, if one does.
    foreign_magic: str
    #: Whether a line asks for a plan.
    wants_plan: bool = False


def _read_head(lines: list[str]) -> _Head:
    comments: list[tuple[int, str]] = []
    magics: list[int] = []
    wants_plan = False
    for index, line in enumerate(lines):
        stripped = line.strip()
        if stripped.startswith("#"):
            comments.append((index + 1, line))
        elif _PLAN.fullmatch(line):
            wants_plan = True
        elif magic := _CELL_MAGIC.match(line):
            magics.append(index)
            if magic[1] not in PYTHON_CELL_MAGICS:
                return _Head(comments, magics, index + 1, magic[1], wants_plan)
        elif stripped and not _LOAD_US.fullmatch(line):
            return _Head(comments, magics, index, "", wants_plan)
    return _Head(comments, magics, len(lines), "", wants_plan)


def _pragma_of(head: _Head) -> Pragma | None:
    """The pragma that the lines of the head make, or None when there is none."""
    words: list[Span] = []
    anchor: Span | None = None
    for number, line in head.comments:
        if match := _pragma_match(line):
            span = Span(number, line, match.start("head"), match.end("head"))
            _require_spelling(span, match)
            anchor = anchor or span
            words += words_of(line, match.start("rest"), number)
    place = None
    for span in _place_spans(head, beside_pragma=anchor is not None):
        if place is not None:
            raise error_at(span, "a second place", expected="one #!pool.size line", do="delete one of the two")
        place = _read_place(span)
        anchor = anchor or span
    return None if anchor is None else _build(place, words, anchor)


def _pragma_match(line: str) -> re.Match[str] | None:
    """A match if the line is ``#pragma taas``, or a slip of it in front of flags that are ours."""
    match = _PRAGMA_LINE.match(line)
    if match is None or (match["keyword"] == "pragma" and match["tool"] == "taas" and not match["colon"]):
        return match
    keyword, tool = match["keyword"].lower(), match["tool"].lower()
    ours = (keyword == "pragma" and (tool == "taas_magic" or _is_one_slip_from(tool, "taas"))) or (
        tool == "taas" and _is_one_slip_from(keyword, "pragma")
    )
    return match if ours and looks_like_flags(match["rest"]) else None


def _require_spelling(span: Span, match: re.Match[str]) -> None:
    for group, right in (("keyword", "pragma"), ("colon", None), ("tool", "taas")):
        if match[group] != right:
            wrong = Span(span.line_number, span.line, match.start(group), match.end(group))
            found = f"{match[group]} is not {right}" if right else "a colon behind pragma"
            raise error_at(wrong, found, do=f"write #pragma taas{match['rest'].rstrip()}")


def _is_one_slip_from(word: str, target: str) -> bool:
    """Equal but for one letter left out, put in, replaced, or swapped with its neighbour."""
    if abs(len(word) - len(target)) > 1:
        return False
    return bool(({word} | _shortened(word)) & ({target} | _shortened(target)))


def _shortened(word: str) -> set[str]:
    return {word[:index] + word[index + 1 :] for index in range(len(word))}


def _place_spans(head: _Head, *, beside_pragma: bool) -> Iterator[Span]:
    """Where the head names a place, or beside a pragma seems to want to."""
    for number, line in head.comments:
        match = _PLACE_LINE.match(line)
        if match is None or _PROGRAM.fullmatch(match["place"]):
            continue
        span = Span(number, line, match.start("place"), match.end("place"))
        if _is_certain_place(line) or (beside_pragma and _is_meant_as_place(match)):
            if match["rest"].strip():
                rest = Span(number, line, span.end, len(line)).narrowed(match["rest"].strip())
                do = (
                    f"put it into a line of its own: #pragma taas {rest.part}"
                    if looks_like_flags(rest.part)
                    else "delete it"
                )
                raise error_at(rest, "text after the place", do=do)
            yield span


def _is_certain_place(line: str) -> bool:
    """Whether the line alone makes the cell ours: ``#!pool.size``, and behind it nothing but flags of ours."""
    match = _PLACE_LINE.match(line)
    if match is None or match["gap"] or _PROGRAM.fullmatch(match["place"]):
        return False
    place = _PLACE.fullmatch(match["place"])
    if place is None or not 1 <= int(place["size"]) <= MAX_GPUS_PER_MACHINE:
        return False
    return not match["rest"].strip() or looks_like_flags(match["rest"])


def _is_meant_as_place(match: re.Match[str]) -> bool:
    """Beside a pragma, a slip in the place must not go by; a shell line that is commented out (``#!pip ...``) must."""
    has_rest = bool(match["rest"].strip())
    if match["gap"] or has_rest:
        return not (match["gap"] and has_rest) and _PLACE.fullmatch(match["place"]) is not None
    return _ALMOST_PLACE.fullmatch(match["place"]) is not None


def _strays_after(lines: list[str], head: _Head) -> Iterator[Span]:
    """Pragma lines among the statements; not what a string, or the body of a cell magic of another language, holds."""
    body = lines[head.end :]
    if head.foreign_magic or not any(_pragma_match(line) or _is_certain_place(line) for line in body):
        return
    line_number = head.end + 1
    at_line_start = True
    for token in _TOKEN.finditer("\n".join(body)):
        text = token[0]
        if token["comment"] and at_line_start and (_pragma_match(text) or _is_certain_place(text)):
            yield line_span(lines[line_number - 1], line_number)
        line_number += text.count("\n")
        at_line_start = text.endswith("\n") or (at_line_start and not text.strip())


def _arrange(lines: list[str], head: _Head) -> str:
    """The cell with its magics first and ``%load_ext taas_magic`` turned into a comment."""
    magics = [lines[index] for index in head.magics]
    rest = [] if head.foreign_magic else [lines[index] for index in range(head.end) if index not in head.magics]
    for ours in (_LOAD_US, _PLAN):
        rest = [ours.sub(r"\1# \2", line) if ours.fullmatch(line) else line for line in rest]
    return "\n".join(magics + rest + lines[head.end :])


# --- place and flags ---


class _Place(NamedTuple):
    pool: str
    size: int


def _read_place(span: Span) -> _Place:
    match = _PLACE.fullmatch(span.part)
    if match and 1 <= int(match["size"]) <= MAX_GPUS_PER_MACHINE:
        return _Place(match["pool"], int(match["size"]))
    raise error_at(
        span,
        f"{span.part} is not a place",
        expected=f"pool.size, such as g2.8: a pool's name, a dot, and the GPUs of one machine, "
        f"1 to {MAX_GPUS_PER_MACHINE}",
        do=f"write {_nearest_place(span.part)}",
    )


def _nearest_place(text: str) -> str:
    dotted = re.sub(r"[:;,=]|(?<=[0-9])[_-](?=[0-9]*$)", ".", text, count=1)
    pool, _, size = dotted.partition(".")
    pool = re.sub(r"^[^A-Za-z]+|[^A-Za-z0-9_-]", "", pool) or "g2"
    digits = re.match(r"[0-9]{1,9}", size)
    return f"{pool}.{min(max(int(digits[0]), 1), MAX_GPUS_PER_MACHINE) if digits else 8}"


def _build(place: _Place | None, words: list[Span], anchor: Span) -> Pragma:
    """Put place and flags together; ``anchor`` is where an error points that no flag is to blame for."""
    given: dict[str, Given] = {}
    for one in read_flags(words):
        if first := given.get(one.flag.field):
            do = f"keep one of them; the first is in line {first.name_at.line_number}"
            raise error_at(one.name_at, f"{one.flag.name} a second time", do=do)
        given[one.flag.field] = one
    values = {name: one.value for name, one in given.items()}
    if place is not None:
        values = {"gpus": place.size, **values, "pool": place.pool, "gpus_per_machine": place.size}
    if "gpus" not in values:
        raise error_at(anchor, "no number of GPUs", expected="--gpus N, or a #!pool.size line", do="add --gpus N")
    try:
        return Pragma(**values)
    except _ConflictError as conflict:
        at = given[conflict.field].value_at if conflict.field in given else anchor
        raise error_at(at, conflict.found, expected=conflict.expected, do=conflict.do) from None
