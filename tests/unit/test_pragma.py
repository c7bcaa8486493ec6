"""The head of a cell: what is a pragma, what it says, what the ranks run, and how a slip is told."""

from __future__ import annotations

import keyword
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from taas_magic import flags
from taas_magic.errors import PragmaError
from taas_magic.flags import FLAGS, Flag, words_of
from taas_magic.pragma import (
    PYTHON_CELL_MAGICS,
    ParsedCell,
    Pragma,
    flags_reference,
    parse_cell,
    parse_flags,
    parse_magic_cell,
    parse_plain_cell,
)

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "pragma.md"


def parsed(source: str) -> ParsedCell:
    cell = parse_cell(source)
    assert cell is not None
    return cell


def message(source: str) -> str:
    with pytest.raises(PragmaError) as caught:
        parse_cell(source)
    return str(caught.value)


def pointed_at(text: str) -> tuple[int, str]:
    """Line number and the piece over the carets of an error's text."""
    where, shown, carets = text.split("\n")[:3]
    start = carets.index("^")
    return int(where.removeprefix("line ").partition(":")[0]), shown[start : len(carets)]


# --- what is ours ---


@pytest.mark.parametrize(
    "source",
    [
        "",
        "x = 1",
        "#pragma once\n#pragma omp parallel for\n#pragma ivdep",
        "# pragma: no cover",
        "#!/bin/bash\nls",
        "#!python",
        "#!python3.11\nprint(1)",
        "#!/usr/bin/env python3.11",
        "# !nvidia-smi\n!pip install taas_magic",
        "#!nvidia-smi",
        "#!g2.x",
        "#!g2.0",
        "#!g2.1025",
        "#!g2.8.",
        "#!g2.8 is a place",
        "# !g2.8",
        "import taas_magic as taas\ntaas.rank()  # pragma taas --gpus 8",
        "## pragma taas --gpus 8",
        "# #pragma taas --gpus 8\nx = 1",
        "#pragma tass\n# a pragma of tass fame",
        "# pragmas task --gpus are many",
        "%%bash\n#pragma taas --gpus 8",
        "%%writefile x.py\n#!g2.8\n#pragma taas --gpus 8\nx",
        "%%script bash\n#!g2.8",
        "%%taas --gpus 8\nx",
        "\n\n%%html\n#pragma taas --gpus 8",
        "x = '''\n#pragma taas --gpus 8\n'''",
        'x = f"""\n#pragma taas --gpus {n}\n#!g2.8\n"""\ny = 1',
        "x = 'a\\\n#pragma taas --gpus 8'",
        'x = r"\\"\ny = """\n#pragma taas --gpus 8\n"""',
        "!echo it's\nx = '''\n#pragma taas --gpus 8\n'''",
        "!echo '''\n%time x = '''\n#pragma x\n# taas\n",
        "x = 1  # it's '''\ny = '''\n#pragma taas --gpus 8\n'''",
        "x = ''' never closed\n#pragma taas --gpus 8",
    ],
)
def test_cell_that_is_not_ours(source: str) -> None:
    assert parse_cell(source) is None


@pytest.mark.parametrize(
    "head",
    [
        "#pragma taas --gpus 8",
        "# pragma taas --gpus 8",
        "#pragma   taas\t--gpus   8  ",
        "  #  pragma taas --gpus=8",
        "\n\n# a comment\n#pragma taas --gpus 8\r\n# and one more\n\n",
        "#pragma taas '--gpus=8' ".replace("'", ""),
        "#pragma taas\n#pragma taas --gpus 8",
        "#pragma\N{NO-BREAK SPACE}taas --gpus\N{NO-BREAK SPACE}8",
        '#pragma taas --gpus "8"',
        "#!pip install lightning\n#!nvidia-smi\n#!/bin/bash\n#!python3.11\n#pragma taas --gpus 8",
    ],
)
def test_free_spacing(head: str) -> None:
    assert parsed(head + "\nx = 1").pragma == Pragma(gpus=8)


@pytest.mark.parametrize(
    "head",
    [
        "#!g2.8\n#pragma taas --gpus 8",
        "#pragma taas --gpus 8\n#! g2.8 ",
        "# !g2.8\n# pragma taas",
        "#!g2.8",
        "  #!g2.8 ",
    ],
)
def test_place_line(head: str) -> None:
    assert parsed(head).pragma == Pragma(pool="g2", gpus_per_machine=8, gpus=8)


