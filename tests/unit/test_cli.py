"""The command `taas`, and each of its findings, also where the machine would have to be broken for it."""

from __future__ import annotations

import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from taas_magic import __version__, cli
from taas_magic.cli import Finding, Verdict

PAGE = Path(__file__).parents[2] / "docs/reference/cli.md"
TORCH: dict[str, Any] = {
    "version": "2.13.0",
    "cuda": "13.0",
    "devices": [],
    "distributed": True,
    "backends": ["gloo", "nccl"],
}


def taas(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "taas_magic.cli", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
        env={**os.environ, **variables},
    )


def verdicts(findings: Iterator[Finding]) -> list[Verdict]:
    return [finding.verdict for finding in findings]


def test_version() -> None:
    done = taas("--version")
    assert (done.returncode, done.stdout) == (0, f"taas {__version__}\n")


@pytest.mark.parametrize("arguments", [(), ("docter",), ("doctor", "--fast")])
def test_wrong_usage_says_what_there_is(arguments: tuple[str, ...]) -> None:
    done = taas(*arguments)
    assert done.returncode == 2
    assert "usage: taas" in done.stderr
    assert not done.stdout


def test_doctor_on_this_machine() -> None:
    """The tests run cells here, so nothing that prevents them may be found."""
    done = taas("doctor")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "FAIL" not in done.stdout
    assert re.search(r"^ok    torch \d", done.stdout, re.MULTILINE)
    assert done.stdout.endswith("\ncells can run here\n")
    assert not done.stderr


def test_doctor_where_nothing_can_be_made(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 120)
    long.mkdir()
    done = taas("doctor", TMPDIR=str(long))
    assert done.returncode == 1
    assert "FAIL  no socket can be made" in done.stdout
    assert "to do: set TMPDIR to a short local path" in done.stdout
    assert done.stdout.endswith("\n1 thing to put right\n")


def test_torch_that_cannot_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.13: cannot open shared object file')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    answer = cli.ask_torch()
    assert answer == "ImportError: libcudart.so.13: cannot open shared object file"
    (finding,) = cli._torch(answer)
    assert finding.verdict is Verdict.FAIL
    assert "libcudart" in str(finding)
    assert "to do: pip install torch" in str(finding)


def test_torch_that_kills_its_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("import os; os._exit(7)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert cli.ask_torch() == "its process ended with code 7"


def test_torch_without_what_ranks_need() -> None:
    assert verdicts(cli._torch(TORCH | {"distributed": False})) == [Verdict.FAIL]
    assert verdicts(cli._torch(TORCH | {"backends": ["nccl"]})) == [Verdict.FAIL]


def test_devices() -> None:
    found = cli._devices(TORCH | {"devices": ["H200", "A100", "H200"]})
    assert (found.verdict, found.text) == (Verdict.OK, "2 x H200, 1 x A100")
    assert cli._devices(TORCH | {"devices": ["H200"], "backends": ["gloo"]}).verdict is Verdict.FAIL
    assert cli._devices(TORCH).verdict is Verdict.NOTE


def test_what_the_system_does_not_offer() -> None:
    def refuse() -> None:
        raise PermissionError(1, "Operation not permitted")

    finding = cli._works("memory files", refuse, "use another kernel")
    assert str(finding) == ("FAIL  no memory files: [Errno 1] Operation not permitted\n      to do: use another kernel")


def test_few_open_files_are_noted() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(512, hard), hard))
    try:
        finding = cli._descriptors()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert finding.verdict is Verdict.NOTE
    assert "ulimit -n 4096" in finding.do


@pytest.mark.parametrize(
    ("function", "name", "value", "words"),
    [
        (cli._landlock, "landlock.abi_version", lambda: 0, "no Landlock"),
        (cli._memory, "available_memory_bytes", lambda: 2**30, "1.0 GiB of memory free"),
        (cli._shared_memory, "_SHM", "/nowhere", "no /nowhere"),
        (cli._shared_memory, "_SMALL_SHM_BYTES", 2**60, "may run out"),
    ],
)
def test_what_is_scarce_is_noted_with_what_to_do(
    function: Callable[[], Finding], name: str, value: Any, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine cannot be had in these states, so what it says of itself is replaced."""
    monkeypatch.setattr(f"taas_magic.cli.{name}", value)
    finding = function()
    assert finding.verdict is Verdict.NOTE
    assert words in finding.text
    assert finding.do


def test_every_command_is_documented() -> None:
    page = PAGE.read_text()
    usage = taas("--help").stdout
    commands = re.findall(r"^    (\w+) ", usage, re.MULTILINE)
    assert commands
    assert set(re.findall(r"^## `taas (--?\w+|\w+)`", page, re.MULTILINE)) == {*commands, "--version"}


@pytest.mark.skipif(shutil.which("taas", path=str(Path(sys.executable).parent)) is None, reason="run from the sources")
def test_the_installed_command() -> None:
    done = subprocess.run([Path(sys.executable).parent / "taas", "--version"], capture_output=True, check=True)
    assert done.stdout.decode() == f"taas {__version__}\n"
