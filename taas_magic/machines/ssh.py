"""Starts a process on a machine over the system's OpenSSH, and keeps hold of it.

What is started gets an *order*, one line of JSON, on its standard input, and says an *answer*, one line of JSON, on its
standard output. Whatever a login prints before and around that goes to the log, and so does all that comes later. The
process ends when its standard input does: when it is closed here, when ssh is killed, when this process is. So nothing
stays behind on the machine, and nothing there has to be found again to end it.

How to get to a machine is the user's affair and stands in their ssh configuration: aliases, keys, agent, jump hosts.
Only what a notebook cannot do is set here: there is no terminal, so nothing can be asked. Host keys are verified as the
configuration says.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import secrets
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol, TypeVar

import taas_magic
from taas_magic.machines.ssh_failures import MachineStartError, explain_missing, explain_program, explain_ssh, telling
from taas_magic.machines.ssh_output import Output, read_all
from taas_magic.units import format_seconds

_RUNNER = ("-P", "-m", "taas_magic.runner.machine", "--from-stdin")
_LOCAL_HOSTS = ("127.0.0.1", "localhost")
#: What ssh exits with when it is its own failure, or a signal killed what it had started.
_SSH_FAILED = 255
#: A pipe holds it whole, so that writing it does not wait until ssh has connected.
_MAX_ORDER_BYTES = 32 * 1024
_GRACE_S = 5.0
#: How long processes have to end by themselves where the user waits for an interrupt.
_INTERRUPTED_GRACE_S = 1.0
#: How long an ssh that was told to end has for it.
_TERMINATED_S = 2.0

#: The standard inputs of all processes. A fork of this process closes its copies: while it had them, closing them here
#: would end nothing.
_inputs: weakref.WeakSet[IO[bytes]] = weakref.WeakSet()


def _close_inputs() -> None:
    for stdin in list(_inputs):
        stdin.close()


os.register_at_fork(after_in_child=_close_inputs)


class Machine(Protocol):
    """What has to be known of a machine; ``host`` may be an alias of the ssh configuration."""

    @property
    def name(self) -> str:
        """What users call it."""

    @property
    def host(self) -> str:
        """Where ssh is to go."""

    @property
    def user(self) -> str | None:
        """Who logs in; the ssh configuration says it where this does not."""

    @property
    def port(self) -> int | None:
        """The port of sshd; the ssh configuration says it where this does not."""


AnyMachine = TypeVar("AnyMachine", bound=Machine)


@dataclass(frozen=True)
class SshOptions:
    """How processes are started on machines.

    Attributes:
        config_file: In place of the user's ssh configuration (``ssh -F``).
        python: The Python there, a path or a name; None: ``python3``, on this machine this process's own.
        command: What to start there in place of a runner.
        tunnel: Have the process listen on a Unix socket, and forward a socket of this machine to it.
        connect_timeout_s: How long a connection may take.
        alive_interval_s: How often to ask a silent machine whether it is there; ssh gives up after three times
            (``ServerAliveCountMax``).
        environment: Of a process on this machine; None: this process's own.
    """

    config_file: Path | None = None
    python: str | None = None
    command: tuple[str, ...] = ()
    tunnel: bool = False
    connect_timeout_s: float = 10.0
    alive_interval_s: int = 5
    environment: Mapping[str, str] | None = None

    def command_on(self, machine: Machine) -> tuple[str, ...]:
        """What is started on a machine, word by word."""
        default = sys.executable if is_this_machine(machine) else "python3"
        return self.command or (self.python or default, *_RUNNER)


@dataclass(frozen=True)
class _Tunnel:
    """A Unix socket there, and the one of this machine that leads to it.

    Attributes:
        remote: The socket there. Its directory cannot be guessed, and the process makes it, with mode 0700.
        local: The socket here; the same as ``remote`` where the process is on this machine.
        directory: The private directory that ``local`` is in, if it is ours.
    """

    remote: str
    local: str
    directory: Path | None

    @classmethod
    def make(cls, *, is_local: bool) -> _Tunnel:
        # Not below a TMPDIR: the machine may have another one, and a socket's path may have 107 characters.
        remote = f"/tmp/taas-{secrets.token_hex(16)}/runner.sock"  # noqa: S108 - unguessable, and made privately
        if is_local:
            return cls(remote, remote, None)
        base = os.environ.get("XDG_RUNTIME_DIR")
        parent = base if base and os.access(base, os.W_OK) and len(base) < 60 else None
        directory = Path(tempfile.mkdtemp(prefix="taas-", dir=parent))
        return cls(remote, str(directory / "tunnel.sock"), directory)

    def remove(self) -> None:
        if self.directory is not None:
            shutil.rmtree(self.directory, ignore_errors=True)


# -- what is run -------------------------------------------------------------------------------------------------------


def is_this_machine(machine: Machine) -> bool:
    """Whether a machine is this one, so that no ssh is needed; with a user or port it is a matter of ssh again."""
    return machine.host in _LOCAL_HOSTS and not machine.user and not machine.port


def _destination(machine: Machine, options: SshOptions) -> list[str]:
    return [
        *(["-F", str(options.config_file)] if options.config_file else []),
        *(["-p", str(machine.port)] if machine.port else []),
        *(["-l", machine.user] if machine.user else []),
        # What follows is no option, whatever a machine is called.
        "--",
        machine.host,
    ]


def _ssh_command(machine: Machine, options: SshOptions, tunnel: _Tunnel | None, timeout_s: float) -> list[str]:
    settings = {
        "BatchMode": "yes",
        # Over before ours is, so that ssh says what was the matter.
        "ConnectTimeout": max(1, math.floor(min(options.connect_timeout_s, timeout_s - 1))),
        "ServerAliveInterval": options.alive_interval_s,
        # ERROR would keep "Timeout, server not responding" back, QUIET everything; DEBUG would bury it.
        "LogLevel": "INFO",
        # A connection that is shared already is used; but the one made here is not left behind for others to use.
        "ControlMaster": "no",
        # There is a command; a configuration that has one, too, would be refused.
        "RemoteCommand": "none",
    }
    if tunnel:
        # Only then: a forward of the user's own may well be open in another ssh.
        settings |= {"ExitOnForwardFailure": "yes", "StreamLocalBindUnlink": "yes"}
    return [
        "ssh",
        "-T",
        *(word for name, value in settings.items() for word in ("-o", f"{name}={value}")),
        *(["-L", f"{tunnel.local}:{tunnel.remote}"] if tunnel else []),
        *_destination(machine, options),
        " ".join(map(_quoted, options.command_on(machine))),
    ]


def _quoted(word: str) -> str:
    """A word for the shell there, which is to expand a ``~`` at its start."""
    home, slash, rest = word.partition("/")
    return f"{home}/{shlex.quote(rest)}" if slash and re.fullmatch(r"~[\w.-]*", home) else shlex.quote(word)


def _local_command(machine: Machine, options: SshOptions) -> list[str]:
    program, *arguments = options.command_on(machine)
    # As the shell of another machine does. A path would lose the dot of "./python".
    return [os.path.expanduser(program), *arguments]  # noqa: PTH111


def _local_environment(options: SshOptions) -> dict[str, str]:
    environment = dict(os.environ if options.environment is None else options.environment)
    # The package may be imported from a checkout that only this process's sys.path knows. Last, so that it changes
    # nothing about where anything else is found.
    paths = [environment.get("PYTHONPATH", ""), str(Path(taas_magic.__file__).resolve().parent.parent)]
    return environment | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


# -- the process -------------------------------------------------------------------------------------------------------


class RemoteProcess:
    """A process on a machine, by the ssh that holds it; see :func:`start`.

    Attributes:
        machine: Where it is.
        local_address: Where it can be reached on this machine, ``ipc://...``; None without a tunnel.
    """

    def __init__(
        self,
        machine: Machine,
        process: subprocess.Popen[bytes],
        order: Mapping[str, Any],
        options: SshOptions,
        tunnel: _Tunnel | None,
    ) -> None:
        self.machine = machine
        self.local_address = f"ipc://{tunnel.local}" if tunnel else None
        self._tunnel = tunnel
        self._options = options
        self._process = process
        self._output = Output(order)
        assert process.stdin
        assert process.stdout
        assert process.stderr
        # Held here only: where this object is dropped, the pipe is closed, and the process there ends. A Popen that is
        # dropped is kept by its module, and the thread does not know this object.
        self._stdin, process.stdin = process.stdin, None
        _inputs.add(self._stdin)
        streams = {"stdout": process.stdout, "stderr": process.stderr}
        self._reader = threading.Thread(
            target=read_all,
            args=(os.pidfd_open(process.pid), streams, self._output),
            name=f"taas: log of {machine.name}",
            daemon=True,
        )
        self._reader.start()
        with contextlib.suppress(BrokenPipeError):  # it has ended already, and the reader knows why
            self._stdin.write(json.dumps(order).encode() + b"\n")

    @property
    def answer(self) -> dict[str, Any]:
        """What it has answered, without the marker."""
        assert self._output.answer is not None, "there is no answer before `start` has returned"
        return self._output.answer

    @property
    def pid(self) -> int:
        """Of the process on this machine: ssh's, if there is one."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether the connection stands, and the process runs there."""
        return self._process.poll() is None

    @property
    def exit_code(self) -> int | None:
        """What it has ended with (255 where the connection was lost); None while it is alive."""
        return self._process.poll()

    def log_tail(self, num_lines: int = 15) -> str:
        """The last lines that it, the login before it and ssh have written."""
        return "\n".join(self._output.tail(num_lines))

    def last_words(self) -> str:
        """What ssh or the process has said last, in one line; "" where it has said nothing."""
        return telling(self._output.errors() or self._output.tail(1))

    def close(self, grace_s: float = _GRACE_S) -> None:
        """End it: close its standard input, wait, and end ssh if that was to no avail. Can be called again.

        Args:
            grace_s: How long it has to end by itself.
        """
        close_all([self], grace_s)

    # -- for the functions of this module ------------------------------------------------------------------------

    def _await_answer(self, deadline: float, timeout_s: float) -> MachineStartError | None:
        """Wait for the answer; why there is none, if there is none."""
        self._output.settled.wait(max(0.0, deadline - time.monotonic()))
        if self._output.answer is not None:
            return None
        explanation = self._explain_end() if self._output.settled.is_set() else self._explain_silence(timeout_s)
        return MachineStartError.on(self.machine.name, *explanation)

    def _explain_end(self) -> tuple[str, str]:
        exit_code = self._process.wait()  # the reader has seen it end
        errors = self._output.errors()
        if exit_code == _SSH_FAILED and not is_this_machine(self.machine):
            return explain_ssh(errors, host=self.machine.host, by_hand=self._by_hand())
        return explain_program(self._options.command_on(self.machine), exit_code, errors or self._output.tail(1))

    def _explain_silence(self, timeout_s: float) -> tuple[str, str]:
        said = f"; the last words were: {self.last_words()}" if self.last_words() else ""
        command = " ".join(self._options.command_on(self.machine))
        see = f"`{command}` says" if is_this_machine(self.machine) else f"`{self._by_hand()}` in a terminal does"
        return f"no answer within {format_seconds(timeout_s)}{said}", f"see what {see}"

    def _by_hand(self) -> str:
        """What a user can type to see for themselves."""
        destination = [word for word in _destination(self.machine, self._options) if word != "--"]
        return shlex.join(["ssh", *destination, "true"])

    def _hang_up(self) -> None:
        with contextlib.suppress(OSError):
            self._stdin.close()

    def _join(self, until: float) -> None:
        self._reader.join(max(0.0, until - time.monotonic()))

    def _clean_up(self) -> None:
        """What has to be done once it has ended."""
        self._process.wait()
        self._reader.join()
        if self._tunnel is not None:
            self._tunnel.remove()


