"""docs/protocol.md says the same as taas_magic/wire.py and its fellows."""

from __future__ import annotations

import pickle
import re
import struct
import typing
from pathlib import Path

import msgspec
import numpy as np
import pytest

from taas_magic import wire, wire_data, wire_machines, wire_zygote
from taas_magic.data import elements, extents, transports
from taas_magic.namespace import blocks
from taas_magic.wire_base import Message

PAGE = (Path(__file__).parents[2] / "docs/protocol.md").read_text()
SECTIONS = {
    match[1]: match[2] for match in re.finditer(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
}
ENTRIES = {match[1]: match[2] for match in re.finditer(r"^### (\w+)\n(.*?)(?=^##|\Z)", PAGE, re.MULTILINE | re.DOTALL)}
MODULES = (wire, wire_data, wire_zygote, wire_machines)
#: What the modules define, or take from each other or from wire_base.
MEMBERS = [member for module in MODULES for member in vars(module).items()]
STRUCTS = {
    value.__name__: value
    for _, value in MEMBERS
    if isinstance(value, type) and issubclass(value, msgspec.Struct) and value is not Message
}
UNIONS = {
    name: {member.__name__ for member in (typing.get_args(value) or (value,))}
    for name, value in MEMBERS
    if re.fullmatch(r"(To|From)[A-Z]\w+", name)
}


def rows(text: str) -> list[list[str]]:
    """The cells of the tables in a text, without heads."""
    lines = [line for line in text.splitlines() if line.startswith("| `")]
    return [[cell.strip().replace(r"\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def default_of(field: msgspec.structs.FieldInfo) -> str:
    if field.required:
        return ""
    value = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    return f'`"{value}"`' if isinstance(value, str) else f"`{value!r}`"


def test_no_name_has_two_meanings() -> None:
    for name in STRUCTS.keys() | UNIONS.keys():
        meanings = {id(vars(module)[name]) for module in MODULES if name in vars(module)}
        assert len(meanings) == 1, name


def test_every_message_is_described_and_no_other() -> None:
    assert set(ENTRIES) == set(STRUCTS)


@pytest.mark.parametrize("name", STRUCTS)
def test_every_field_is_described_with_its_type_and_default(name: str) -> None:
    cls = STRUCTS[name]
    expected = [
        [f"`{field.encode_name}`", f"`{cls.__annotations__[field.name]}`", default_of(field)]
        for field in msgspec.structs.fields(cls)
    ]
    assert [row[:3] for row in rows(ENTRIES[name])] == expected


@pytest.mark.parametrize("name", STRUCTS)
def test_every_message_says_when(name: str) -> None:
    prose = [line for line in ENTRIES[name].splitlines() if line and not line.startswith("|")]
    assert prose


@pytest.mark.parametrize("name", STRUCTS)
def test_what_is_an_array_is_said_to_be_one(name: str) -> None:
    prose = " ".join(line for line in ENTRIES[name].splitlines() if not line.startswith("|"))
    is_array = STRUCTS[name].__struct_config__.array_like
    assert ("An array on the wire, with the fields in this order." in prose) == is_array


def test_what_is_an_array_is_listed() -> None:
    (listed,) = re.findall(r"^(`[^.]*), of which there is one an element, are no maps but arrays", PAGE, re.MULTILINE)
    arrays = {name for name, cls in STRUCTS.items() if cls.__struct_config__.array_like}
    assert set(re.findall(r"`(\w+)`", listed)) == arrays


@pytest.mark.parametrize("name", UNIONS)
def test_every_direction_lists_its_messages(name: str) -> None:
    (text,) = [text for title, text in SECTIONS.items() if title.endswith(f": `{name}`")]
    own = set(re.findall(r"^### (\w+)", text, re.MULTILINE))
    above = re.search(r"^As above: (.*)\.$", text, re.MULTILINE)
    assert own | set(re.findall(r"`(\w+)`", above[1] if above else "")) == UNIONS[name]


def test_every_direction_is_a_section() -> None:
    assert {title.rpartition(": `")[2].rstrip("`") for title in SECTIONS if ": `" in title} == set(UNIONS)


def test_every_message_goes_somewhere() -> None:
    messages = {name for name, cls in STRUCTS.items() if issubclass(cls, Message)}
    assert set().union(*UNIONS.values()) == messages


def test_the_version_is_named() -> None:
    assert f"version {wire.PROTOCOL_VERSION}." in PAGE


def test_the_parcel_is_described_as_it_is() -> None:
    text = SECTIONS["Parcels"]
    assert f"| 0 | 8 | `{blocks._MAGIC.decode()}` |" in text
    assert f"| {blocks._HEADER.size} | | the pickle stream |" in text
    assert f"aligned to {blocks._ALIGNMENT} bytes" in text
    assert f"from {blocks._SMALL_BYTES // 1024} KiB on" in text
    documented = {name for row in rows(text) for name in re.findall(r"`(\w+)`", row[0])}
    assert {field.name for field in msgspec.structs.fields(blocks.Manifest)} <= documented
    block = next(row for row in rows(text) if row[0] == "`blocks`")[1]
    assert block.split("(")[1].split(")")[0].count(",") + 1 == len(msgspec.structs.fields(blocks.BlockExtent))


def test_elements_are_described_as_they_are() -> None:
    text = SECTIONS["Elements"]
    header, entry, number = elements._HEADER, elements._ENTRY, elements._NUMBER
    assert (header.format, entry.format, number.format) == ("<IIQ", "<QQ", "<I")
    table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]
    assert [row[:2] for row in table[2:]] == [
        ["0", "4"],
        ["4", "4"],
        ["8", "8"],
        [f"{header.size}", f"{entry.size} each"],
        ["", f"{number.size} each"],
        ["", ""],
        ["", ""],
    ]
    assert f"aligned to {extents.LINE_BYTES} bytes" in text
    prose = " ".join(text.split())
    assert f"a multiple of {extents.LINE_BYTES} bytes, or of a page from {extents.PAGE_BYTES // 1024} KiB on" in prose


def test_elements_are_laid_out_as_they_are_described() -> None:
    array, buffer = np.arange(3, dtype=np.int64), b"spam"
    data = elements.Encoder({}).encode([array, pickle.PickleBuffer(buffer)]).to_bytes()
    num_buffers, num_asked_for, stream_size = struct.unpack_from("<IIQ", data)
    assert (num_buffers, num_asked_for) == (2, 1)
    table = [struct.unpack_from("<QQ", data, 16 + 16 * number) for number in range(2)]
    assert struct.unpack_from("<I", data, 48) == (1,)
    stream = data[52 : 52 + stream_size]
    assert stream.startswith(pickle.PROTO + b"\x05")
    assert stream.endswith(pickle.STOP)
    assert [offset % 64 for offset, _ in table] == [0, 0]
    assert [data[offset : offset + size] for offset, size in table] == [array.tobytes(), buffer]


def test_the_connection_is_described_as_it_is() -> None:
    prose = " ".join(SECTIONS["Over a connection"].split())
    assert transports._GREETING.format == "<32sI"
    assert "32 bytes, and its number as an unsigned 32-bit little-endian integer" in prose
    assert transports._FRAME.format == "<I"
    assert "its size in bytes before it, as an unsigned 32-bit little-endian integer" in prose
    assert f"at most {transports._MAX_MESSAGE_BYTES // 2**20} MiB" in prose


def test_limits_are_as_they_are() -> None:
    from taas_magic import channel
    from taas_magic.runner import run

    assert channel.MAX_FRAME_BYTES == 2**30
    assert "at most 1 GiB and 16 descriptors" in " ".join(PAGE.split())
    assert channel._MAX_DESCRIPTORS == 16
    assert run._WINDOW_BYTES == 2**20
    assert "at most 1 MiB on the way" in ENTRIES["OutputTaken"]
