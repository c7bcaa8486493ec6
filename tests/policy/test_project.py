"""Rules for the project as a whole that a program can check."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import os
import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import taas_magic
from taas_magic import _version

ROOT = Path(__file__).parents[2]
#: The packages as they are installed, which in CI is from the wheel.
PACKAGES = [Path(path) for name in ("taas", "taas_magic") for path in importlib.import_module(name).__path__]
MAX_LINES = 700
#: What a page for users must not hold: paths of one machine, numbers of our own tracker, notes to ourselves.
FORBIDDEN = {
    "a path of one machine": r"(?<![\w.])/(work|root|opt)/\S",
    "a number of a tracker that readers do not have": r"(?i)\bissues? (no\. ?|#)?\d{1,3}\b",
    "a note to ourselves": r"\b(TODO|FIXME|XXX|TBD)\b",
}
#: Files that install something: pip and apt are configured on the machine, not here.
INSTALLING = [
    "Makefile",
    "pyproject.toml",
    "constraints-dev.txt",
    ".ci/run",
    *(f"scripts/{path.name}" for path in (ROOT / "scripts").glob("*.sh")),
]
SOURCE_LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)(?:#[^)]*)?\)")


def texts() -> Iterator[Path]:
    """Everything that people read: code, docs, notebooks, scripts; not this file, which has to name the words."""
    for place in (*PACKAGES, *(ROOT / name for name in ("docs", "notebooks", "scripts", "tests", "benchmarks"))):
        for path in place.rglob("*"):
            hidden = any(part.startswith(("_build", ".", "__pycache__")) for part in path.relative_to(place).parts)
            if path.suffix in {".py", ".md", ".ipynb", ".sh"} and not hidden and path != Path(__file__):
                yield path
    yield from ROOT.glob("*.md")


def sources() -> Iterator[Path]:
    return (path for path in texts() if path.suffix == ".py")


def shown(path: Path) -> str:
    package = next((package for package in PACKAGES if package in path.parents), None)
    return str(path.relative_to(package.parent if package else ROOT))


def metadata() -> dict[str, object]:
    loaded: dict[str, object] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return loaded


def test_the_version_has_one_source() -> None:
    assert "version" not in metadata()
    assert metadata()["dynamic"] == ["version"]
    assert importlib.metadata.version("taas-magic") == _version.__version__
    assert taas_magic.__version__ == _version.__version__
    literal = re.compile(rf"""version\w*\s*[:=]+\s*["']{re.escape(_version.__version__)}["']""")
    others = [shown(path) for path in sources() if path.name != "_version.py" and literal.search(path.read_text())]
    assert not others


@pytest.mark.skipif("TAAS_TEST_WHEEL" not in os.environ, reason="the tests run against the source tree")
def test_what_is_tested_is_the_wheel() -> None:
    inside = [path for path in PACKAGES if ROOT in path.parents and "site-packages" not in path.parts]
    assert not inside
    assert all((path / "py.typed").is_file() for path in PACKAGES)


def test_the_public_names_are_those_documented() -> None:
    import taas

    page = (ROOT / "docs/reference/api.md").read_text()
    documented = set(re.findall(r"^\| `taas\.(\w+)", page, re.MULTILINE))
    assert documented == set(taas.__all__)
    assert all(getattr(taas, name).__doc__ for name in taas.__all__)
    defined = {name for name, value in vars(taas).items() if getattr(value, "__module__", None) == "taas"}
    assert {name for name in defined if not name.startswith("_")} == set(taas.__all__)


@pytest.mark.parametrize("path", sorted(sources()), ids=shown)
def test_each_module_says_what_it_is(path: Path) -> None:
    text = path.read_text()
    if not text.strip():
        pytest.fail(f"{shown(path)} is empty: say in a docstring what the package is for")
    assert ast.get_docstring(ast.parse(text)), f"{shown(path)} has no docstring"


@pytest.mark.parametrize("path", sorted(sources()), ids=shown)
def test_no_file_is_too_long(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MAX_LINES


@pytest.mark.parametrize("what", FORBIDDEN)
def test_no_text_holds(what: str) -> None:
    found = [
        f"{shown(path)}:{number}: {line.strip()[:120]}"
        for path in texts()
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if re.search(FORBIDDEN[what], line)
    ]
    assert not found, "\n".join(found)


def test_what_installs_names_no_place_to_install_from() -> None:
    found = [
        f"{shown(path)}:{number}"
        for path in map(ROOT.joinpath, INSTALLING)
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if re.search(r"https?://|--(extra-)?index-url|--find-links|--trusted-host", line)
    ]
    assert not found


def test_links_between_pages_lead_somewhere() -> None:
    broken = [
        f"{shown(page)}: {target}"
        for page in texts()
        if page.suffix == ".md"
        for target in SOURCE_LINK.findall(re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL))
        if "://" not in target and not target.startswith("mailto:") and not (page.parent / target).exists()
    ]
    assert not broken, "\n".join(broken)


def test_the_project_does_not_depend_on_what_it_does_not_use() -> None:
    dependencies = metadata()["dependencies"]
    assert isinstance(dependencies, list)
    needed = {re.split(r"[^\w-]", requirement)[0].replace("-", "_").lower() for requirement in dependencies}
    imported = {name for package in PACKAGES for path in package.rglob("*.py") for name in imported_by(path)}
    modules = {"pyzmq": "zmq", "ipython": "IPython"}
    # ipykernel is what the extension lives in, imported or not.
    unused = {name for name in needed - {"ipykernel"} if modules.get(name, name) not in imported}
    assert not unused
    assert "torchvision" not in (ROOT / "pyproject.toml").read_text()


def imported_by(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.split(".")[0]


def test_every_make_target_explains_itself() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^\.PHONY: (\w+)$", makefile, re.MULTILINE))
    listed = subprocess.run(["make", "-C", str(ROOT), "help"], capture_output=True, text=True, check=True).stdout
    assert targets == set(re.findall(r"^make (\w+)", listed, re.MULTILINE))
    assert {"demo", "test"} <= targets
