"""The runner as others meet it: who may speak to it, what it withstands, how it looks in ``ps``, and that it goes."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Self, get_args

import msgspec
import pytest
import zmq
from process.kernel import KernelGoneError, Notebook, warm_notebook
from process.watch import await_condition, await_gone, below, only, title, titled

from taas_magic import wire, wire_base, wire_data
from taas_magic.versions import own_versions

SOON_S = 10.0
#: What is promised where the kernel dies.
GONE_S = 5.0
#: A cell that says when it has begun, and ends when there is a file.
WAITS = """
#pragma taas --gpus 2
import time
from pathlib import Path
print("waiting", flush=True)
while not Path("go").exists():
    time.sleep(0.01)
went = "well"
"""


def runner_directories() -> set[Path]:
    return set(Path(tempfile.gettempdir()).glob("taas-*"))


@pytest.fixture(scope="module")
def notebook(private_temp: Path, started_once: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    # Where the system has a runtime directory, the runner's would lie there.
    with warm_notebook(tmp_path_factory.mktemp("runner"), {"XDG_RUNTIME_DIR": ""}) as notebook:
        yield notebook


@pytest.fixture
def directory(notebook: Notebook) -> Path:
    (found,) = runner_directories()
    return found


@pytest.fixture
def stranger(directory: Path) -> Iterator[Stranger]:
    """Another connection to the runner's socket."""
    with Stranger(directory / "runner.sock") as stranger:
        yield stranger


