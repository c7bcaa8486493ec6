"""What ranks other than 0 do about writes: left out, waited for, refused, explained; with Landlock and without.

What changes a process is tried in a child process; only texts and paths are tested here.
"""

from __future__ import annotations

import errno
import json
import os
import pathlib
import shutil
import sqlite3
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from taas_magic.rank import landlock, writes
from taas_magic.rank.refusal import Territory

REPOSITORY = Path(writes.__file__).parents[2]
ABI = landlock.abi_version()
RANK = 3

PRELUDE = """
import json, os, sqlite3, subprocess, sys
from pathlib import Path
from taas_magic.rank import landlock, writes

project, enforced = Path(sys.argv[1]), sys.argv[2] == "landlock"
writable = [Path(path) for path in sys.argv[3:]]
os.chdir(project)
if enforced:
    landlock.restrict(landlock.build_ruleset(project, writable))
import numpy, torch
guard = writes.WriteGuard(writable=writable, directory_wait_s=float(os.environ.get("WAIT_S", 60)))
guard.install(3, project, enforced=enforced)
outcomes = {}

def attempt(name, action):
    try:
        outcomes[name] = {"type": "done", "value": action()}
    except Exception as error:
        outcomes[name] = {"type": type(error).__name__, "text": str(error), "note": guard.explain(error)}
"""

MECHANISMS = [
    pytest.param("landlock", marks=pytest.mark.skipif(ABI == 0, reason="this kernel has no Landlock that can be used")),
    "python",
]


def command(script: str, project: Path, mechanism: str, *writable: Path) -> list[str]:
    return [sys.executable, "-c", PRELUDE + script, str(project), mechanism, *map(str, writable)]


def environment(**more: str) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(REPOSITORY), *filter(None, sys.path)])} | more


