"""A project's files on their way to machines, and what runs make of them on its way home."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from taas_magic.errors import PlacementError
from taas_magic.machines.code_scan import FileEntry, Scanner, digest_of
from taas_magic.machines.code_store import CodeStore, UntrustedPathError, inside
from taas_magic.machines.files_home import FileChange, HomeFiles, Watcher

LARGE = 10**9


def write(directory: Path, **files: str) -> None:
    for name, text in files.items():
        path = directory / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def paths_of(directory: Path) -> list[str]:
    return [entry.path for entry in Scanner(directory, LARGE).scan().entries]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    directory = tmp_path / "project"
    directory.mkdir()
    write(directory, train_dot_py="x", lib__net_dot_py="y", out__big_dot_pt="w", notes_dot_md="n")
    (directory / "lib" / "__pycache__").mkdir()
    (directory / "lib" / "__pycache__" / "net.pyc").write_text("compiled")
    (directory / ".gitignore").write_text("out/\n*.log\n!keep.log\n")
    write(directory, a_dot_log="1", keep_dot_log="2", lib__b_dot_log="3")
    (directory / "lib" / ".gitignore").write_text("!b.log\n")
    (directory / "venv").mkdir()
    write(directory, venv__pyvenv_dot_cfg="", venv__lib_dot_py="")
    return directory


EXPECTED = [".gitignore", "keep.log", "lib/.gitignore", "lib/b.log", "lib/net.py", "notes.md", "train.py"]


def test_what_git_would_take_is_found_without_git(project: Path) -> None:
    assert paths_of(project) == EXPECTED


@pytest.mark.skipif(shutil.which("git") is None, reason="no git")
def test_what_git_takes_is_found_with_git(project: Path) -> None:
    shutil.rmtree(project / "venv")
    subprocess.run(["git", "init", "-q", str(project)], check=True)
    assert paths_of(project) == EXPECTED
    subprocess.run(["git", "-C", str(project), "add", "-A"], check=True)
    (project / "notes.md").unlink()
    assert paths_of(project) == [path for path in EXPECTED if path != "notes.md"]


def test_links_stay_within_the_project(project: Path) -> None:
    (project / "inner").symlink_to("train.py")
    (project / "outer").symlink_to("/etc/passwd")
    (project / "above").symlink_to("../elsewhere")
    os.mkfifo(project / "pipe")
    manifest = Scanner(project, LARGE).scan()
    links = {entry.path: entry.link for entry in manifest.entries if entry.link}
    assert links == {"inner": "train.py"}
    assert sorted(manifest.problems) == ["above: a link out of it", "outer: a link out of it"]


def test_what_is_too_large_is_named(project: Path) -> None:
    (project / "data.bin").write_bytes(bytes(5000))
    with pytest.raises(PlacementError, match=r"data\.bin \(4\.9 KiB\)"):
        Scanner(project, 4000).scan()


def test_only_what_has_changed_is_read_again(project: Path) -> None:
    scanner = Scanner(project, LARGE)
    before = {entry.path: entry.digest for entry in scanner.scan().entries}
    (project / "train.py").write_text("changed")
    after = {entry.path: entry.digest for entry in scanner.scan().entries}
    assert {path for path in after if after[path] != before[path]} == {"train.py"}


# ---- copies


def send(project: Path, store: CodeStore, target: Path) -> list[FileEntry]:
    entries = list(Scanner(project, LARGE).scan().entries)
    path_of = {entry.digest: entry.path for entry in entries}
    for digest in store.missing(entries):
        store.put(digest, (project / path_of[digest]).read_bytes())
    store.materialise(entries, target)
    return entries


def test_a_copy_is_like_the_project_and_keeps_what_runs_made(project: Path, tmp_path: Path) -> None:
    (project / "run.sh").write_text("#!/bin/sh\n")
    (project / "run.sh").chmod(0o755)
    (project / "inner").symlink_to("train.py")
    store, target = CodeStore(tmp_path / "store"), tmp_path / "copy"
    send(project, store, target)
    assert (target / "lib" / "net.py").read_text() == "y"
    assert os.access(target / "run.sh", os.X_OK)
    assert (target / "inner").readlink() == Path("train.py")
    (target / "made.txt").write_text("by a run")
    (target / "train.py").write_text("z")
    (project / "notes.md").unlink()
    assert store.missing(Scanner(project, LARGE).scan().entries) == []
    send(project, store, target)
    assert (target / "train.py").read_text() == "x"
    assert (target / "made.txt").read_text() == "by a run"
    assert not (target / "notes.md").exists()


def test_a_file_that_changes_twice_a_second_is_newer_each_time(project: Path, tmp_path: Path) -> None:
    store, target = CodeStore(tmp_path / "store"), tmp_path / "copy"
    seconds = set()
    for text in ("a", "b", "c"):
        (project / "train.py").write_text(text)
        send(project, store, target)
        seconds.add(int((target / "train.py").stat().st_mtime))
    assert len(seconds) == 3


def test_a_content_must_have_its_digest(tmp_path: Path) -> None:
    store = CodeStore(tmp_path)
    with pytest.raises(ValueError, match="does not have its digest"):
        store.put(b"\1" * 32, b"other")


def test_contents_beyond_the_budget_go(tmp_path: Path) -> None:
    store = CodeStore(tmp_path / "store", budget_bytes=250)
    files = tmp_path / "files"
    files.mkdir()
    for number in range(4):
        (files / str(number)).write_bytes(bytes([number]) * 100)
        store.put(digest_of(files / str(number)), (files / str(number)).read_bytes())
    store.shrink()
    assert len(list((tmp_path / "store").glob("??/*"))) == 2


@pytest.mark.parametrize("path", ["../x", "/etc/x", "a/../../x", "", ".", "a\0b", "link/x"])
def test_nothing_is_written_outside(tmp_path: Path, path: str) -> None:
    target = tmp_path / "copy"
    target.mkdir()
    (target / "link").symlink_to(tmp_path)
    with pytest.raises(UntrustedPathError):
        inside(target, path)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(["a", "..", ".", "", "b", "/"]), max_size=6).map("/".join))
def test_no_path_leads_out(path: str) -> None:
    target = Path("/somewhere/project")
    try:
        found = inside(target, path)
    except UntrustedPathError:
        return
    assert Path(os.path.normpath(found)).is_relative_to(target)
    assert found != target


# ---- home


def test_a_watcher_sees_what_is_quiet_and_at_the_end_all(project: Path, tmp_path: Path) -> None:
    store, target = CodeStore(tmp_path / "store"), tmp_path / "copy"
    entries = send(project, store, target)
    watcher = Watcher(target, entries, 1000)
    (target / "model.pt").write_text("one")
    assert watcher.changes() == []
    (found,) = watcher.changes()
    assert (found.path, found.size_bytes, found.digest) == ("model.pt", 3, digest_of(target / "model.pt"))
    assert watcher.changes() == []
    (target / "train.py").write_text("changed")
    (target / "notes.md").unlink()
    (target / "large.pt").write_bytes(bytes(2000))
    found_paths = {change.path: change.digest for change in watcher.changes(final=True)}
    assert found_paths == {"train.py": digest_of(target / "train.py"), "notes.md": b""}
    assert "large.pt" in watcher.left
    (target / "train.py").touch()
    assert watcher.changes(final=True) == []


def change_of(path: str, content: bytes) -> FileChange:
    import hashlib

    return FileChange(path, hashlib.blake2b(content, digest_size=32).digest() if content else b"", len(content))


def test_files_come_home_and_nothing_here_is_lost(tmp_path: Path) -> None:
    write(tmp_path, notes_dot_md="as sent", other_dot_md="as sent", gone_dot_md="as sent")
    known = {name: digest_of(tmp_path / name) for name in ("notes.md", "other.md", "gone.md")}
    home = HomeFiles(tmp_path, known)
    assert home.apply(change_of("out/model.pt", b"weights"), b"weights", "r1") == ""
    assert (tmp_path / "out" / "model.pt").read_bytes() == b"weights"
    assert home.apply(change_of("out/model.pt", b"better"), b"better", "r1") == ""
    assert home.apply(change_of("notes.md", b"by the run"), b"by the run", "r1") == ""
    assert (tmp_path / "notes.md").read_text() == "by the run"
    (tmp_path / "other.md").write_text("by the user")
    assert "changed here, too" in home.apply(change_of("other.md", b"by the run"), b"by the run", "r1")
    assert (tmp_path / "other.md").read_text() == "by the user"
    assert (tmp_path / "other.from-run-r1.md").read_text() == "by the run"
    assert "it stays" in home.apply(change_of("other.md", b""), b"", "r1")
    assert home.apply(change_of("gone.md", b""), b"", "r1") == ""
    assert not (tmp_path / "gone.md").exists()


@pytest.mark.parametrize("path", ["../x", "link", "link/x", ".git/hooks/post-commit", "/x"])
def test_nothing_comes_home_to_where_it_does_not_belong(tmp_path: Path, path: str) -> None:
    project = tmp_path / "project"
    project.mkdir()
    (project / "link").symlink_to(tmp_path)
    with pytest.raises(UntrustedPathError):
        HomeFiles(project, {}).apply(change_of(path, b"x"), b"x", "r1")
