"""Every message survives the way, grows without breaking who has not heard of it, and refuses what it does not mean."""

from __future__ import annotations

import functools
import inspect
import typing
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from taas_magic import wire
from taas_magic.wire import Hello, InputReply, Interrupt, ReadLog, RunEnded, Versions
from taas_magic.wire_base import MemoryFile, Message

MESSAGES = [
    value
    for value in vars(wire).values()
    if isinstance(value, type) and issubclass(value, Message) and value is not Message
]
STRUCTS = [value for value in vars(wire).values() if isinstance(value, type) and issubclass(value, msgspec.Struct)]
#: There are many messages, and each is simple.
FEW = settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
UNIONS = {
    name: typing.get_args(value) or (value,)
    for name, value in vars(wire).items()
    if name.startswith(("To", "From")) and not inspect.ismodule(value)
}


def values(kind: Any) -> st.SearchStrategy[Any]:
    """Values of a field's type, within what its constraints allow."""
    if isinstance(kind, msgspec.inspect.StructType):
        return instances(kind.cls)
    if isinstance(kind, msgspec.inspect.UnionType):
        return st.one_of([values(each) for each in kind.types])
    if isinstance(kind, msgspec.inspect.ListType):
        return st.lists(values(kind.item_type), max_size=3)
    if isinstance(kind, msgspec.inspect.TupleType):
        return st.tuples(*map(values, kind.item_types))
    if isinstance(kind, msgspec.inspect.DictType):
        return st.dictionaries(values(kind.key_type), values(kind.value_type), max_size=3)
    if isinstance(kind, msgspec.inspect.LiteralType):
        return st.sampled_from(kind.values)
    if isinstance(kind, msgspec.inspect.IntType):
        least = kind.ge if kind.ge is not None else -(2**63)
        most = kind.le if kind.le is not None else (kind.lt - 1 if kind.lt is not None else 2**63 - 1)
        return st.integers(least, most)
    simple: dict[type, st.SearchStrategy[Any]] = {
        msgspec.inspect.StrType: st.text(max_size=20),
        msgspec.inspect.BytesType: st.binary(max_size=20),
        msgspec.inspect.BoolType: st.booleans(),
        msgspec.inspect.FloatType: st.floats(allow_nan=False),
        msgspec.inspect.NoneType: st.none(),
    }
    return simple[type(kind)]


@functools.cache
def instances(cls: type[msgspec.Struct]) -> st.SearchStrategy[Any]:
    info = msgspec.inspect.type_info(cls)
    assert isinstance(info, msgspec.inspect.StructType)
    return st.builds(cls, **{field.name: values(field.type) for field in info.fields})


def fields_of(cls: type[msgspec.Struct]) -> tuple[msgspec.structs.FieldInfo, ...]:
    return msgspec.structs.fields(cls)


@pytest.mark.parametrize("cls", MESSAGES, ids=lambda cls: cls.__name__)
@settings(FEW)
@given(data=st.data())
def test_what_is_sent_is_what_is_received(cls: type[Message], data: st.DataObject) -> None:
    message = data.draw(instances(cls))
    encoded = msgspec.msgpack.encode(message)
    unions = [members for members in UNIONS.values() if cls in members]
    assert unions, f"{cls.__name__} is in no direction's union"
    for members in unions:
        assert msgspec.msgpack.decode(encoded, type=typing.Union[members]) == message  # noqa: UP007 - a tuple of them


@pytest.mark.parametrize("cls", MESSAGES, ids=lambda cls: cls.__name__)
@settings(FEW)
@given(data=st.data())
def test_fields_that_one_has_not_heard_of_are_passed_over(cls: type[Message], data: st.DataObject) -> None:
    message = data.draw(instances(cls))
    newer = msgspec.msgpack.decode(msgspec.msgpack.encode(message)) | {"since_next_year": [1, {"a": None}]}
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(newer), type=cls) == message


@pytest.mark.parametrize("cls", MESSAGES, ids=lambda cls: cls.__name__)
@settings(FEW)
@given(data=st.data())
def test_a_message_without_its_fields_of_later_days_is_read(cls: type[Message], data: st.DataObject) -> None:
    message = data.draw(instances(cls))
    later = {field.name for field in fields_of(cls) if not field.required}
    older = {name: getattr(message, name) for name in cls.__struct_fields__ if name not in later}
    read = msgspec.msgpack.decode(msgspec.msgpack.encode(older | {"type": cls.__name__}), type=cls)
    assert {name: getattr(read, name) for name in older} == older


@pytest.mark.parametrize("cls", STRUCTS, ids=lambda cls: cls.__name__)
def test_a_message_never_changes_and_is_no_array(cls: type[msgspec.Struct]) -> None:
    """Fields are found by name, so that some can be added anywhere; a message is a fact."""
    assert cls.__struct_config__.frozen
    assert not cls.__struct_config__.array_like
    assert not cls.__struct_config__.forbid_unknown_fields


@pytest.mark.parametrize("cls", MESSAGES, ids=lambda cls: cls.__name__)
def test_the_tag_is_the_name(cls: type[Message]) -> None:
    assert cls.__struct_config__.tag == cls.__name__
    assert cls.__doc__


@pytest.mark.parametrize(
    ("cls", "fields"),
    [
        (Interrupt, {"run_id": "r", "level": 0}),
        (Interrupt, {"run_id": "r", "level": 4}),
        (InputReply, {"run_id": "r", "rank": -1, "text": None}),
        (InputReply, {"run_id": "r", "rank": 2**40, "text": None}),
        (ReadLog, {"rank": "0"}),
        (Hello, {"token": "t"}),
        (RunEnded, {"run_id": "r", "outcome": "ok"}),
    ],
)
def test_what_a_message_cannot_mean_is_refused(cls: type[Message], fields: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(fields | {"type": cls.__name__}), type=cls)


@settings(deadline=None)
@given(st.binary(max_size=100))
def test_garbage_is_an_error_of_msgspec(data: bytes) -> None:
    for members in UNIONS.values():
        try:
            msgspec.msgpack.decode(data, type=typing.Union[members])  # noqa: UP007 - a tuple of them
        except msgspec.MsgspecError:
            continue


def test_a_memory_file_is_read_through_its_holder() -> None:
    import os

    fd = os.memfd_create("test")
    os.write(fd, b"here")
    opened = MemoryFile(os.getpid(), fd, 4).open()
    assert os.pread(opened, 10, 0) == b"here"
    assert not os.get_inheritable(opened)
    os.close(fd)
    os.close(opened)
    with pytest.raises(OSError, match="No such file"):
        MemoryFile(os.getpid(), fd, 4).open()


def test_versions_hold_nothing_that_would_have_to_be_unpickled() -> None:
    assert {field.type for field in fields_of(Versions)} == {int, str}
