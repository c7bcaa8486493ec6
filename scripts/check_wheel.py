"""Check that a built wheel holds the packages, all of them, nothing else, and says of itself what it should.

Usage: ``python scripts/check_wheel.py dist/NAME.whl``, in the project's root.
"""

from __future__ import annotations

import re
import sys
import zipfile
from collections.abc import Iterator
from email.message import Message
from email.parser import Parser
from pathlib import Path

PACKAGES = ("taas", "taas_magic")
ROOT = Path(__file__).resolve().parent.parent
#: Metadata that must be there, and what it must match.
METADATA = {
    "Name": r"taas-magic",
    "Summary": r".{20,120}",
    "License-Expression": r"Apache-2\.0",
    "License-File": r"LICENSE",
    "Requires-Python": r">=3\.11",
    "Description-Content-Type": r"text/markdown.*",
    "Keywords": r".*jupyter.*",
}


def source_files() -> set[str]:
    """Names, as the wheel has them, of all that belongs in the packages."""
    return {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }


def problems_of_contents(names: set[str]) -> Iterator[str]:
    """Each file that is missing from the wheel, or should not be in it."""
    in_packages = {name for name in names if ".dist-info/" not in name}
    yield from (f"missing from the wheel: {name}" for name in sorted(source_files() - in_packages))
    yield from (f"does not belong in the wheel: {name}" for name in sorted(in_packages - source_files()))
    yield from (f"no {package}/py.typed" for package in PACKAGES if f"{package}/py.typed" not in names)


def problems_of_metadata(metadata: Message) -> Iterator[str]:
    """Each field of the metadata that is missing or wrong."""
    for field, pattern in METADATA.items():
        if not re.fullmatch(pattern, metadata.get(field, "")):
            yield f"{field} is {metadata.get(field)!r}, expected something like {pattern!r}"
    version = re.search(r'__version__ = "(.+)"', (ROOT / "taas_magic/_version.py").read_text())
    if version is None or metadata["Version"] != version[1]:
        yield f"Version is {metadata['Version']}, taas_magic/_version.py has {version and version[1]}"
    if not str(metadata.get_payload()).strip():
        yield "the README is not in the description"


def main(arguments: list[str]) -> int:
    """Print what is wrong with the wheel; 0 if nothing is."""
    if len(arguments) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    with zipfile.ZipFile(arguments[0]) as wheel:
        names = set(wheel.namelist())
        info = next(name.split("/")[0] for name in names if ".dist-info/" in name)
        metadata = Parser().parsestr(wheel.read(f"{info}/METADATA").decode())
        entry_points = wheel.read(f"{info}/entry_points.txt").decode()
    problems = [*problems_of_contents(names), *problems_of_metadata(metadata)]
    if "taas = taas_magic.cli:main" not in entry_points:
        problems.append("the command `taas` is not among the entry points")
    for problem in problems:
        print(f"{arguments[0]}: {problem}", file=sys.stderr)
    if not problems:
        print(f"{arguments[0]}: {len(names)} files, as they should be")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