class Stranger:
    """Speaks to a runner from outside its notebook."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> Self:
        self.socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.connect(f"ipc://{self._path}")
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close(linger=0)

    def say(self, message: wire_base.Message) -> None:
        self.socket.send(msgspec.msgpack.encode(message))

    def hear(self) -> wire.Denied | wire.Welcome:
        assert self.socket.poll(int(SOON_S * 1000)), "the runner does not answer"
        answer = msgspec.msgpack.decode(self.socket.recv(), type=wire.ToKernel)
        assert isinstance(answer, wire.Denied | wire.Welcome)
        return answer

    def await_last_answer(self) -> None:
        """Wait until the runner has taken all that was sent before."""
        self.say(wire.Hello("the last one", own_versions()))
        while "wrong token" not in getattr(self.hear(), "reason", ""):
            pass


@pytest.fixture
def run(notebook: Notebook) -> Iterator[None]:
    """A run that is active during the test, and has to end well after it."""
    notebook.start(WAITS)
    notebook.wait_for_output("waiting")
    yield
    go = notebook.directory / "go"
    go.touch()
    notebook.wait(SOON_S).ok()
    go.unlink()
    assert notebook.run("went").result == "'well'"
    notebook.run("del went").ok()


# -- who may speak ---------------------------------------------------------------------------------------------------


def test_the_directory_is_private(directory: Path) -> None:
    status = directory.stat()
    assert stat.S_IMODE(status.st_mode) == 0o700
    assert status.st_uid == os.getuid()
    assert stat.S_ISSOCK((directory / "runner.sock").stat().st_mode)


def requests(run_id: str) -> list[wire_base.Message]:
    """One of each that a kernel may send once it has said the token."""
    memory = wire_base.MemoryFile(os.getpid(), 0, 0)
    task = wire.CellTask(run_id, "pass", 1, 1, "/", [], "rank0", {}, [], [])
    return [
        wire.Submit(task, memory, None, 1.0, None),
        wire.Interrupt(run_id, 3),
        wire.Abandon(run_id),
        wire.OutputTaken(run_id, 1),
        wire.HomeTaken(run_id),
        wire.HomeRefused(run_id, []),
        wire.ResultTaken(run_id, 0),
        wire.InputReply(run_id, 0, "x"),
        wire.ReleaseKept("run-x"),
        wire.ReadLog(),
        wire.ReadStatus(),
        wire.AttachRun(run_id),
        wire.Preload(["antigravity"], {}),
        wire_data.PrepareDelivery(wire_data.DeliveryTask(run_id, 1, 1, [], {}, 0, 0, 0.0), memory),
        wire_data.CancelDelivery(run_id),
        wire.Shutdown(),
    ]


def test_every_request_is_listed_here() -> None:
    assert {type(request) for request in requests("")} == set(get_args(wire.ToRunner)) - {wire.Hello}


def test_who_does_not_say_the_token_is_refused(run: None, stranger: Stranger, directory: Path) -> None:
    (run_directory,) = directory.glob("run-*")
    run_id = run_directory.name.removeprefix("run-")
    for request in requests(run_id):
        stranger.say(request)
        assert stranger.hear() == wire.Denied("not authorised: say the token first"), request
    stranger.say(wire.Hello("", own_versions()))
    assert stranger.hear() == wire.Denied("not authorised: wrong token")
    stranger.say(wire.Shutdown())
    assert stranger.hear() == wire.Denied("not authorised: say the token first")


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"protocol": 9999}, f"protocol 9999 (taas {own_versions().taas}) and {own_versions().protocol}"),
        ({"python": "3.99.1"}, f"python 3.99.1 and {own_versions().python}"),
        ({"torch": "1.0.0"}, f"torch 1.0.0 and {own_versions().torch}"),
        ({"cloudpickle": "0.1"}, f"cloudpickle 0.1 and {own_versions().cloudpickle}"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_version_that_differs_is_named(
    notebook: Notebook, stranger: Stranger, changed: dict[str, object], named: str
) -> None:
    token = notebook.run(
        "from taas_magic.notebook import extension\nnext(iter(extension._extensions.values())).session._runner._token"
    ).result
    assert token is not None
    stranger.say(wire.Hello(token.strip("'"), msgspec.structs.replace(own_versions(), **changed)))
    answer = stranger.hear()
    assert isinstance(answer, wire.Denied)
    assert answer.reason.startswith(f"versions differ: {named}")
    # Who was refused has not taken the notebook's place.
    notebook.run("#pragma taas --gpus 1\npass").ok()


def test_an_upgrade_under_a_running_kernel_is_told_in_the_notebook(tmp_path: Path) -> None:
    """The runner, started later, finds another torch than the kernel did."""
    newer = tmp_path / "newer" / "torch-99.1.0.dist-info"
    newer.mkdir(parents=True)
    (newer / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 99.1.0\n")
    with Notebook(tmp_path) as victim:
        victim.run(f"import os\nos.environ['PYTHONPATH'] = {str(newer.parent)!r} + ':' + os.environ['PYTHONPATH']").ok()
        victim.run("%load_ext taas_magic").ok()
        cell = victim.run("#pragma taas --gpus 1\nreached = True")
        assert cell.error_name == "VersionMismatchError", cell.output
        assert f"torch {own_versions().torch} and 99.1.0 (kernel, runner)" in cell.error_value
        assert "restart the kernel" in cell.error_value


# -- what it withstands ----------------------------------------------------------------------------------------------


def garbage(rng: random.Random) -> list[bytes]:
    """Frames that are no message, or nearly one."""
    whole = msgspec.msgpack.encode(rng.choice(requests("x")))
    kind = rng.randrange(5)
    if kind == 0:
        return [rng.randbytes(rng.randrange(200))]
    if kind == 1:
        return [whole[: rng.randrange(len(whole))]]
    if kind == 2:
        flipped = bytearray(whole)
        flipped[rng.randrange(len(flipped))] ^= 1 << rng.randrange(8)
        return [bytes(flipped)]
    if kind == 3:
        return [whole, whole]
    return [rng.randbytes(rng.randrange(50)) for _ in range(rng.randrange(1, 6))]


def test_garbage_disturbs_nothing(run: None, stranger: Stranger) -> None:
    rng = random.Random(7)
    for _ in range(3000):
        stranger.socket.send_multipart(garbage(rng))
    stranger.await_last_answer()


def test_oversized_messages_disturb_nothing(run: None, stranger: Stranger) -> None:
    stranger.socket.send(bytes(64 * 2**20))
    # An array that claims four billion elements, and a map of which nothing follows.
    for claim in (b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff"):
        stranger.socket.send(claim)
    stranger.socket.send(b"\x91" * 100_000)  # nested deeper than any stack
    stranger.await_last_answer()


def test_half_a_handshake_disturbs_nothing(run: None, stranger: Stranger, directory: Path) -> None:
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48)
    rng = random.Random(7)
    for number in range(200):
        with socket.socket(socket.AF_UNIX) as raw:
            raw.connect(str(directory / "runner.sock"))
            raw.sendall(greeting[: rng.randrange(65)] if number % 2 else rng.randbytes(64))
    stranger.await_last_answer()


# -- how it looks, and that it goes ----------------------------------------------------------------------------------


def test_processes_say_what_they_are(run: None, notebook: Notebook) -> None:
    runner = only(titled(notebook.pid, "taas: runner"))
    expected = {"taas: runner", "taas: zygote", "taas: agent", "taas: rank 0", "taas: rank 1"}
    await_condition(lambda: expected <= {title(pid) for pid in below(notebook.pid)}, "the titles of all processes")
    titles = {title(pid) for pid in below(notebook.pid)}
    assert len(titled(runner, "taas: run ")) == 1
    assert all(each.startswith("taas: ") for each in titles), titles
    names = {Path(f"/proc/{pid}/comm").read_text().strip() for pid in below(notebook.pid)}
    assert {"taas: runner", "taas: rank 0", "taas: rank 1"} <= names  # what top shows


def test_unloading_leaves_nothing(notebook: Notebook) -> None:
    ours = below(notebook.pid)
    assert ours
    notebook.run("%unload_ext taas_magic").ok()
    await_gone(ours, SOON_S)
    assert runner_directories() == set()
    # A pragma is a comment again, and the magic is unknown.
    assert notebook.run("#pragma taas --gpus 2\nimport os\n'RANK' in os.environ").ok().result == "False"
    assert "taas" in notebook.run("%taas").output
    assert notebook.run("'taas' in get_ipython().magics_manager.magics['line']").result == "False"
    hooks = notebook.run(
        "shell = get_ipython()\n"
        "hooks = [*shell.input_transformers_cleanup, *sum(shell.events.callbacks.values(), [])]\n"
        "[hook for hook in hooks if 'taas' in getattr(hook, '__module__', '')]"
    )
    assert hooks.ok().result == "[]"
    threads = notebook.run(
        "import threading\n[thread.name for thread in threading.enumerate() if 'taas' in thread.name]"
    )
    assert threads.result == "[]"


@pytest.mark.parametrize("end", ["%unload_ext taas_magic", "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)"])
def test_an_end_right_after_the_beginning_leaves_nothing(private_temp: Path, tmp_path: Path, end: str) -> None:
    """The zygote is still importing then."""
    before = runner_directories()
    with Notebook(tmp_path, {"XDG_RUNTIME_DIR": ""}) as victim:
        victim.run("%load_ext taas_magic").ok()
        await_condition(lambda: bool(titled(victim.pid, "taas: zygote")), "a zygote")
        ours = below(victim.pid)
        victim.start(end)
        await_gone(ours, GONE_S)
        await_condition(lambda: runner_directories() == before, "the end of the runner's directory")
        with contextlib.suppress(KernelGoneError):
            victim.wait().ok()


def test_a_restart_of_the_kernel_leaves_nothing(private_temp: Path, tmp_path: Path) -> None:
    before = runner_directories()
    with Notebook(tmp_path, {"XDG_RUNTIME_DIR": ""}, extension=True) as victim:
        victim.start(WAITS)
        victim.wait_for_output("waiting", 60)
        old = below(victim.pid)
        assert runner_directories() > before
        victim.restart()
        await_gone(old, SOON_S)
        await_condition(lambda: runner_directories() == before, "the end of the runner's directory")
        assert below(victim.pid) == []
        assert victim.run("1 + 1").result == "2"
