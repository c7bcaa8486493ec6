"""Reads the text of settings, environment files and lists, and paths in them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from taas_magic.errors import SettingsError


def expand_home(text: str, environ: Mapping[str, str]) -> Path:
    """``text`` as a path, with a leading ``~`` replaced by the ``HOME`` of ``environ``."""
    home = environ.get("HOME")
    if home and (text == "~" or text.startswith("~/")):
        return Path(home, text[2:])
    return Path(text)


def read_text(path: Path) -> str:
    """The text of a settings or environment file, its byte order mark removed.

    Raises:
        SettingsError: The file cannot be read, or is not UTF-8.
    """
    try:
        return path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise SettingsError.of(
            f"{path} cannot be read: {error.strerror or error}",
            expected="a file that you may read",
            do="check its name and its permissions",
        ) from error
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise SettingsError.of(
            f"{path}, line {line}: a byte that is not UTF-8", expected="text in UTF-8", do="save it as UTF-8"
        ) from error
