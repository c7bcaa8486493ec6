"""What the strings that IPython puts into a transformed cell say: shell lines, line magics, cell magics.

IPython rewrites ``!ls {path}`` and ``%time train(model)`` into method calls whose arguments are strings, so the names
of the notebook that they use are text. This module takes that text apart; it runs nothing and knows no scopes.

The rules for ``{expression}`` and ``$name`` are those of ``IPython.utils.text.DollarFormatter``.
"""

from __future__ import annotations

import enum
import keyword
import re
import string
from dataclasses import dataclass

_OPTION = re.compile(r"(?:(?<=\s)|^)--?[A-Za-z][\w-]*")
_WORD = re.compile(r"(?<![\w.])[^\W\d]\w*")
_DOLLAR = re.compile(r"(?<!\$)\$([^\W\d]\w*)")
_BRACES = re.compile(r"\{([^{}]*)\}")
_SHELL_RESULT = re.compile(r"--(?:out|err|proc)[=\s]+([^\W\d]\w*)")

#: Magics that run a statement: the letters of their options that take a value, as in ``-n 3``.
_STATEMENT_OPTIONS = {
    "time": "",
    "timeit": "nrp",
    "prun": "slTD",
    "memit": "rti",
    "lprun": "fmDTu",
    "mprun": "fT",
}
#: The statement of these runs in a namespace of its own: what it binds is gone afterwards.
_PRIVATE = frozenset({"timeit", "memit"})
#: Line magics whose arguments are never names of the notebook.
_INERT = frozenset(
    {"cd", "conda", "load_ext", "mamba", "matplotlib", "micromamba", "pip", "reload_ext", "unload_ext", "uv"}
)
_SHELL_LINE = frozenset({"sx", "sc", "system", "!", "!!"})
#: Cell magics whose body is not Python of this notebook.
_FOREIGN = frozenset(
    {
        *("!", "SVG", "bash", "cmd", "cython", "file", "html", "HTML", "javascript", "js", "latex", "markdown"),
        *("perl", "pypy", "python", "python2", "python3", "ruby", "script", "sh", "svg", "sx", "system", "writefile"),
    }
)


class Runs(enum.Enum):
    """What running a magic's code does to the notebook's names."""

    #: It runs as if it stood in the cell.
    HERE = enum.auto()
    #: It reads the notebook's names and binds none.
    PRIVATELY = enum.auto()
    #: It runs here or not at all: only the magic knows.
    PERHAPS = enum.auto()


@dataclass(frozen=True)
class MagicText:
    """One magic, taken apart.

    Attributes:
        expressions: Python expressions that IPython puts in before the magic runs.
        words: What may be names of the notebook; nobody but the magic knows.
        code: Python (of IPython's kind) that the magic runs, in this order.
        runs: What running ``code`` does to names.
        is_python: Whether ``code`` is Python for sure, so that a syntax error in it is one of the cell.
        binds: Names that the magic itself binds after its code ran.
    """

    expressions: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    code: tuple[str, ...] = ()
    runs: Runs = Runs.PERHAPS
    is_python: bool = False
    binds: tuple[str, ...] = ()


def expressions_in(text: str) -> tuple[str, ...]:
    """The expressions that IPython would put into ``text``: of ``{expression}`` and of ``$name``, in that order."""
    try:
        fields = [(name, spec) for _, name, spec, _ in string.Formatter().parse(text) if name]
    except ValueError:  # braces that do not pair
        found = _BRACES.findall(text)
    else:
        # IPython has no format specification here: a colon belongs to the expression, as in {names[1:3]}.
        found = [f"{name}:{spec}" if spec else name for name, spec in fields]
    return (*(each.strip() for each in found if each.strip()), *_DOLLAR.findall(text))


def words_in(text: str) -> tuple[str, ...]:
    """All that could be a name in ``text``: identifiers which are no keyword, attribute or ``--option``."""
    words = _WORD.findall(_OPTION.sub(" ", text))
    return tuple(dict.fromkeys(word for word in words if not keyword.iskeyword(word)))


def foreign_words(text: str) -> tuple[str, ...]:
    """What could be a name in text that is not Python: only what stands in ``{...}`` or behind a ``$``."""
    return tuple(word for each in expressions_in(text) for word in words_in(each))


def line_magic(name: str, line: str) -> MagicText:
    """Take ``%name line`` apart."""
    if name in _STATEMENT_OPTIONS:
        option_words, statement = _split_options(name, line)
        runs = Runs.PRIVATELY if name in _PRIVATE else Runs.HERE
        return MagicText(words=option_words, code=(statement,), runs=runs)
    expressions = expressions_in(line)
    if name in _SHELL_LINE or name in _INERT:
        return MagicText(expressions=expressions)
    return MagicText(expressions=expressions, words=words_in(line))


def cell_magic(name: str, line: str, body: str) -> MagicText:
    """Take ``%%name line`` with its ``body`` apart."""
    if name in _STATEMENT_OPTIONS:
        option_words, setup = _split_options(name, line)
        runs = Runs.PRIVATELY if name in _PRIVATE else Runs.HERE
        return MagicText(words=option_words, code=(setup, body), runs=runs, is_python=True)
    if name == "capture":
        return MagicText(code=(body,), runs=Runs.HERE, is_python=True, binds=words_in(line)[:1])
    expressions = expressions_in(line)
    if name in _FOREIGN:
        return MagicText(expressions=expressions, words=foreign_words(body), binds=tuple(_SHELL_RESULT.findall(line)))
    return MagicText(expressions=expressions, words=words_in(line), code=(body,))


def _split_options(name: str, line: str) -> tuple[tuple[str, ...], str]:
    """The words in the options at the head of ``line`` (``-f function``), and the statement behind them."""
    with_value = _STATEMENT_OPTIONS[name]
    option_words: list[str] = []
    rest = line.strip()
    while (match := re.match(r"--?([A-Za-z][\w-]*)(?:=\S*)?\s*", rest)) is not None:
        rest = rest[match.end() :]
        if match[1] in tuple(with_value):  # the value is the next word; in -n3 it is part of this one
            value, _, rest = rest.partition(" ")
            option_words.extend(words_in(value))
            rest = rest.lstrip()
    return tuple(option_words), rest
