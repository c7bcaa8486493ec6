"""Environment files: what a line means, and how a mistake is told."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from taas_magic.envfile import read_env_file
from taas_magic.errors import SettingsError

ENVIRON = {"HOME": "/home/ada", "USER": "ada", "NOTHING": ""}


def read(tmp_path: Path, text: str | bytes) -> dict[str, str]:
    path = tmp_path / "file.env"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_env_file(path, ENVIRON)


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("A=1", "1"),
        ("  export  A=1  ", "1"),
        ("export\tA=1", "1"),
        ("A = 1", "1"),
        ("A=", ""),
        ("A=   ", ""),
        ("A= # comment", ""),
        ("A=#1", "#1"),
        ("A=a#b # c", "a#b"),
        ("A=a b", "a b"),
        ("A=a=b", "a=b"),
        ("A=it's", "it's"),
        ('A={"a": 1}', '{"a": 1}'),
        (r"A=C:\new\$HOME", r"C:\new$HOME"),
        ("A=''", ""),
        ("A='a $USER # \\n \"b\"' # c", 'a $USER # \\n "b"'),
        ('A=""', ""),
        (r'A="a # \n \t \" \\ \$USER $USER"', 'a # \n \t " \\ $USER ada'),
        ('A="it\'s"   # c', "it's"),
        (r'A="\\$USER"', r"\ada"),
        ("A=$USER-${HOME}/x", "ada-/home/ada/x"),
        ("A=$USER_", None),
        ("A=${NOTHING}", ""),
        ("A=${NOTHING:-x y}", "x y"),
        ("A=${GONE:-}", ""),
        ("A=${GONE:-$USER}", "ada"),
        ("A=${USER:-$GONE}", "ada"),
        ("A=100$ $1 a$$", "100$ $1 a$$"),
        ("A=名", "名"),
    ],
)
def test_line(tmp_path: Path, line: str, value: str | None) -> None:
    if value is None:
        with pytest.raises(SettingsError, match=r"line 1: A uses \$USER_, which is not set"):
            read(tmp_path, line)
    else:
        assert read(tmp_path, line) == {"A": value}


def test_file(tmp_path: Path) -> None:
    text = "\ufeff# head\r\n\r\nA=1\r\n  # comment\r\nexport B='2'\r\nC=$A${B}\r\nA=4\r\nUSER=eve\r\nD=$USER\r\nE="
    assert list(read(tmp_path, text).items()) == [
        ("A", "4"),
        ("B", "2"),
        ("C", "12"),
        ("USER", "eve"),
        ("D", "eve"),
        ("E", ""),
    ]


@pytest.mark.parametrize(
    ("line", "found", "advice"),
    [
        ("A", "not an assignment", "put # before it"),
        ("export A", "not an assignment", ""),
        ("1A=1", "not an assignment", ""),
        ("A-B=1", "not an assignment", ""),
        ("=secret", "not an assignment", ""),
        ("A='secret", "the quote of A is not closed", "close it with '"),
        ('A="secret\\"', "the quote of A is not closed", 'close it with "'),
        ("A='a'secret", "text after the quoted value of A", "all of the value"),
        ("A='a'#secret", "text after the quoted value of A", ""),
        ('A="a" secret', "text after the quoted value of A", ""),
        (r'A="C:\data secret"', r"\d in the value of A", r"write \\d"),
        ("A=$GONE secret", "A uses $GONE, which is not set", "${GONE:-default}"),
        ("A=${GONE}", "A uses $GONE, which is not set", "single quotes"),
        ("A=${GONE:-$GONE2}", "A uses $GONE2, which is not set", ""),
        ("A=${USER secret", "a malformed ${...} in A", "single quotes"),
        ("A=${USER-secret}", "a malformed ${...} in A", ""),
        ("A=${}", "a malformed ${...} in A", ""),
        ("A=secret\0", "A holds a NUL character", "delete"),
    ],
)
def test_mistake_is_told_with_its_line_and_without_the_value(
    tmp_path: Path, line: str, found: str, advice: str
) -> None:
    with pytest.raises(SettingsError) as caught:
        read(tmp_path, f"# head\n\n{line}\n")
    text = str(caught.value)
    assert text.startswith(f"{tmp_path / 'file.env'}, line 3: {found}\n")
    assert advice in text
    assert "secret" not in text
    assert "secret" not in str(caught.value.__cause__)


def test_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="cannot be read: No such file"):
        read_env_file(tmp_path / "gone", {})
    with pytest.raises(SettingsError, match="line 2: a byte that is not UTF-8"):
        read(tmp_path, b"A=1\nB=\xff\n")


def test_home_in_the_path(tmp_path: Path) -> None:
    (tmp_path / "x.env").write_text("A=1")
    assert read_env_file("~/x.env", {"HOME": str(tmp_path)}) == {"A": "1"}


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(st.characters(codec="utf-8")))
def test_any_text_is_read_or_refused(tmp_path: Path, text: str) -> None:
    try:
        values = read(tmp_path, text)
    except SettingsError:
        return
    assert all(name.isidentifier() and "\0" not in value for name, value in values.items())


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(st.characters(codec="utf-8", exclude_characters="\0\r")))
def test_any_value_can_be_written_in_double_quotes(tmp_path: Path, value: str) -> None:
    escaped = "".join({"\\": r"\\", '"': r"\"", "$": r"\$", "\n": r"\n"}.get(char, char) for char in value)
    assert read(tmp_path, f'A="{escaped}"\n') == {"A": value}


def test_same_as_the_shell(tmp_path: Path) -> None:
    text = "A=1\nexport B='$A b'\nC=\"$A ${B} \\$A \\\\\"\nD=${GONE:-$A}\nE=$A$B\nF=#x\nG=\n"
    values = read(tmp_path, text)
    script = f". {tmp_path / 'file.env'}; printf '%s\\0' " + " ".join(f'"${name}"' for name in values)
    done = subprocess.run(["sh", "-c", script], env={}, capture_output=True, text=True, check=True)
    assert done.stdout.split("\0")[:-1] == list(values.values())
