"""Settings: where they come from, which counts, and how a mistake is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from taas_magic.errors import SettingsError
from taas_magic.settings import PoolSettings, Settings, load_settings, settings_reference

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "settings.md"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    directory = tmp_path / "home" / "project"
    directory.mkdir(parents=True)
    return directory


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"HOME": str(tmp_path / "home")}


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def test_defaults(project: Path, environ: dict[str, str]) -> None:
    settings = load_settings(project, environ)
    assert settings.project.directory == project.resolve()
    assert settings.project.writable == ()
    assert settings.stop.grace_s == 5.0
    assert settings.local.max_ranks == 64
    assert settings.output.tail_lines == 20


def test_no_home_is_no_error(project: Path) -> None:
    assert load_settings(project, {}).stop.grace_s == 5.0


def test_project_counts_before_user_key_by_key(project: Path, environ: dict[str, str]) -> None:
    write(Path(environ["HOME"], ".config/taas/config.toml"), "[stop]\ngrace_s = 1\n[local]\nmax_ranks = 2\n")
    write(project / "taas.toml", "local.max_ranks = 3\n[output]\ntail_lines = 0\n")
    settings = load_settings(project, environ)
    assert (settings.stop.grace_s, settings.local.max_ranks, settings.output.tail_lines) == (1.0, 3, 0)


@pytest.mark.parametrize(("config_home", "counts"), [("/xdg", True), ("relative", False), ("", False)])
def test_xdg_config_home(
    project: Path, environ: dict[str, str], tmp_path: Path, config_home: str, counts: bool
) -> None:
    write(tmp_path / "xdg/taas/config.toml", "[stop]\ngrace_s = 1")
    write(tmp_path / "home/.config/taas/config.toml", "[stop]\ngrace_s = 2")
    config_home = config_home.replace("/xdg", f"{tmp_path}/xdg")
    assert load_settings(project, environ | {"XDG_CONFIG_HOME": config_home}).stop.grace_s == (1.0 if counts else 2.0)


def test_nearest_project_file_counts_alone(project: Path, environ: dict[str, str]) -> None:
    write(project / "taas.toml", "[stop]\ngrace_s = 1\n[output]\ntail_lines = 1")
    write(project / "a/taas.toml", "[stop]\ngrace_s = 2")
    below = project / "a" / "b"
    below.mkdir()
    settings = load_settings(below, environ)
    assert (settings.stop.grace_s, settings.output.tail_lines) == (2.0, 20)
    assert settings.project.directory == below.resolve()


def test_paths_are_relative_to_their_file(project: Path, environ: dict[str, str]) -> None:
    write(project / "taas.toml", '[project]\ndirectory = "."\nwritable = ["cache", "~/logs", "/tmp/../x"]')
    below = project / "notebooks"
    below.mkdir()
    settings = load_settings(below, environ)
    assert settings.project.directory == project.resolve()
    assert settings.project.writable == (
        project.resolve() / "cache",
        Path(environ["HOME"]).resolve() / "logs",
        Path("/x"),
    )


def test_symbolic_links_are_resolved(project: Path, environ: dict[str, str], tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(project)
    assert load_settings(link, environ).project.directory == project.resolve()


@pytest.mark.parametrize(
    ("text", "line", "parts"),
    [
        (
            "[stop]\n\n# grace_s = 1\ngrace = 5",
            4,
            ["grace is not a key of [stop]", "expected: grace_s", "write grace_s"],
        ),
        ("\n[stopp]\ngrace_s = 5", 2, ["stopp is not a table", "[project], [stop], [local], [output]", "write [stop]"]),
        ("grace_s = 5", 1, ["grace_s is not a table"]),
        ("\nstop = 5", 2, ["stop is not written as a table", "write [stop]"]),
        ("[[stop]]\ngrace_s = 5", 1, ["stop is not written as a table"]),
        (
            "[output]\n[stop]\ngrace_s = 'x'",
            3,
            ["stop.grace_s is 'x'", "expected: seconds, 0 or more", "then it is 5.0"],
        ),
        ("[stop]\ngrace_s = -1", 2, ["is -1"]),
        ("[stop]\ngrace_s = nan", 2, ["is nan"]),
        ("[stop]\ngrace_s = inf", 2, ["is inf"]),
        ("[stop]\ngrace_s = true", 2, ["is True"]),
        ("\nlocal.max_ranks = 0", 2, ["local.max_ranks is 0"]),
        ("[local]\nmax_ranks = 1.5", 2, ["is 1.5"]),
        ('[local]\n"max_ranks" = true', 2, ["is True"]),
        ("\nlocal = { max_ranks = 0 }", 2, ["local.max_ranks is 0"]),
        ("[output]\ntail_lines = -1", 2, ["output.tail_lines is -1"]),
        ("[project]\nwritable = 'x'", 2, ["project.writable is 'x'", 'a list of paths, such as ["cache", "logs"]']),
        ("[project]\nwritable = [1]", 2, ["is [1]"]),
        ("[project]\nwritable = ['']", 2, ["is ['']"]),
        ('[project]\ndirectory = "a\\u0000"', 2, ["project.directory"]),
        ("[project]\ndirectory = 'not there'", 2, ["is 'not there'", "a directory that exists"]),
        (f"[project]\ndirectory = '{'x' * 5000}'", 2, ["a directory that exists"]),
        ("[stop]\ngrace_s == 5", 2, ["expected: TOML", "correct this line"]),
        ("[stop]\ngrace_s = 5\ngrace_s = 6", 3, ["expected: TOML"]),
        ("[stop]\ngrace_s = '''\n\n", 2, ["expected: TOML"]),
    ],
)
def test_mistake_is_told_with_its_line(
    project: Path, environ: dict[str, str], text: str, line: int, parts: list[str]
) -> None:
    path = write(project / "taas.toml", text)
    with pytest.raises(SettingsError) as caught:
        load_settings(project, environ)
    assert str(caught.value).startswith(f"{path}, line {line}: ")
    for part in parts:
        assert part in str(caught.value)


def test_mistake_in_the_user_file_names_that_file(project: Path, environ: dict[str, str]) -> None:
    path = write(Path(environ["HOME"], ".config/taas/config.toml"), "[stop]\ngrace = 1")
    with pytest.raises(SettingsError, match=f"^{path}, line 2: "):
        load_settings(project, environ)


def test_file_that_is_no_text(project: Path, environ: dict[str, str]) -> None:
    (project / "taas.toml").write_bytes(b"[stop]\n# \xff\n")
    with pytest.raises(SettingsError, match="line 2: a byte that is not UTF-8"):
        load_settings(project, environ)


def test_file_that_cannot_be_read(project: Path, environ: dict[str, str]) -> None:
    (project / "taas.toml").mkdir()
    with pytest.raises(SettingsError, match=r"taas\.toml cannot be read: Is a directory"):
        load_settings(project, environ)


def test_page_holds_the_table() -> None:
    assert f"\n\n{settings_reference()}\n\n" in PAGE.read_text(encoding="utf-8")


def test_page_shows_a_real_error(project: Path, environ: dict[str, str]) -> None:
    path = write(project / "taas.toml", "[project]\n\n\n[stop]\ngrace = 5")
    with pytest.raises(SettingsError) as caught:
        load_settings(project, environ)
    text = str(caught.value).replace(str(path), "/home/ada/digits/taas.toml")
    assert f"\n{text}\n" in PAGE.read_text(encoding="utf-8")


def test_reference_lists_every_key(project: Path, environ: dict[str, str]) -> None:
    settings = load_settings(project, environ)
    listed = [row.split("`")[1] for row in settings_reference().split("\n")[2:]]
    tables = {table: getattr(settings, table) for table in Settings.__slots__ if table != "pools"}
    tables["pools.NAME"] = PoolSettings(name="")
    assert listed == [f"{table}.{key}" for table, keys in tables.items() for key in keys.__slots__ if key != "name"]
