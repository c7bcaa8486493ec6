"""The kernel keeps a restricted process from writing in the project, and from nothing else.

Every attempt is made by a child process, because a restriction lasts as long as the process.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from taas_magic.rank import landlock

REPOSITORY = Path(landlock.__file__).parents[2]
ABI = landlock.abi_version()

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(ABI == 0, reason="this kernel has no Landlock that can be used"),
]

PRELUDE = """
import errno, json, os, subprocess, sys
from pathlib import Path
from taas_magic.rank import landlock

project = Path(sys.argv[1])
writable = [Path(path) for path in sys.argv[2:]]
ruleset_fd = landlock.build_ruleset(project, writable)
landlock.restrict(ruleset_fd)
outcomes = {}

def attempt(name, action):
    try:
        outcomes[name] = action() or "done"
    except OSError as error:
        outcomes[name] = errno.errorcode[error.errno]

def touch(path):
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT))

def command(*words):
    return "failed" if subprocess.run(words, capture_output=True).returncode else "done"
"""


def child(script: str, project: Path, *writable: Path, wrapper: tuple[str, ...] = ()) -> dict[str, str]:
    """Run ``script`` under the restriction, with ``attempt(name, action)``, and give what became of each attempt."""
    source = PRELUDE + textwrap.dedent(script) + "\nprint(json.dumps(outcomes))"
    done = subprocess.run(
        [*wrapper, sys.executable, "-c", source, project, *writable],
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    outcomes: dict[str, str] = json.loads(done.stdout)
    return outcomes


def tree(base: Path) -> Path:
    """A project four levels beneath ``base``, with something beside it on each level."""
    project = base / "home" / "work" / "project"
    (project / "src").mkdir(parents=True)
    (project / "empty").mkdir()
    for path in (project / "old", project / "src" / "deep", base / "home" / "note", base / "home" / "work" / "list"):
        path.write_text("before")
    for path in (base / "data", base / "home" / ".cache", base / "home" / "work" / "other"):
        path.mkdir()
        (path / "old").write_text("before")
        (path / "spare").write_text("before")
    return project


ATTEMPTS = """
home, work = project.parents[1], project.parent
beside, data = work / "other", project.parents[2] / "data"

# refused
attempt("open w", lambda: open(project / "new", "w"))
attempt("open w, deep", lambda: open(project / "src" / "new", "w"))
attempt("open over", lambda: open(project / "old", "w"))
attempt("open a", lambda: open(project / "old", "a"))
attempt("open r+", lambda: open(project / "src" / "deep", "r+"))
attempt("reopen through /proc", lambda: open(f"/proc/self/fd/{os.open(project / 'old', os.O_RDONLY)}", "r+"))
attempt("mkdir", lambda: os.mkdir(project / "new"))
attempt("mkfifo", lambda: os.mkfifo(project / "new"))
attempt("symlink", lambda: os.symlink("old", project / "new"))
attempt("link", lambda: os.link(project / "old", project / "new"))
attempt("link into", lambda: os.link(beside / "old", project / "new"))
attempt("link out of", lambda: os.link(project / "old", beside / "linked"))
attempt("unlink", lambda: os.unlink(project / "old"))
attempt("rmdir", lambda: os.rmdir(project / "empty"))
attempt("rename within", lambda: os.rename(project / "old", project / "new"))
attempt("rename into", lambda: os.rename(beside / "old", project / "new"))
attempt("rename over", lambda: os.rename(beside / "old", project / "old"))
attempt("rename out of", lambda: os.rename(project / "old", beside / "taken"))
attempt("rename the project", lambda: os.rename(project, work / "renamed"))
attempt("rename its parent", lambda: os.rename(work, home / "renamed"))
attempt("new beside the project", lambda: touch(work / "new"))
attempt("new above the project", lambda: os.mkdir(home / "new"))
attempt("touch command", lambda: command("touch", project / "new"))
attempt("rm command", lambda: command("rm", "-f", project / "old"))
attempt("mv command", lambda: command("mv", beside / "spare", project / "moved"))
attempt("cp command", lambda: command("cp", beside / "spare", project / "copied"))