def test_all_flags_over_several_lines() -> None:
    source = """#!my-pool_2.4
#pragma taas --gpus 8 --cpus 2 --units 20_480_000 --writes all
# in between
#pragma taas --show 0,2-3,7 --with a,b,a --timeout 1h30m --env-file="my secrets.env"
"""
    assert parsed(source).pragma == Pragma(
        pool="my-pool_2",
        gpus_per_machine=4,
        gpus=8,
        cpus=2,
        units=20_480_000,
        writes="all",
        show=frozenset({0, 2, 3, 7}),
        with_names=("a", "b"),
        timeout_s=5400.0,
        env_file="my secrets.env",
    )


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90), ("90s", 90), ("0.5", 0.5), ("30m", 1800), ("2h", 7200), ("1h30m5s", 5405), ("1.5h", 5400)],
)
def test_timeout(text: str, seconds: float) -> None:
    assert parse_flags(f"--gpus 1 --timeout {text}").timeout_s == seconds


@pytest.mark.parametrize(("gpus", "machines"), [(1, 1), (4, 1), (8, 1), (16, 2), (32, 4)])
def test_num_machines(gpus: int, machines: int) -> None:
    assert parse_flags(f"g2.8 --gpus {gpus}").num_machines == machines
    assert parse_flags(f"--gpus {gpus}").num_machines == 1


def test_names_are_spelt_as_python_stores_them() -> None:
    namespace: dict[str, int] = {}
    exec("ﬁt = 1", namespace)
    (name,) = parse_flags("--gpus 1 --with ﬁt").with_names
    assert name in namespace


# --- what the ranks run ---


@pytest.mark.parametrize(
    ("source", "code"),
    [
        ("#pragma taas --gpus 2\nx", "#pragma taas --gpus 2\nx"),
        ("#pragma taas --gpus 2\n%%time\nx", "%%time\n#pragma taas --gpus 2\nx"),
        ("%%time\n#pragma taas --gpus 2\nx", "%%time\n#pragma taas --gpus 2\nx"),
        (
            "\n# a\n%%capture out\n\n#pragma taas --gpus 2\n%%time\n# b\nx\n%%time",
            "%%capture out\n%%time\n\n# a\n\n#pragma taas --gpus 2\n# b\nx\n%%time",
        ),
        ("# a\n#pragma taas --gpus 2\n%%writefile f.py\n# b\nx\n", "%%writefile f.py\n# b\nx\n"),
        ("#pragma taas --gpus 2\n%%time\n%%bash\nls", "%%time\n%%bash\nls"),
        (
            "%load_ext taas_magic\n#!g2.2\n#pragma taas --gpus 2\n  %reload_ext taas_magic\nx",
            "# %load_ext taas_magic\n#!g2.2\n#pragma taas --gpus 2\n  # %reload_ext taas_magic\nx",
        ),
        ("#pragma taas --gpus 2\n%%time?\nx", "#pragma taas --gpus 2\n%%time?\nx"),
        (
            "#pragma taas --gpus 2\n%time x\n%load_ext taas_magic",
            "#pragma taas --gpus 2\n%time x\n%load_ext taas_magic",
        ),
    ],
)
def test_code(source: str, code: str) -> None:
    assert parsed(source).code == code


@pytest.mark.parametrize(
    ("line", "body", "code"),
    [
        ("--gpus 2", "x\n", "# %%taas --gpus 2\nx\n"),
        ("g2.2", "# a\n%%time\nx", "%%time\n# %%taas g2.2\n# a\nx"),
        ("--gpus 2", "%%bash\n#pragma taas --gpus 8", "%%bash\n#pragma taas --gpus 8"),
        ("--gpus 2", "x = '''\n#pragma taas\n'''", "# %%taas --gpus 2\nx = '''\n#pragma taas\n'''"),
        ("--gpus 2", "", "# %%taas --gpus 2\n"),
    ],
)
def test_code_of_a_magic_cell(line: str, body: str, code: str) -> None:
    assert parse_magic_cell(line, body) == ParsedCell(parse_flags(line), code)


# --- slips ---