def close_all(processes: Iterable[RemoteProcess], grace_s: float = _GRACE_S) -> None:
    """End processes as :meth:`RemoteProcess.close` does, all at once.

    Args:
        processes: Those to end.
        grace_s: How long they have to end by themselves, all together.
    """
    processes = list(processes)
    for process in processes:
        process._hang_up()
    try:
        _join_all(processes, grace_s)
    finally:  # after an interrupt, too
        for process in processes:
            process._process.terminate()
        try:
            _join_all(processes, _TERMINATED_S)
        finally:
            for process in processes:
                process._process.kill()
                process._clean_up()


def leave_all(processes: Iterable[RemoteProcess]) -> None:
    """Let go of processes that decide for themselves whether they end with their standard input."""
    for process in processes:
        process._hang_up()
        if not is_this_machine(process.machine):
            # Only the ssh; what it has started finds its input closed.
            process._process.terminate()
            process._clean_up()


def _join_all(processes: list[RemoteProcess], timeout_s: float) -> None:
    until = time.monotonic() + timeout_s
    for process in processes:
        process._join(until)


# -- starting ----------------------------------------------------------------------------------------------------------


def start(
    machine: Machine, order: Mapping[str, Any], *, options: SshOptions | None = None, timeout_s: float
) -> RemoteProcess:
    """Start a process on a machine, and wait for its answer.

    The order goes out with a ``marker``, a random word that the answer has to repeat; with a tunnel also with
    ``listen``, an ``ipc://`` address: the process makes that socket's directory, with mode 0700, and listens there.

    Args:
        machine: Where. This machine needs no ssh; see :func:`is_this_machine`.
        order: What the process is told: plain values, as JSON has them.
        options: How.
        timeout_s: How long all of it may take.

    Raises:
        MachineStartError: if there is no answer: the machine cannot be reached, does not let us in, has no taas_magic,
            or is silent.
        ValueError: if the order is larger than what fits a pipe.
    """
    started, failed = _start([machine], order, options or SshOptions(), timeout_s)
    for _, error in failed:
        raise error
    return started[0]


