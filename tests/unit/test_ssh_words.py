"""What is made of the words of ssh and of programs on other machines: the answer, the log, and reasons of failures."""

from __future__ import annotations

import json

import pytest

from taas_magic.machines.ssh_failures import MachineStartError, explain_program, explain_ssh, telling
from taas_magic.machines.ssh_output import Output

ORDER = {"marker": "c0ffee", "keys": ("a", "b")}
ANSWER = {"marker": "c0ffee", "address": "tcp://h:1"}
BY_HAND = "ssh node1 true"

#: What ssh writes (OpenSSH 9.2), the line that is shown, and a word of what to do.
SSH_WORDS = [
    ("node1: Permission denied (publickey,password).", "node1: Permission denied (publickey,password).", "ssh-add"),
    ("ssh: connect to host node1 port 22: Connection refused", None, "sshd"),
    ("ssh: Could not resolve hostname node1: Name or service not known", None, "spelled"),
    ("ssh: connect to host 10.0.0.1 port 22: Connection timed out", None, BY_HAND),
    ("Timeout, server 10.0.0.1 not responding.", None, BY_HAND),
    (
        "No ED25519 host key is known for h.\nHost key verification failed.",
        "Host key verification failed.",
        "fingerprint",
    ),
    (
        "@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @\nHost key verification failed.",
        "Host key verification failed.",
        "ssh-keygen -R node1",
    ),
    (
        "channel 0: open failed: connect failed: Connection refused\nstdio forwarding failed",
        "channel 0: open failed: connect failed: Connection refused",
        "sshd",
    ),
    (
        "ssh: connect to host jump port 22: Connection refused\nConnection closed by UNKNOWN port 65535",
        "ssh: connect to host jump port 22: Connection refused",
        "sshd",
    ),
    ("one\nkex_exchange_identification: Connection closed by remote host", "one", BY_HAND),
    (
        "bind [127.0.0.1]:8888: Address already in use\nCould not request local forwarding.",
        "Could not request local forwarding.",
        "LocalForward",
    ),
    ("Authorised users only\nsomething new", "something new", BY_HAND),
]


@pytest.mark.parametrize(("words", "shown", "remedy"), SSH_WORDS)
def test_what_ssh_says_is_shown_with_what_to_do(words: str, shown: str | None, remedy: str) -> None:
    found, do = explain_ssh(words.splitlines(), host="node1", by_hand=BY_HAND)
    assert found == (shown or words)
    assert remedy in do


def test_an_ssh_that_says_nothing_is_explained_too() -> None:
    found, do = explain_ssh([], host="node1", by_hand=BY_HAND)
    assert found
    assert BY_HAND in do


@pytest.mark.parametrize(
    ("exit_code", "words", "shown", "remedy"),
    [
        (127, "bash: line 1: py: command not found", "`py` cannot be run there (bash: line 1: py: com", "python = "),
        (126, "bash: line 1: py: Permission denied", "`py` cannot be run there", "python = "),
        (2, "Unknown option: -P\nusage: py [option]", "older than Python 3.11", "python = "),
        (1, "py: Error while finding ... (ModuleNotFoundError: No module named 'taas_magic')", "no taas_magic", "pip"),
        (1, "py: No module named taas_magic.runner.machine", "no taas_magic (py: No module named", "--upgrade"),
        (1, "Traceback ...\nModuleNotFoundError: No module named 'msgspec'", "no msgspec", "py -m pip install"),
        (-9, "", "`py` was killed by signal 9 before it answered", "`py -m it`"),
        (3, "one\ntwo", "`py` exited with code 3 before it answered (two)", "`py -m it`"),
    ],
)
def test_a_program_that_ends_early_is_explained(exit_code: int, words: str, shown: str, remedy: str) -> None:
    found, do = explain_program(["py", "-m", "it"], exit_code, words.splitlines())
    assert shown in found
    assert remedy in do


def test_the_error_has_a_text_for_one_machine_and_a_line_among_several() -> None:
    error = MachineStartError.on("node1", "it is off", "turn it on")
    assert str(error) == "machine 'node1': it is off\nto do: turn it on"
    assert error.reason == "it is off (to do: turn it on)"
    assert error.machine_name == "node1"


def test_the_last_words_are_those_that_tell() -> None:
    assert telling([]) == ""
    assert telling(["it broke", "Killed by signal 15."]) == "it broke"
    assert telling(["Killed by signal 15."]) == "Killed by signal 15."


def line(value: object) -> bytes:
    return json.dumps(value).encode() + b"\n"


def test_the_answer_is_found_wherever_it_stands() -> None:
    output = Output(ORDER)
    output.feed("stdout", b'{"motd": 1}\r\nc0ffee?\r\n{' + line(ORDER) + b"> ")
    assert not output.settled.is_set()
    for byte in line(ANSWER):
        output.feed("stdout", bytes([byte]))
    assert output.settled.is_set()
    assert output.answer == {"address": "tcp://h:1"}
    assert output.tail(9) == ['{"motd": 1}', "c0ffee?", "{" + json.dumps(ORDER), ">"]


def test_there_is_one_answer_and_it_comes_on_stdout() -> None:
    output = Output(ORDER)
    output.feed("stderr", line(ANSWER))
    assert output.answer is None
    output.feed("stdout", line({"marker": "c0ffee", "n": 1}) + line({"marker": "c0ffee", "n": 2}))
    assert output.answer == {"n": 1}
    assert len(output.tail(9)) == 2


def test_lines_of_both_streams_stay_whole() -> None:
    output = Output(ORDER)
    output.feed("stdout", b"out, fir")
    output.feed("stderr", b"error\n")
    output.feed("stdout", b"st half\nlast \xff")
    output.end()
    assert output.tail(9) == ["error", "out, first half", "last \N{REPLACEMENT CHARACTER}"]
    assert output.errors() == ["error"]
    assert output.settled.is_set()


def test_a_flood_takes_little_memory() -> None:
    output = Output(ORDER)
    for _ in range(40):
        output.feed("stdout", bytes(1024 * 1024))
    for _ in range(5000):
        output.feed("stdout", b"a line\n")
    assert len(output.tail(10_000)) == 1000
    output.feed("stdout", b"x" * 100_000 + b"\n")
    assert len(output.tail(1)[0]) < 10_000