@pytest.mark.parametrize(
    ("source", "line_number", "part", "advice"),
    [
        ("#pragma taas --gpu 8", 1, "--gpu", "write --gpus"),
        ("#pragma taas -gpus 8", 1, "-gpus", "write --gpus"),
        ("#pragma taas --GPUS=8", 1, "--GPUS=8", "write --gpus"),
        ("#pragma taas \N{EM DASH}env_file x", 1, "\N{EM DASH}env_file", "write --env-file"),
        ("\n#!g2.8\n#pragma taas --gpus 8 # all of them", 3, "#", "line of its own"),
        ("#pragma taas --gpus 0", 1, "0", "write --gpus 1"),
        ("#pragma taas --gpus -3", 1, "-3", "write --gpus 1"),
        ("#pragma taas --gpus 8.0", 1, "8.0", "write --gpus 8"),
        ("#pragma taas --gpus eight", 1, "eight", "correct the value of --gpus"),
        ("#pragma taas --gpus nan", 1, "nan", "correct the value of --gpus"),
        ("#pragma taas --gpus " + "9" * 5000, 1, "9" * 5000, "correct the value of --gpus"),
        ("#pragma taas --gpus 1 --cpus 9", 1, "9", "write --cpus 8"),
        ("#pragma taas --gpus 1 --units 20.48e6", 1, "20.48e6", "write --units 20480000"),
        ("#pragma taas --gpus 1 --units 1__0", 1, "1__0", "correct"),
        ("#pragma taas --gpus 1 --writes rank1", 1, "rank1", "write --writes rank0"),
        ("#pragma taas --gpus 8 --show 0,3-1", 1, "3-1", "write --show 0,1-3"),
        ("#pragma taas --gpus 8 --show al", 1, "al", "write --show all"),
        ("#pragma taas --gpus 8 --show 0,", 1, "0,", "correct"),
        ("#pragma taas --gpus 8 --show 0-99999999999", 1, "0-99999999999", "correct"),
        ("#pragma taas --gpus 8 --show 1,8", 1, "1,8", "write --show all"),
        ("#!g2.4\n#pragma taas --show 4", 2, "4", "write --show all"),
        ("#pragma taas --gpus 8 --with a,b.c", 1, "b.c", "correct"),
        ("#pragma taas --gpus 8 --with lambda", 1, "lambda", "correct"),
        ("#pragma taas --gpus 8 --timeout 5min", 1, "5min", "write --timeout 5m"),
        ("#pragma taas --gpus 8 --timeout 0", 1, "0", "correct"),
        ("#pragma taas --gpus 8 --timeout 1h30", 1, "1h30", "correct"),
        ("#pragma taas --gpus 8 --env-file=''", 1, "''", "correct"),
        ("#pragma taas --gpus", 1, "--gpus", "write --gpus"),
        ("#pragma taas --gpus= 8", 1, "--gpus", "write --gpus"),
        ("#pragma taas --gpus --cpus 1", 1, "--gpus", "write --gpus"),
        ("#pragma taas --gpus 2\n#pragma taas --gpus=2", 2, "--gpus", "the first is in line 1"),
        ("#pragma taas --gpus 2 --env-file 'a b", 1, "'", "close it"),
        ("#pragma taas --gpus 2 \\", 1, "\\", "another #pragma taas line"),
        ("#pragma taas --gpus 2 --units 5", 1, "5", "add --cpus K"),
        ("#pragma taas", 1, "#pragma taas", "add --gpus N"),
        ("# comment\n  # pragma  taas --show all", 2, "# pragma  taas", "add --gpus N"),
        ("#!g2.8\n#pragma taas --gpus 12", 2, "12", "write --gpus 8 or --gpus 16"),
        ("#!g2.0\n#pragma taas --gpus 12", 1, "g2.0", "write g2.1"),
        ("#!g2.x\n#pragma taas --gpus 12", 1, "g2.x", "write g2.8"),
        ("#pragma taas --gpus 12\n#!g2.8.", 2, "g2.8.", "write g2.8"),
        ("#!g2\n#pragma taas --gpus 12", 1, "g2", "write g2.8"),
        ("#!g2:4\n#pragma taas --gpus 12", 1, "g2:4", "write g2.4"),
        ("#!2g.4\n#pragma taas --gpus 12", 1, "2g.4", "write g.4"),
        ("#!g2.2000\n#pragma taas --gpus 12", 1, "g2.2000", "write g2.1024"),
        ("#!g2.8 --gpus 8", 1, "--gpus 8", "#pragma taas --gpus 8"),
        ("#!g2.8 x\n#pragma taas --gpus 8", 1, "x", "delete it"),
        ("#!g2.8\n#!g2.8", 2, "g2.8", "delete one"),
        ("#pragma tass --gpus 8", 1, "tass", "write #pragma taas --gpus 8"),
        ("#pragma TaaS --gpu 8", 1, "TaaS", "write #pragma taas"),
        ("#pragma taaas --gpus 8", 1, "taaas", "write #pragma taas"),
        ("#pragma tas -gpus 8", 1, "tas", "write #pragma taas"),
        ("#pragma taas_magic --gpus 8", 1, "taas_magic", "write #pragma taas"),
        ("#Pragma TAAS --gpus 8", 1, "Pragma", "write #pragma taas"),
        ("#pragam taas --gpus 8", 1, "pragam", "write #pragma taas"),
        ("#pragma: taas --gpus 8", 1, ":", "write #pragma taas --gpus 8"),
        ("#pragma taas --gpus 2 --rank 2", 1, "2", "correct the value of --rank"),
        ("#pragma taas --gpus 2 --keep=yes", 1, "yes", "write --keep alone"),
        ("x = 1\n#pragma taas --gpus 8", 2, "#pragma taas --gpus 8", "above line 1"),
        ("\n#pragma taas --gpus 8\nf(\n    # pragma taas\n)", 4, "# pragma taas", "above line 3"),
        ("x = '''\n'''\n#!g2.8", 3, "#!g2.8", "above line 1"),
        ("'''doc'''\n!echo it's\n%cd it's\n'a\\\nb'\n#pragma taas", 6, "#pragma taas", "above line 1"),
        ("%%time\nx = 1\n#pragma taas --gpus 8", 3, "#pragma taas --gpus 8", "above line 2"),
        ("%load_ext autoreload\n#pragma taas --gpus 8", 2, "#pragma taas --gpus 8", "above line 1"),
        ("#pragma taas --gpus 8\n%%taas --gpus 8\nx", 2, "%%taas --gpus 8", "delete the other"),
    ],
)
def test_slip_is_shown_at_its_place(source: str, line_number: int, part: str, advice: str) -> None:
    text = message(source)
    assert pointed_at(text) == (line_number, part)
    assert advice in text.split("\n")[-1]


