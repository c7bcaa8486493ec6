"""The versions that must agree between kernel and runner."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
import sys

import msgspec
import pytest

from taas_magic import __version__
from taas_magic.versions import mismatch, own_versions
from taas_magic.wire import PROTOCOL_VERSION, Versions

OURS = Versions(protocol=1, taas="0.1.0", python="3.11.7", cloudpickle="3.1.3", torch="2.13.0+cpu")


def changed(**fields: object) -> Versions:
    return msgspec.structs.replace(OURS, **fields)


def test_own_versions_are_those_of_this_environment() -> None:
    own = own_versions()
    assert own.protocol == PROTOCOL_VERSION
    assert own.taas == __version__
    assert own.python == platform.python_version()
    assert own.cloudpickle == importlib.metadata.version("cloudpickle")
    assert own.torch == importlib.metadata.version("torch")
    assert not mismatch(own, own)


def test_reading_them_imports_neither_torch_nor_cloudpickle() -> None:
    code = """
import sys
from taas_magic.versions import own_versions
own_versions()
print({"torch", "cloudpickle"} & set(sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("taas", "0.2.0"),
        ("python", "3.11.9"),
        ("cloudpickle", "3.1.0"),
        ("torch", "2.13.0+cu130"),
        ("torch", "2.13.1"),
    ],
)
def test_what_does_not_matter(field: str, value: str) -> None:
    assert not mismatch(OURS, changed(**{field: value}))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("python", "3.12.0"),
        ("python", "3.1.0"),
        ("cloudpickle", "3.2.0"),
        ("torch", "2.14.0+cpu"),
        ("torch", "not installed"),
    ],
)
def test_what_matters_is_named_with_both_values(field: str, value: str) -> None:
    text = mismatch(OURS, changed(**{field: value}))
    assert text == f"{field} {getattr(OURS, field)} and {value}"


def test_all_differences_are_named() -> None:
    text = mismatch(OURS, changed(protocol=2, taas="0.9.0", torch="3.0.0"))
    assert text == "protocol 1 (taas 0.1.0) and 2 (taas 0.9.0); torch 2.13.0+cpu and 3.0.0"
