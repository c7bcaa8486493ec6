r"""Environment files: ``KEY=VALUE`` lines for the environment of every rank.

What a line may be::

    # a comment, or nothing
    NAME=value          # a comment after white space
    export NAME=value
    NAME='as it stands, $HOME and \n included'
    NAME="with \n \t \" \\ \$, and ${HOME}"
    NAME=${OTHER:-value when OTHER is unset or empty}

Errors name file, line and variable, never a value: these files hold secrets.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from os import PathLike, fspath
from typing import Final

from taas_magic.errors import SettingsError
from taas_magic.settings_text import expand_home, read_text

_ASSIGNMENT: Final = re.compile(r"\s*(?:export\s+)?(?P<name>[A-Za-z_][A-Za-z0-9_]*)\s*=(?P<value>.*)", re.DOTALL)
_SINGLE: Final = re.compile(r"'(?P<text>[^']*)'")
_DOUBLE: Final = re.compile(r'"(?P<text>(?:[^"\\]|\\.)*)"', re.DOTALL)
#: What may stand behind a closing quote.
_TAIL: Final = re.compile(r"\s*|\s+#.*", re.DOTALL)
_COMMENT: Final = re.compile(r"\s#.*", re.DOTALL)
#: An escape, a variable with or without braces, or a dollar sign that is only that.
_SPECIAL: Final = re.compile(
    r"\\(?P<escaped>.)|\$\{(?P<braced>[^}]*)(?P<closed>\}?)|\$(?P<bare>[A-Za-z_][A-Za-z0-9_]*)", re.DOTALL
)
_BRACED: Final = re.compile(r"(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::-(?P<default>.*))?", re.DOTALL)
_ESCAPES: Final = {"n": "\n", "t": "\t", '"': '"', "\\": "\\", "$": "$"}


class _MalformedError(Exception):
    """One line is wrong; holds found, expected and what to do, without the place."""

    def __init__(self, found: str, expected: str, do: str) -> None:
        super().__init__(found)
        self.found, self.expected, self.do = found, expected, do


def read_env_file(path: str | PathLike[str], environ: Mapping[str, str]) -> dict[str, str]:
    """Read an environment file.

    Args:
        path: The file; a leading ``~`` is the ``HOME`` of ``environ``.
        environ: Where ``$NAME`` is looked up when no earlier line of the file sets it.

    Returns:
        The variables that the file sets, in its order. Where a name is set twice, the later line counts.

    Raises:
        SettingsError: The file cannot be read, a line is malformed, or a variable is unknown.
    """
    file = expand_home(fspath(path), environ)
    values: dict[str, str] = {}
    for number, line in enumerate(read_text(file).split("\n"), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            name, value = _read_line(line.rstrip("\r"), values, environ)
        except _MalformedError as bad:
            raise SettingsError.of(f"{file}, line {number}: {bad.found}", expected=bad.expected, do=bad.do) from None
        values[name] = value
    return values


def _read_line(line: str, values: Mapping[str, str], environ: Mapping[str, str]) -> tuple[str, str]:
    match = _ASSIGNMENT.fullmatch(line)
    if match is None:
        raise _MalformedError("not an assignment", "NAME=value, or export NAME=value", "correct it, or put # before it")
    name = match["name"]
    value = _read_value(name, match["value"], {**environ, **values})
    if "\0" in value:
        raise _MalformedError(f"{name} holds a NUL character", "text without it", "delete the character")
    return name, value


def _read_value(name: str, text: str, known: Mapping[str, str]) -> str:
    quoted = text.strip()
    if quoted.startswith("'"):
        return _inside_quotes(_SINGLE, name, quoted)
    if quoted.startswith('"'):
        return _expand(name, _inside_quotes(_DOUBLE, name, quoted), known, escapes=_ESCAPES)
    return _expand(name, _COMMENT.sub("", text, count=1).strip(), known, escapes=None)


def _inside_quotes(pattern: re.Pattern[str], name: str, quoted: str) -> str:
    match = pattern.match(quoted)
    if match is None:
        do = f"close it with {quoted[0]}; a line break inside is written \\n in double quotes"
        raise _MalformedError(f"the quote of {name} is not closed", "a value that ends in its line", do)
    if not _TAIL.fullmatch(quoted, match.end()):
        do = "put all of the value into the quotes"
        raise _MalformedError(f"text after the quoted value of {name}", "nothing, or a comment after a space", do)
    return match["text"]


def _expand(name: str, text: str, known: Mapping[str, str], *, escapes: Mapping[str, str] | None) -> str:
    r"""Replace variables and escapes; without ``escapes`` a backslash stands for itself, but in ``\$``."""

    def replace(match: re.Match[str]) -> str:
        if escaped := match["escaped"]:
            return _unescape(name, escaped, escapes)
        if match["bare"]:
            return _look_up(name, match["bare"], known)
        inner = _BRACED.fullmatch(match["braced"]) if match["closed"] else None
        if inner is None:
            do = r"correct it, or use single quotes if the text is meant as it stands"
            raise _MalformedError(f"a malformed ${{...}} in {name}", "${NAME} or ${NAME:-default}", do)
        if inner["default"] is not None and not known.get(inner["name"]):
            return _expand(name, inner["default"], known, escapes=escapes)
        return _look_up(name, inner["name"], known)

    return _SPECIAL.sub(replace, text)


def _unescape(name: str, char: str, escapes: Mapping[str, str] | None) -> str:
    if escapes is None:
        return "$" if char == "$" else f"\\{char}"
    if char not in escapes:
        do = f"write \\\\{char} for a backslash, or use single quotes"
        raise _MalformedError(f"\\{char} in the value of {name}", r"one of \n \t \" \\ \$", do)
    return escapes[char]


def _look_up(name: str, variable: str, known: Mapping[str, str]) -> str:
    if variable in known:
        return known[variable]
    raise _MalformedError(
        f"{name} uses ${variable}, which is not set",
        "a variable that an earlier line or the environment sets",
        f"set it, write ${{{variable}:-default}}, or use single quotes if a dollar sign is meant",
    )