def test_whole_text_of_an_error() -> None:
    assert message("#!g2.8\n\t#pragma taas --gpus 8 --writes rank1") == (
        "line 2: rank1 is not a value of --writes\n"
        "     #pragma taas --gpus 8 --writes rank1\n"
        "                                    ^^^^^\n"
        "expected: rank0 or all\n"
        "to do: write --writes rank0"
    )


def test_carets_stand_under_wide_characters() -> None:
    _, _, carets = message("#pragma taas --env-file 名前 --gpus 0").split("\n")[:3]
    assert carets == "    " + " " * len("#pragma taas --env-file NNNN --gpus ") + "^"


@pytest.mark.parametrize(
    ("line", "body", "part"),
    [
        ("--gpus 8", "#pragma taas --gpus 8", "#pragma taas --gpus 8"),
        ("--gpus 8", "\n#!g2.8\nx", "#!g2.8"),
        ("--gpus 8", "x\n#pragma taas --gpus 8", "#pragma taas --gpus 8"),
        ("g2.x", "x", "g2.x"),
        ("8", "x", "8"),
        ("", "x", "%%taas"),
    ],
)
def test_slip_in_a_magic_cell(line: str, body: str, part: str) -> None:
    with pytest.raises(PragmaError) as caught:
        parse_magic_cell(line, body)
    assert pointed_at(str(caught.value))[1] == part


def test_line_number_of_parse_flags() -> None:
    with pytest.raises(PragmaError, match=r"^line 7: --gpu is not a flag\n    %%taas --gpu 8\n"):
        parse_flags("--gpu 8", line_number=7)


@pytest.mark.parametrize(
    "fields",
    [
        {"gpus": 0},
        {"gpus": 1, "cpus": 9},
        {"gpus": 1, "cpus": 1, "units": 0},
        {"gpus": 1, "units": 5},
        {"gpus": 1, "pool": "g2"},
        {"gpus": 1, "gpus_per_machine": 8},
        {"gpus": 1, "pool": "g2", "gpus_per_machine": 1025},
        {"gpus": 12, "pool": "g2", "gpus_per_machine": 8},
        {"gpus": 2, "show": frozenset({2})},
        {"gpus": 2, "timeout_s": float("nan")},
    ],
)
def test_pragma_cannot_contradict_itself(fields: dict[str, Any]) -> None:
    with pytest.raises(PragmaError):
        Pragma(**fields)


# --- the table ---


