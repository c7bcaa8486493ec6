"""Machine lists: what a machine is called, and what is no number."""

from __future__ import annotations

import pytest

from taas_magic.machines.machine_list import MachineError, parse_machine


@pytest.mark.parametrize("text", ["node1", "me@node1", "node1:2201", "me@node1:2201", "[fe80::1]", "me@[fe80::1]:22"])
def test_a_machine_is_called_as_it_was_typed(text: str) -> None:
    assert parse_machine(text).name == text
    assert parse_machine(f"{text} slots=4 address=10.0.0.3").name == text


@pytest.mark.parametrize("slots", ["²", "\N{ARABIC-INDIC DIGIT THREE}", "-1", "+1", "1.0", "1_0", "00", "9" * 5000])
def test_what_is_no_number_of_slots_is_refused(slots: str) -> None:
    with pytest.raises(MachineError, match=r"^slots="):
        parse_machine(f"node1 slots={slots}")


@pytest.mark.parametrize("port", ["0", "65536", "²", "\N{ARABIC-INDIC DIGIT THREE}"])
def test_what_is_no_port_is_refused(port: str) -> None:
    with pytest.raises(MachineError):
        parse_machine(f"node1:{port}")