# allowed
attempt("read", lambda: (project / "old").read_text())
attempt("list", lambda: ",".join(sorted(os.listdir(project))))
attempt("execute", lambda: subprocess.check_output(["echo", "ran"], text=True).strip())
attempt("write beside", lambda: touch(beside / "new"))
attempt("write above", lambda: touch(data / "new"))
attempt("edit a file beside", lambda: touch(work / "list"))
attempt("edit a file above", lambda: (home / "note").write_text("after") and None)
attempt("cache", lambda: os.makedirs(home / ".cache" / "torch" / "kernels"))
attempt("rename between directories", lambda: os.rename(beside / "new", data / "moved"))
attempt("remove", lambda: os.unlink(data / "moved"))
attempt("null", lambda: touch("/dev/null"))
attempt("shared memory", lambda: (touch(shm := f"/dev/shm/taas-test-{os.getpid()}"), os.unlink(shm)) and None)
attempt("own entry of /proc", lambda: Path("/proc/self/comm").write_text("renamed") and None)
attempt("granted directory", lambda: touch(writable[0] / "new"))
attempt("granted file", lambda: writable[1].write_text("after") and None)
if landlock.abi_version() >= 3:
    attempt("truncate", lambda: os.truncate(project / "old", 0))
"""

REFUSED = {
    **dict.fromkeys(("open w", "open w, deep", "open over", "open a", "open r+", "reopen through /proc"), "EACCES"),
    **dict.fromkeys(("mkdir", "mkfifo", "symlink", "link", "unlink", "rmdir", "rename within"), "EACCES"),
    **dict.fromkeys(("link into", "rename into", "rename over", "rename the project", "rename its parent"), "EACCES"),
    **dict.fromkeys(("rename out of", "new beside the project", "new above the project"), "EACCES"),
    "link out of": "EXDEV",
    **dict.fromkeys(("touch command", "rm command", "mv command", "cp command"), "failed"),
    **({"truncate": "EACCES"} if ABI >= 3 else {}),
}
ALLOWED = {
    "read": "before",
    "list": "empty,granted,granted.txt,old,src",
    "execute": "ran",
    **dict.fromkeys(("write beside", "write above", "edit a file beside", "edit a file above", "cache"), "done"),
    **dict.fromkeys(("rename between directories", "remove", "null", "shared memory"), "done"),
    **dict.fromkeys(("own entry of /proc", "granted directory", "granted file"), "done"),
}


@pytest.fixture(scope="module")
def attempts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    project = tree(tmp_path_factory.mktemp("landlock"))
    (project / "granted").mkdir()
    (project / "granted.txt").write_text("before")
    outcomes = child(ATTEMPTS, project, project / "granted", project / "granted.txt", project / "missing")
    outcomes["the project afterwards"] = ",".join(sorted(path.name for path in project.iterdir()))
    outcomes["old afterwards"] = (project / "old").read_text()
    return outcomes


@pytest.mark.parametrize(("attempt", "outcome"), (REFUSED | ALLOWED).items(), ids=[*REFUSED, *ALLOWED])
def test_attempt(attempts: dict[str, str], attempt: str, outcome: str) -> None:
    assert attempts[attempt] == outcome


def test_the_project_is_as_it_was(attempts: dict[str, str]) -> None:
    assert attempts["the project afterwards"] == "empty,granted,granted.txt,old,src"
    assert attempts["old afterwards"] == "before"


def test_project_is_the_home_directory(tmp_path: Path) -> None:
    project = tree(tmp_path).parents[1]
    script = """
        attempt("home", lambda: touch(project / "new"))
        attempt("deep", lambda: touch(project / "work" / "other" / "new"))
        attempt("cache", lambda: os.makedirs(project / ".cache" / "triton"))
        attempt("out of the cache", lambda: os.rename(project / ".cache" / "old", project / "old"))
        attempt("beside", lambda: touch(project.parent / "data" / "new"))
    """
    assert child(script, project, project / ".cache") == {
        "home": "EACCES",
        "deep": "EACCES",
        "cache": "done",
        "out of the cache": "EACCES",
        "beside": "done",
    }


@pytest.mark.parametrize("depth", [0, 1])
def test_project_near_the_root(tmp_path: Path, depth: int) -> None:
    (tmp_path / "granted").mkdir()
    project = Path("/", *tmp_path.resolve().parts[1 : depth + 1])
    script = f"""
        attempt("inside", lambda: touch({str(tmp_path)!r} + "/new"))
        attempt("granted", lambda: touch(writable[0] / "new"))
        attempt("null", lambda: touch("/dev/null"))
        attempt("shared memory", lambda: (touch(shm := f"/dev/shm/taas-test-{{os.getpid()}}"), os.unlink(shm)) and None)
    """
    assert child(script, project, tmp_path / "granted") == {
        "inside": "EACCES",
        "granted": "done",
        "null": "done",
        "shared memory": "done",
    }


def test_symbolic_links_open_nothing_and_close_nothing(tmp_path: Path) -> None:
    project = tree(tmp_path)
    beside = project.parent
    (beside / "into").symlink_to(project / "src")
    (beside / "parent").symlink_to(beside)
    (beside / "away").symlink_to(tmp_path / "data")
    (project / "leaving").symlink_to(tmp_path / "data")
    (tmp_path / "shortcut").symlink_to(project)
    script = """
        real = project.resolve()
        beside = real.parent
        attempt("into", lambda: touch(beside / "into" / "new"))
        attempt("through the parent", lambda: touch(beside / "parent" / "project" / "new"))
        attempt("real name", lambda: touch(real / "new"))
        attempt("away", lambda: touch(beside / "away" / "new"))
        attempt("leaving", lambda: touch(real / "leaving" / "newer"))
        attempt("the link itself", lambda: os.unlink(real / "leaving"))
    """
    assert child(script, tmp_path / "shortcut", beside / "into" / "..", beside / "parent") == {
        "into": "EACCES",
        "through the parent": "EACCES",
        "real name": "EACCES",
        "away": "done",
        "leaving": "done",
        "the link itself": "EACCES",
    }


def test_granting_what_is_above_the_project_opens_nothing(tmp_path: Path) -> None:
    project = tree(tmp_path)
    script = """
        attempt("inside", lambda: touch(project / "new"))
        attempt("beside", lambda: touch(project.parent / "other" / "new"))
    """
    assert child(script, project, project, project.parent, Path("/")) == {"inside": "EACCES", "beside": "done"}


def test_file_beside_that_is_also_in_the_project(tmp_path: Path) -> None:
    project = tree(tmp_path)
    (project.parent / "twin").hardlink_to(project / "old")
    script = """
        attempt("inside", lambda: open(project / "old", "a"))
        attempt("beside", lambda: open(project.parent / "twin", "a"))
    """
    assert child(script, project) == {"inside": "EACCES", "beside": "EACCES"}


def test_second_mount_of_the_project(tmp_path: Path) -> None:
    project = tree(tmp_path)
    for name in ("whole", "part", "above", "unrelated"):
        (tmp_path / name).mkdir()
    mounts = (
        f"mount --bind {project} {tmp_path}/whole && mount --bind {project}/src {tmp_path}/part && "
        f"mount --bind {tmp_path}/home {tmp_path}/above && mount --bind {tmp_path}/data {tmp_path}/unrelated"
    )
    unshare = ("unshare", "--mount") if os.geteuid() == 0 else ("unshare", "--mount", "--map-root-user")
    if not shutil.which("unshare") or subprocess.run([*unshare, "sh", "-c", mounts], capture_output=True).returncode:
        pytest.skip("this process cannot make a mount namespace")
    script = """
        base = project.parents[2]
        attempt("whole", lambda: touch(base / "whole" / "new"))
        attempt("part", lambda: touch(base / "part" / "new"))
        attempt("above", lambda: touch(base / "above" / "work" / "project" / "new"))
        attempt("beside, above", lambda: touch(base / "above" / "work" / "other" / "new"))
        attempt("unrelated", lambda: touch(base / "unrelated" / "new"))
    """
    assert child(script, project, wrapper=(*unshare, "sh", "-c", f'{mounts} && exec "$@"', "sh")) == {
        "whole": "EACCES",
        "part": "EACCES",
        "above": "EACCES",
        "beside, above": "done",
        "unrelated": "done",
    }


@pytest.mark.skipif(os.geteuid() == 0, reason="root can list every directory")
def test_directory_above_that_cannot_be_listed(tmp_path: Path) -> None:
    project = tree(tmp_path)
    project.parent.chmod(0o311)
    script = """
        attempt("inside", lambda: touch(project / "new"))
        attempt("granted beside", lambda: touch(writable[0] / "new"))
        attempt("further up", lambda: touch(project.parents[2] / "data" / "new"))
    """
    try:
        outcomes = child(script, project, project.parent / "other")
    finally:
        project.parent.chmod(0o755)
    assert outcomes == {"inside": "EACCES", "granted beside": "done", "further up": "done"}


def test_thousands_beside_the_project(tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    for number in range(3000):
        (tmp_path / f"run-{number}").mkdir()
    script = """
        for number in range(3000):
            touch(project.parent / f"run-{number}" / "new")
        attempt("inside", lambda: touch(project / "new"))
    """
    assert child(script, project) == {"inside": "EACCES"}


def test_restriction_is_inherited_and_binds_nobody_else(tmp_path: Path) -> None:
    """A restricted process sees at once what another one writes, which is how ranks read rank 0's checkpoint."""
    project = tree(tmp_path)
    script = PRELUDE + textwrap.dedent("""
        print("ready", (project / "weights").exists(), flush=True)
        sys.stdin.readline()
        print((project / "weights").read_text(), flush=True)
        pid = os.fork()
        if pid == 0:
            attempt("grandchild", lambda: touch(project / "new"))
            print(outcomes["grandchild"], flush=True)
            os._exit(0)
        os.waitpid(pid, 0)
    """)
    with subprocess.Popen(
        [sys.executable, "-c", script, project],
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin
        assert process.stdout
        assert process.stdout.readline() == "ready False\n"
        (project / "weights").write_text("trained")
        assert process.communicate("go\n", timeout=30)[0] == "trained\nEACCES\n"


def test_second_thread_is_an_error(tmp_path: Path) -> None:
    script = """
        import threading
        end = threading.Event()
        thread = threading.Thread(target=end.wait)
        thread.start()
        try:
            landlock.restrict(ruleset_fd)
        except RuntimeError as error:
            outcomes["error"] = str(error).splitlines()[0]
        end.set()
        thread.join()
    """
    assert child(script, tmp_path) == {"error": "Landlock would restrict one of 2 threads"}


def test_ruleset_is_closed_by_exec(tmp_path: Path) -> None:
    ruleset_fd = landlock.build_ruleset(tmp_path, [])
    try:
        assert not os.get_inheritable(ruleset_fd)
    finally:
        os.close(ruleset_fd)


def test_project_that_is_no_directory(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        landlock.build_ruleset(tmp_path / "missing", [])
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        landlock.build_ruleset(tmp_path / "file", [])


def test_descriptor_that_is_no_ruleset(tmp_path: Path) -> None:
    script = """
        attempt("restrict", lambda: landlock.restrict(sys.stdin.fileno()))
    """
    assert child(script, tmp_path)["restrict"] in {errno.errorcode[errno.EBADFD], errno.errorcode[errno.EBADF]}