def test_switches_take_no_value(monkeypatch: pytest.MonkeyPatch) -> None:
    switch = Flag("--keep", "", lambda text: text == "", "Keep it.", "keep")
    monkeypatch.setattr(flags, "FLAGS", (*FLAGS, switch))
    givens = list(flags.read_flags(words_of("--keep --gpus 2", 0, 1)))
    assert [(one.flag.name, one.value) for one in givens] == [("--keep", True), ("--gpus", 2)]
    with pytest.raises(PragmaError, match="--keep takes no value"):
        list(flags.read_flags(words_of("--keep=1", 0, 1)))
    assert "| `--keep` | Keep it. |" in flags_reference()


def test_reference_lists_every_flag() -> None:
    rows = flags_reference().split("\n")[2:]
    assert [row.split("`")[1].split()[0] for row in rows] == [flag.name for flag in FLAGS]
    assert {flag.field for flag in FLAGS} | {"pool", "gpus_per_machine"} == set(Pragma.__slots__)


def test_page_shows_a_real_error() -> None:
    text = message("#!g2.8\n#pragma taas --gpu 8")
    assert f"\n{text}\n" in PAGE.read_text(encoding="utf-8")


def test_page_names_every_magic_that_takes_python() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert all(f"`%%{name}`" in page for name in PYTHON_CELL_MAGICS)


def test_page_holds_the_table() -> None:
    assert f"\n\n{flags_reference()}\n\n" in PAGE.read_text(encoding="utf-8")


def test_import_brings_in_nothing_heavy() -> None:
    heavy = {"torch", "IPython", "zmq", "numpy", "difflib", "shlex"}
    code = (
        f"import sys; before = set(sys.modules); import taas_magic.pragma; print((set(sys.modules) - before) & {heavy})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


# --- properties ---

#: Pieces of which cells are made that come near to a pragma.
PIECES = st.sampled_from(
    [
        *(
            "#",
            "!",
            "#!",
            "# ",
            "pragma",
            " taas",
            "tass",
            "#pragma taas",
            "g2.8",
            "g2.",
            "python3.1",
            " ",
            "\t",
            "\n",
            "\r\n",
        ),
        *("--", "--gpus", "=", "8", "-1", ",", "all", "--show 0", "--with a", "'", '"', "'''", '"""', "\\", "x = 1"),
        *(
            "%%time",
            "%%bash",
            "%%taas",
            "%load_ext taas_magic",
            "é",
            "\N{NO-BREAK SPACE}",
            "\x0c",
            "\0",
            "\ud800",
            "名",
        ),
    ]
)
NEAR_CELLS = st.lists(st.one_of(PIECES, st.text(max_size=3)), max_size=25).map("".join)
CELLS = st.one_of(st.text(), NEAR_CELLS)


@settings(deadline=None)  # machines that run tests are busy
@given(CELLS)
def test_any_text_is_read_or_refused_and_keeps_its_lines(source: str) -> None:
    try:
        cell = parse_cell(source)
    except PragmaError as error:
        line_number, part = pointed_at(str(error))
        assert 1 <= line_number <= source.count("\n") + 1
        assert part
        return
    if cell is not None and not has_foreign_magic(source):
        assert cell.code.count("\n") == source.count("\n")


@settings(deadline=None)  # machines that run tests are busy
@given(CELLS, CELLS)
def test_any_magic_cell_is_read_or_refused_and_keeps_its_lines(line: str, body: str) -> None:
    assume("\n" not in line)
    try:
        cell = parse_magic_cell(line, body)
    except PragmaError:
        return
    if not has_foreign_magic(body):
        assert cell.code.count("\n") == body.count("\n") + 1


def has_foreign_magic(source: str) -> bool:
    return any(line.lstrip().startswith("%%") and not line.lstrip().startswith("%%time") for line in source.split("\n"))


@settings(deadline=None)  # machines that run tests are busy
@given(CELLS)
def test_without_the_words_never_ours(source: str) -> None:
    assume(not any(word in source.lower() for word in ("pragma", "taas", "#!")))
    assert parse_cell(source) is None


SPACES = st.text(" \t", min_size=1, max_size=3)
NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True).filter(lambda name: not keyword.iskeyword(name))


def shows(gpus: int) -> st.SearchStrategy[frozenset[int] | Literal["all"]]:
    every: Literal["all"] = "all"
    return st.one_of(st.just(every), st.frozensets(st.integers(0, gpus - 1), min_size=1, max_size=4))