def child(script: str, project: Path, mechanism: str, *writable: Path, **more: str) -> dict[str, Any]:
    """Run ``script`` as rank 3 of ``project``, its current directory, and give what became of each attempt."""
    done = subprocess.run(
        command(textwrap.dedent(script) + "\nprint(json.dumps(outcomes))", project, mechanism, *writable),
        env=environment(**more),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    outcomes: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return outcomes


ATTEMPTS = """
tensor, module = torch.ones(2), torch.jit.script(torch.nn.Linear(1, 1))
outside = project.parent / "outside"

# refused
attempt("open", lambda: open("new", "w"))
attempt("open bytes", lambda: open(os.fsencode(project / "new"), "ab"))
attempt("os.open", lambda: os.open("old", os.O_RDWR))
attempt("write_text", lambda: Path("new").write_text("x"))
attempt("through a link", lambda: open(outside / "into" / "new", "w"))
attempt("remove", lambda: os.remove("old"))
attempt("remove by directory", lambda: os.remove("old", dir_fd=os.open(project, os.O_RDONLY)))
attempt("rename out of", lambda: os.rename("old", outside / "taken"))
attempt("rename into", lambda: os.replace(outside / "old", "new"))
attempt("link out of", lambda: os.link("old", outside / "linked"))
attempt("symlink", lambda: os.symlink("old", "new"))
attempt("truncate", lambda: os.truncate("old", 0))
attempt("rmdir", lambda: os.rmdir("empty"))
attempt("mkfifo", lambda: os.mkfifo("new"))
attempt("mkdir", lambda: os.mkdir("new"))
attempt("Path.mkdir", lambda: Path("new").mkdir())
attempt("makedirs", lambda: os.makedirs("new/deep"))
attempt("numpy.save", lambda: numpy.save("new.npy", numpy.ones(2)))
attempt("PyTorchFileWriter", lambda: torch._C.PyTorchFileWriter(str(project / "new.pt")))
attempt("torch.jit.save", lambda: torch.jit.save(module, "new.pt"))
attempt("sqlite create", lambda: sqlite3.connect("new.db").execute("create table t (a)"))
attempt("sqlite insert", lambda: sqlite3.connect("old.db").execute("insert into t values (2)"))

# allowed, as ever
attempt("read", lambda: open("old").read())
attempt("sqlite read", lambda: sqlite3.connect("old.db").execute("select a from t").fetchall())
attempt("missing", lambda: os.remove("missing"))
attempt("mkdir over", lambda: os.mkdir("empty"))
attempt("write outside", lambda: (outside / "new").write_text("x"))
attempt("save outside", lambda: torch.save(tensor, outside / "new.pt"))
attempt("remove outside by directory", lambda: os.remove("spare", dir_fd=os.open(outside, os.O_RDONLY)))
attempt("sqlite outside", lambda: sqlite3.connect(outside / "new.db").execute("create table t (a)") and None)
attempt("save to granted", lambda: torch.save(tensor, writable[0] / "new.pt"))
attempt("makedirs in granted", lambda: os.makedirs(writable[0] / "a" / "b", exist_ok=True))

# left out
with open(outside / "stream.pt", "wb") as stream:
    attempt("save to a stream", lambda: torch.save(tensor, stream))
attempt("save", lambda: torch.save(tensor, "left.pt"))
attempt("save again", lambda: torch.save(obj=tensor, f="left.pt"))
attempt("save by its other name", lambda: torch.serialization.save(tensor, Path("sub") / "left.pt"))
attempt("save through a link", lambda: torch.save(tensor, outside / "into" / "left.pt"))
attempt("left out", lambda: [[entry.what, entry.path, entry.count] for entry in guard.left_out()])

# the directory is there
attempt("makedirs, there", lambda: os.makedirs("empty", exist_ok=True))
attempt("Path.mkdir, there", lambda: Path("empty").mkdir(exist_ok=True, parents=True))
attempt("makedirs over a file", lambda: os.makedirs("old", exist_ok=True))
"""

REFUSED = {
    **dict.fromkeys(("open", "open bytes", "os.open", "write_text", "through a link", "remove"), "PermissionError"),
    **dict.fromkeys(("rename out of", "rename into", "symlink", "rmdir", "mkdir"), "PermissionError"),
    **dict.fromkeys(("Path.mkdir", "makedirs", "numpy.save", "remove by directory"), "PermissionError"),
    **({"truncate": "PermissionError"} if ABI == 0 or ABI >= 3 else {}),
    **dict.fromkeys(("sqlite create", "sqlite insert"), "OperationalError"),
    # How they are refused differs between the two mechanisms.
    **dict.fromkeys(("link out of", "PyTorchFileWriter", "torch.jit.save"), ""),
}
ALLOWED = {
    **dict.fromkeys(("write outside", "save outside", "remove outside by directory", "sqlite outside"), "done"),
    **dict.fromkeys(("save to granted", "makedirs in granted", "save to a stream", "read", "sqlite read"), "done"),
    **dict.fromkeys(("save", "save again", "save by its other name", "save through a link"), "done"),
    **dict.fromkeys(("makedirs, there", "Path.mkdir, there"), "done"),
    "missing": "FileNotFoundError",
    "mkdir over": "FileExistsError",
    "makedirs over a file": "FileExistsError",
}


@pytest.fixture(scope="module", params=MECHANISMS)
def attempts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    base = tmp_path_factory.mktemp("writes")
    project, outside = base / "project", base / "outside"
    for path in (project / "empty", project / "granted", outside):
        path.mkdir(parents=True)
    for path in (project / "old", outside / "old", outside / "spare"):
        path.write_text("before")
    (outside / "into").symlink_to(project)
    with sqlite3.connect(project / "old.db") as database:
        database.execute("create table t (a)")
        database.execute("insert into t values (1)")
    database.close()
    before = sorted(project.iterdir())
    outcomes = child(ATTEMPTS, project, request.param, project / "granted")
    yield outcomes | {"project": str(project), "outside": str(outside)}
    assert sorted(project.iterdir()) == before
    assert (project / "old").read_text() == "before"


@pytest.mark.process
@pytest.mark.parametrize(("attempt", "error_type"), REFUSED.items(), ids=REFUSED)
def test_refused_and_explained(attempts: dict[str, Any], attempt: str, error_type: str) -> None:
    outcome = attempts[attempt]
    assert outcome["type"] != "done"
    assert outcome["type"] == (error_type or outcome["type"])
    assert outcome["note"], outcome
    assert outcome["note"].startswith(f"rank {RANK} was ")
    assert f"Only rank 0 writes to the project {attempts['project']!r}" in outcome["note"]
    assert "`if taas.rank() == 0:`" in outcome["note"]
    assert "`--writes all`, which sharded checkpoints need" in outcome["note"]


@pytest.mark.process
def test_refused_without_a_name(attempts: dict[str, Any]) -> None:
    assert attempts["mkfifo"]["type"] == "PermissionError"


@pytest.mark.process
@pytest.mark.parametrize(
    ("attempt", "path"),
    [
        ("open", "new"),
        ("open bytes", "new"),
        ("os.open", "old"),
        ("rename out of", "old"),
        ("rename into", "new"),
        ("link out of", "old"),
        ("makedirs", "new"),
        ("numpy.save", "new.npy"),
    ],
)
def test_note_names_the_path(attempts: dict[str, Any], attempt: str, path: str) -> None:
    assert f"was refused a write to {str(Path(attempts['project'], path))!r}." in attempts[attempt]["note"]


@pytest.mark.process
@pytest.mark.parametrize("attempt", ["mkdir", "Path.mkdir", "makedirs"])
def test_refused_directory_says_so_by_itself(attempts: dict[str, Any], attempt: str) -> None:
    assert f"rank {RANK} may not write to the project, only rank 0 may" in attempts[attempt]["text"]


@pytest.mark.process
@pytest.mark.parametrize(("attempt", "outcome"), ALLOWED.items(), ids=ALLOWED)
def test_as_ever(attempts: dict[str, Any], attempt: str, outcome: str) -> None:
    assert attempts[attempt]["type"] == outcome, attempts[attempt]
    assert not attempts[attempt].get("note")


@pytest.mark.process
def test_left_out(attempts: dict[str, Any]) -> None:
    assert attempts["left out"]["value"] == [
        ["torch.save", "left.pt", 2],
        ["torch.save", "sub/left.pt", 1],
        ["torch.save", f"{attempts['outside']}/into/left.pt", 1],
    ]


MAKERS = (
    "os.makedirs('{}', exist_ok=True)",
    "Path('{}').mkdir(parents=True, exist_ok=True)",
    "files.makedirs('{}', True)",
)


@pytest.mark.process
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_directory_of_rank_0_is_waited_for(tmp_path: Path, mechanism: str) -> None:
    """With fsspec, through which Lightning makes its directories, as well."""
    names = [f"run-{number}/ckpt" for number in range(len(MAKERS))]
    steps = "\n".join(
        f"print('asking', flush=True); {maker.format(name)}; print(Path({name!r}).is_dir(), flush=True)"
        for maker, name in zip(MAKERS, names, strict=True)
    )
    script = "from fsspec.implementations.local import LocalFileSystem\nfiles = LocalFileSystem()\n" + steps
    with subprocess.Popen(
        command(script, tmp_path, mechanism), env=environment(), stdout=subprocess.PIPE, text=True
    ) as rank:
        assert rank.stdout
        for name in names:
            assert rank.stdout.readline() == "asking\n"
            (tmp_path / name).mkdir(parents=True)
            assert rank.stdout.readline() == "True\n"


@pytest.mark.process
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_directory_that_rank_0_never_makes(tmp_path: Path, mechanism: str) -> None:
    script = """
        attempt("os", lambda: os.makedirs("never", exist_ok=True))
        attempt("pathlib", lambda: Path("never").mkdir(exist_ok=True))
    """
    outcomes = child(script, tmp_path, mechanism, WAIT_S="0.05")
    for outcome in (outcomes["os"], outcomes["pathlib"]):
        assert outcome["type"] == "PermissionError"
        assert "rank 0 did not make this directory within 0.05 s" in outcome["text"]
        assert f"refused a write to {str(tmp_path / 'never')!r}" in outcome["note"]


@pytest.mark.process
@pytest.mark.skipif(ABI == 0, reason="this kernel has no Landlock that can be used")
def test_what_only_the_kernel_refuses(tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    touch = shutil.which("touch")
    script = f"""
        attempt("command", lambda: subprocess.run([{touch!r}, str(project / "new")], check=True, capture_output=True))
        attempt("beside", lambda: open(project.parent / "new", "w"))
        attempt("started", lambda: subprocess.run([project / "script"]))
    """
    (project / "script").write_text("not executable")
    outcomes = child(script, project, "landlock")
    assert outcomes["command"]["type"] == "CalledProcessError"
    assert f"refused a write to {str(project / 'new')!r}" in outcomes["command"]["note"]
    assert "which is outside the project" in outcomes["beside"]["note"]
    assert outcomes["started"] | {"text": ""} == {"type": "PermissionError", "text": "", "note": None}


def test_rank_0_is_left_alone(tmp_path: Path) -> None:
    before = os.mkdir, os.makedirs, pathlib.Path.mkdir
    guard = writes.WriteGuard()
    guard.install(0, tmp_path, enforced=False)
    assert (os.mkdir, os.makedirs, pathlib.Path.mkdir) == before
    (tmp_path / "written").write_text("yes")
    assert guard.left_out() == []
    assert guard.explain(PermissionError(errno.EACCES, "no", str(tmp_path / "x"))) is None


def test_negative_wait_is_an_error() -> None:
    with pytest.raises(ValueError, match="expected: seconds, 0 or more"):
        writes.WriteGuard(directory_wait_s=-1)


def test_notice_says_what_is_not_held() -> None:
    assert "C++ code and subprocesses" in writes.degraded_notice()


@pytest.fixture
def territory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Territory:
    (tmp_path / "project" / "cache").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "project")
    return Territory.of(RANK, tmp_path / "project", [tmp_path / "project" / "cache"], enforced=True)


def test_what_is_in_the_project(territory: Territory, tmp_path: Path) -> None:
    project = tmp_path / "project"
    (project / "away").symlink_to(tmp_path)
    (tmp_path / "into").symlink_to(project)
    inside = ["x", "a/b/c", b"x", ".", "", project, project / "cache2", tmp_path / "into" / "x", "away/project/x"]
    assert [path for path in inside if not territory.holds(path)] == []
    outside = ["..", "../x", "away/x", "away/../x", tmp_path / "project2", "cache", "cache/x", 3, None, "\0", object()]
    assert [path for path in outside if territory.holds(path)] == []


def test_last_link_is_followed_or_not(territory: Territory, tmp_path: Path) -> None:
    (tmp_path / "project" / "away").symlink_to(tmp_path)
    assert not territory.holds("away")
    assert territory.holds("away", follow=False)
    assert territory.holds("away/", follow=False)


def test_granting_what_is_above_the_project_counts_for_nothing(tmp_path: Path) -> None:
    territory = Territory.of(RANK, tmp_path, [tmp_path, tmp_path.parent, Path("/")], enforced=True)
    assert territory.writable == ()


def chained(outer: Exception, *, cause: Exception | None = None, context: Exception | None = None) -> Exception:
    """``outer`` as after ``raise outer from cause``, or after ``raise outer`` while handling ``context``."""
    outer.__context__ = context
    if cause is not None:
        outer.__cause__ = cause
    return outer


EXPLAINED = {
    "hdf5": OSError("Unable to create file (unable to open file: name = 'x.h5', errno = 13, flags = 13)"),
    "rust": RuntimeError('I/O error: Permission denied (os error 13) at path "{project}/.tmpx"'),
    "arrow": OSError("Failed to open local file '{project}/x'. Detail: [errno 13] Permission denied"),
    "command": subprocess.CalledProcessError(1, "cp", stderr=b"cp: cannot create '{project}/x': Permission denied"),
    "older torch": RuntimeError("File {project}/x.pt cannot be opened."),
    "torch": RuntimeError("[enforce fail at x.cc:1] . open file failed with strerror: Permission denied"),
    "sqlite": sqlite3.OperationalError("attempt to write a readonly database"),
    "cause": chained(ValueError("could not save"), cause=PermissionError(errno.EACCES, "no", "x")),
    "context": chained(ValueError("could not save"), context=PermissionError(errno.EACCES, "no", "x")),
    "group": ExceptionGroup("two", [ValueError("one"), PermissionError(errno.EACCES, "no", "x")]),
    "rename": OSError(errno.EXDEV, "cross", "x", None, "y"),
}
UNEXPLAINED = {
    "in a cache": PermissionError(errno.EACCES, "no", "cache/x"),
    "missing": FileNotFoundError(errno.ENOENT, "no", "x"),
    "immutable": PermissionError(errno.EPERM, "no", "x"),
    "read-only disk": OSError(errno.EROFS, "no", "x"),
    "system": PermissionError(errno.EACCES, "no", "/proc/1/mem"),
    "socket": PermissionError(errno.EACCES, "Permission denied"),
    "two disks": OSError(errno.EXDEV, "cross", "x", None, "/proc/y"),
    "cloud": RuntimeError("403 Permission denied: https://storage.example/project/x for 'someone'"),
    "unrelated": ValueError("x"),
    "elsewhere": RuntimeError("Permission denied: '/etc/shadow'"),
}


def placed(error: BaseException) -> BaseException:
    """The error with the current directory, which is the project, in its text."""
    error.args = tuple(arg.replace("{project}", str(Path.cwd())) if isinstance(arg, str) else arg for arg in error.args)
    if isinstance(error, subprocess.CalledProcessError):
        error.stderr = error.stderr.replace(b"{project}", os.fsencode(Path.cwd()))
    return error


@pytest.mark.parametrize("error", EXPLAINED.values(), ids=EXPLAINED)
def test_explained(territory: Territory, error: Exception) -> None:
    note = territory.explain(placed(error))
    assert note is not None
    assert f"Only rank 0 writes to the project {territory.project!r}" in note


@pytest.mark.parametrize("error", UNEXPLAINED.values(), ids=UNEXPLAINED)
def test_not_explained(territory: Territory, error: Exception) -> None:
    assert territory.explain(placed(error)) is None


def test_suppressed_context_is_not_looked_at(territory: Territory) -> None:
    error = chained(ValueError("other"), context=PermissionError(errno.EACCES, "no", "x"))
    error.__suppress_context__ = True
    assert territory.explain(error) is None


def test_whole_note(territory: Territory) -> None:
    assert territory.explain(PermissionError(errno.EACCES, "no", "out.txt")) == (
        f"rank 3 was refused a write to '{territory.project}/out.txt'. "
        f"Only rank 0 writes to the project '{territory.project}'.\n"
        "to do: guard the write with `if taas.rank() == 0:`,\n"
        "       or run the cell with `--writes all`, which sharded checkpoints need (every rank writes its part)"
    )


@pytest.mark.skipif(os.geteuid() == 0, reason="root is refused nothing by a file's mode")
def test_mode_of_the_file_is_no_refusal_of_ours(territory: Territory) -> None:
    sealed = Path(territory.project, "sealed")
    sealed.touch(mode=0)
    with pytest.raises(PermissionError) as refused:
        sealed.read_text()
    assert territory.explain(refused.value) is None


def test_default_writable(tmp_path: Path) -> None:
    for name in ("hf", "tmp", ".config/matplotlib", ".nv"):
        (tmp_path / name).mkdir(parents=True)
    environ = {"HF_HOME": str(tmp_path / "hf"), "TORCH_HOME": str(tmp_path / "gone"), "TMPDIR": str(tmp_path / "tmp")}
    found = writes.default_writable(environ, tmp_path)
    assert (tmp_path / ".cache").is_dir()
    assert not (tmp_path / "gone").exists()
    expected = [tmp_path / name for name in (".cache", "hf", ".nv", ".config/matplotlib", "tmp")]
    assert [path for path in found if path.is_relative_to(tmp_path) and path.name != ".triton"] == expected


def test_cache_directory_may_be_moved(tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere" / "cache"
    assert moved in writes.default_writable({"XDG_CACHE_HOME": str(moved)}, tmp_path)
    assert moved.is_dir()
    assert not (tmp_path / ".cache").exists()


def test_home_that_cannot_be_written(tmp_path: Path) -> None:
    home = tmp_path / "file"
    home.touch()
    assert not any(path.is_relative_to(home) for path in writes.default_writable({}, home))
