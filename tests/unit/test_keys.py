"""Keys: made once, refused where others can read them, and listed in files of who may come in."""

from __future__ import annotations

from pathlib import Path

import pytest

from taas_magic.errors import SettingsError
from taas_magic.machines.keys import fingerprint, is_key, keys_directory, new_keys, own_keys, read_authorized_keys


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"XDG_CONFIG_HOME": str(tmp_path)}


def test_a_key_pair_is_made_once_and_for_nobody_else(environ: dict[str, str], tmp_path: Path) -> None:
    keys = own_keys("notebook", environ)
    assert own_keys("notebook", environ) == keys
    assert own_keys("runner", environ) != keys
    assert is_key(keys.public)
    assert is_key(keys.secret)
    assert keys.secret not in repr(keys)
    path = tmp_path / "taas" / "keys" / "notebook.key"
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert [each.name for each in path.parent.iterdir() if each.name.startswith(".")] == []


def test_keys_are_in_the_configuration_of_whose_environment_it_is() -> None:
    assert keys_directory({"HOME": "/home/ada"}) == Path("/home/ada/.config/taas/keys")
    assert keys_directory({"HOME": "/home/ada", "XDG_CONFIG_HOME": "relative"}) == Path("/home/ada/.config/taas/keys")
    assert keys_directory({"HOME": "/home/ada", "XDG_CONFIG_HOME": "/xdg"}) == Path("/xdg/taas/keys")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o622])
def test_a_file_that_others_can_use_is_refused(environ: dict[str, str], tmp_path: Path, mode: int) -> None:
    own_keys("notebook", environ)
    path = tmp_path / "taas" / "keys" / "notebook.key"
    path.chmod(mode)
    with pytest.raises(SettingsError, match="chmod 600"):
        own_keys("notebook", environ)
    path.chmod(0o600)
    path.parent.chmod(0o755)
    with pytest.raises(SettingsError, match="chmod 700"):
        own_keys("notebook", environ)


def test_what_is_no_key_pair_is_refused(environ: dict[str, str], tmp_path: Path) -> None:
    own_keys("notebook", environ)
    (tmp_path / "taas" / "keys" / "notebook.key").write_text("nothing\n")
    with pytest.raises(SettingsError, match="holds no key pair"):
        own_keys("notebook", environ)


def test_authorized_keys_have_comments_and_errors_a_line(tmp_path: Path) -> None:
    one, two = new_keys().public, new_keys().public
    path = tmp_path / "authorized"
    path.write_text(f"# those who may\n\n{one} ada@laptop\n{two}\n{one}\n")
    assert read_authorized_keys(path) == {one, two}
    path.write_text(f"{one}\nssh-ed25519 AAAA ada\n")
    with pytest.raises(SettingsError, match="line 2: 'ssh-ed25519' is no public key"):
        read_authorized_keys(path)
    with pytest.raises(SettingsError, match="cannot be read"):
        read_authorized_keys(tmp_path / "missing")
    assert fingerprint(one) != fingerprint(two)