@st.composite
def pragmas(draw: st.DrawFn) -> Pragma:
    size = draw(st.none() | st.integers(1, 1024))
    small = draw(st.integers(1, size or 100))
    gpus = draw(st.sampled_from([small, (size or 1) * draw(st.integers(1, 60))]))
    cpus = draw(st.none() | st.integers(1, 8))
    names = draw(st.lists(NAMES, max_size=3, unique=True))
    return Pragma(
        pool=None
        if size is None
        else draw(st.from_regex(r"[A-Za-z][A-Za-z0-9_-]{0,8}", fullmatch=True).filter(_is_pool)),
        gpus_per_machine=size,
        gpus=gpus,
        cpus=cpus,
        units=None if cpus is None else draw(st.none() | st.integers(1, 2**63 - 1)),
        writes=draw(st.sampled_from(["rank0", "all"])),
        show=draw(shows(gpus)),
        with_names=tuple(names),
        timeout_s=draw(st.none() | st.integers(1, 10**6).map(float)),
        env_file=draw(st.none() | st.text(st.characters(codec="utf-8", exclude_characters="\0\n"), min_size=1)),
    )


def _is_pool(name: str) -> bool:
    """Not the name of an interpreter, which ``#!python3.11`` keeps for itself."""
    return name.rstrip("0123456789") not in {
        "python",
        "pip",
        "pypy",
        "perl",
        "ruby",
        "lua",
        "php",
        "node",
        "tclsh",
        "wish",
    }


def render_flags(pragma: Pragma) -> list[tuple[str, str]]:
    show = pragma.show if pragma.show == "all" else ",".join(map(str, sorted(pragma.show)))
    values: dict[str, object] = {
        "--gpus": pragma.gpus,
        "--cpus": pragma.cpus,
        "--units": pragma.units and f"{pragma.units:_}",
        "--writes": pragma.writes,
        "--show": show,
        "--with": ",".join(pragma.with_names) or None,
        "--timeout": pragma.timeout_s and f"{pragma.timeout_s:.0f}",
        "--env-file": pragma.env_file and "'" + pragma.env_file.replace("'", "'\"'\"'") + "'",
    }
    return [(name, str(value)) for name, value in values.items() if value is not None]


@settings(deadline=None)  # machines that run tests are busy
@given(pragmas(), st.data())
def test_round_trip(pragma: Pragma, data: st.DataObject) -> None:
    given_flags = data.draw(st.permutations(render_flags(pragma)))
    lines = [] if pragma.pool is None else [f"#!{pragma.pool}.{pragma.gpus_per_machine}"]
    line = "#pragma taas"
    for name, value in given_flags:
        line += data.draw(SPACES) + name + data.draw(SPACES | st.just("=")) + value
        if data.draw(st.booleans()):
            lines.append(line)
            line = f"#{data.draw(SPACES)}pragma{data.draw(SPACES)}taas"
    source = "\n".join([*data.draw(st.permutations([*lines, line, "", "# comment"])), "x = 1"])
    assert parsed(source) == ParsedCell(pragma, source)
    place = "" if pragma.pool is None else f"{pragma.pool}.{pragma.gpus_per_machine} "
    assert parse_flags(place + " ".join(f"{name} {value}" for name, value in given_flags)) == pragma


# --- a plan, and cells without a pragma ---


@pytest.mark.parametrize("source", ["%taas plan\n#pragma taas --gpus 2\nx", "#!g2.2\n  taas plan  \n\nx"])
def test_a_line_in_the_head_asks_for_a_plan(source: str) -> None:
    parsed = parse_cell(source)
    assert parsed is not None
    assert parsed.pragma.dry_run
    lines, before = parsed.code.split("\n"), source.split("\n")
    assert len(lines) == len(before)
    assert all(line.lstrip().startswith("#") or not line.strip() or line == "x" for line in lines)


PLAIN = parse_flags("--gpus 2")


@pytest.mark.parametrize(
    "source", ["x = 1", "# comment\nx", "%taas logs\nx = 1", "%%time\nx", "taasks = 2", "%time x", "!ls", "a = %taas_x"]
)
def test_a_plain_cell_is_run_like_one_with_a_pragma(source: str) -> None:
    parsed = parse_plain_cell(PLAIN, source)
    assert parsed is not None
    assert parsed.pragma == PLAIN
    assert parsed.code == source


@pytest.mark.parametrize(
    "source",
    [
        "",
        "\n\n",
        "# only words",
        "%taas",
        "%taas auto off",
        "taas release",
        "a = %taas pull x\n%taas",
        "%load_ext x",
        "%%bash\nls",
    ],
)
def test_a_cell_that_is_the_kernels_by_its_kind_stays_there(source: str) -> None:
    assert parse_plain_cell(PLAIN, source) is None
