"""The keys by which a notebook and the runners of machines know each other (CurveZMQ key pairs, in Z85)."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from taas_magic.errors import SettingsError
from taas_magic.settings_text import read_text

#: What Z85 writes with (https://rfc.zeromq.org/spec/32): 40 characters for 32 bytes.
_Z85: Final = re.compile(r"[0-9A-Za-z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
#: Who has the key.
Whose = Literal["notebook", "runner"]


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A key that everybody may know, and the one that goes with it, which nobody else may."""

    public: str
    secret: str

    def __repr__(self) -> str:
        return f"KeyPair({self.public!r}, ...)"


def is_key(text: str) -> bool:
    """Whether a text has the form of a key."""
    return _Z85.fullmatch(text) is not None


def fingerprint(public: str) -> str:
    """A short name of a public key, for people."""
    return hashlib.blake2b(public.encode(), digest_size=6).hexdigest()


def new_keys() -> KeyPair:
    """A new key pair."""
    import zmq

    public, secret = zmq.curve_keypair()
    return KeyPair(public.decode(), secret.decode())


def keys_directory(environ: Mapping[str, str]) -> Path:
    """Where this user's keys are."""
    base = environ.get("XDG_CONFIG_HOME", "")
    home = Path(environ["HOME"]) if environ.get("HOME") else Path.home()
    return (Path(base) if base.startswith("/") else home / ".config") / "taas" / "keys"


def own_keys(whose: Whose, environ: Mapping[str, str] | None = None) -> KeyPair:
    """This user's key pair; made where there is none.

    Raises:
        SettingsError: if the file may be read by others, is somebody else's, or holds no key pair.
    """
    path = keys_directory(os.environ if environ is None else environ) / f"{whose}.key"
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        _require_private(path.parent)
        if not path.exists():
            _write_once(path, new_keys())
        _require_private(path)
        lines = path.read_text(encoding="ascii").split()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError.of(f"{path}: {error}", do="see that you may read and write it, or delete it") from error
    if len(lines) != 2 or not all(map(is_key, lines)):
        raise SettingsError.of(
            f"{path} holds no key pair", expected="a public and a secret key", do="delete it: a new one is made then"
        )
    return KeyPair(*lines)


def _require_private(path: Path) -> None:
    status = path.stat()
    if status.st_uid != os.getuid():
        raise SettingsError.of(f"{path} belongs to another user", expected="a file of your own", do="delete it")
    if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        mode = "700" if path.is_dir() else "600"
        raise SettingsError.of(
            f"{path} is open to others (mode {stat.S_IMODE(status.st_mode):o})",
            expected=f"mode {mode}: who can read the key can use your machines",
            do=f"chmod {mode} {path}; make new keys if others may have read it",
        )


def _write_once(path: Path, keys: KeyPair) -> None:
    """Write a file that is whole when it is there; where another process is first, its file counts."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(f"{keys.public}\n{keys.secret}\n")
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(temporary, path)
        except FileExistsError:
            return
    finally:
        temporary.unlink()


def read_authorized_keys(path: Path) -> frozenset[str]:
    """The public keys of a file: one a line, with a comment behind it.

    Raises:
        SettingsError: if it cannot be read, or a line begins with no key.
    """
    found = set()
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        words = line.split(maxsplit=1)
        if not words or (words[0].startswith("#") and not is_key(words[0])):
            continue
        if not is_key(words[0]):
            raise SettingsError.of(
                f"{path}, line {number}: {words[0][:60]!r} is no public key",
                expected="a public key of 40 characters, as `taas keys` shows it, and perhaps a name behind it",
                do="correct it, or put # and a space before it",
            )
        found.add(words[0])
    return frozenset(found)