def start_all(
    machines: Sequence[AnyMachine], order: Mapping[str, Any], *, options: SshOptions | None = None, timeout_s: float
) -> tuple[list[RemoteProcess], list[tuple[AnyMachine, str]]]:
    """Start a process on each machine, all at once, as :func:`start` does.

    An interrupt ends all that was started.

    Returns:
        What was started, and the machines where nothing was, each with the reason in one line.

    Raises:
        ValueError: if the order is larger than what fits a pipe.
    """
    started, failed = _start(machines, order, options or SshOptions(), timeout_s)
    return started, [(machine, error.reason) for machine, error in failed]


def _start(
    machines: Sequence[AnyMachine], order: Mapping[str, Any], options: SshOptions, timeout_s: float
) -> tuple[list[RemoteProcess], list[tuple[AnyMachine, MachineStartError]]]:
    deadline = time.monotonic() + timeout_s
    launched: list[tuple[AnyMachine, RemoteProcess]] = []
    failed: list[tuple[AnyMachine, MachineStartError]] = []
    started, lost = [], []
    try:
        for machine in machines:
            try:
                launched.append((machine, _launch(machine, order, options, timeout_s)))
            except MachineStartError as error:
                failed.append((machine, error))
        for machine, process in launched:
            failure = process._await_answer(deadline, timeout_s)
            if failure is None:
                started.append(process)
            else:
                failed.append((machine, failure))
                lost.append(process)
    except BaseException:
        close_all([process for _, process in launched], _INTERRUPTED_GRACE_S)
        raise
    close_all(lost, grace_s=0)
    return started, failed


def _launch(machine: Machine, order: Mapping[str, Any], options: SshOptions, timeout_s: float) -> RemoteProcess:
    size_bytes = len(json.dumps(order))
    if size_bytes > _MAX_ORDER_BYTES:
        raise ValueError(f"an order may have {_MAX_ORDER_BYTES} bytes, this one has {size_bytes}")
    is_local = is_this_machine(machine)
    tunnel = _Tunnel.make(is_local=is_local) if options.tunnel else None
    sent = {**order, "marker": secrets.token_hex(16)}
    if tunnel is not None:
        sent["listen"] = f"ipc://{tunnel.remote}"
    command = _local_command(machine, options) if is_local else _ssh_command(machine, options, tunnel, timeout_s)
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            # A jump host's ssh is not told about BatchMode.
            env=_local_environment(options) if is_local else {**os.environ, "SSH_ASKPASS_REQUIRE": "never"},
            # Jupyter interrupts the kernel's whole process group; and there is to be no terminal.
            start_new_session=True,
        )
    except OSError as error:
        if tunnel is not None:
            tunnel.remove()
        raise MachineStartError.on(machine.name, *explain_missing(command[0], error)) from None
    return RemoteProcess(machine, process, sent, options, tunnel)
