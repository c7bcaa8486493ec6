"""Imports only point down: the table of docs/design.md, and what may not be loaded on the way of `%load_ext`.

What is read is the package that is installed, which in CI is the wheel's.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import taas_magic

ROOT = Path(__file__).parents[2]
PACKAGE = Path(taas_magic.__path__[0])
#: Libraries that only some modules may import, wherever in them the import stands.
CONFINED = {
    "IPython": {"", "notebook", "rank"},  # "": the way in of %load_ext, for type checkers only; see below
    "ipykernel": {"notebook", "rank"},
    "zmq": {"client", "runner", "link", "gateway", "machines"},
}
#: Where a module may import torch as it is loaded; elsewhere inside functions only.
TORCH_AT_ONCE = {"rank"}
#: Not to be loaded in the kernel by %load_ext, nor in the runner.
HEAVY = ("torch", "numpy", "pytorch_lightning", "matplotlib", "pandas")


@dataclass(frozen=True)
class Import:
    """One imported module in one file."""

    file: str
    line: int
    importer: str  # the part of taas_magic: "runner", "wire"; "" for the package itself
    module: str  # full dotted name
    when_loaded: bool  # at module level, and not only for type checkers

    @property
    def part(self) -> str | None:
        """The imported part of taas_magic, if it is one."""
        return part_of(self.module)

    def __str__(self) -> str:
        return f"{self.file}:{self.line} imports {self.module}"


def part_of(module: str) -> str | None:
    top, _, rest = module.partition(".")
    return rest.partition(".")[0] if top == "taas_magic" else None


class Imports(ast.NodeVisitor):
    """Collects the imports of one file, in functions and type checking blocks too."""

    def __init__(self, path: Path) -> None:
        inside = path.relative_to(PACKAGE).with_suffix("").parts
        self._package = ["taas_magic", *inside[:-1]]
        self._file = str(path.relative_to(PACKAGE.parent))
        self._importer = "" if inside == ("__init__",) else inside[0]
        self._depth = 0
        self.found: list[Import] = []

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._add(node, alias.name)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        base = self._package[: len(self._package) + 1 - node.level] if node.level else []
        module = ".".join([*base, *([node.module] if node.module else [])])
        if module == "taas_magic":  # the names are the modules
            for alias in node.names:
                self._add(node, f"taas_magic.{alias.name}" if part_exists(alias.name) else module)
        else:
            self._add(node, module)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> None:
        self._depth += 1
        self.generic_visit(node)
        self._depth -= 1

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815 - ast's names
    visit_Lambda = visit_FunctionDef  # noqa: N815 - ast's names

    def visit_If(self, node: ast.If) -> None:
        if ast.unparse(node.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}:
            self._depth += 1
            for statement in node.body:
                self.visit(statement)
            self._depth -= 1
            for statement in node.orelse:
                self.visit(statement)
        else:
            self.generic_visit(node)

    def _add(self, node: ast.stmt, module: str) -> None:
        self.found.append(Import(self._file, node.lineno, self._importer, module, self._depth == 0))


def part_exists(name: str) -> bool:
    return (PACKAGE / name).is_dir() or (PACKAGE / f"{name}.py").is_file()


def imports() -> Iterator[Import]:
    for path in sorted(PACKAGE.rglob("*.py")):
        visitor = Imports(path)
        visitor.visit(ast.parse(path.read_text(), str(path)))
        yield from visitor.found


def layers() -> dict[str, int]:
    """The height of each part, from the table in the design; `_version` is below all."""
    section = (ROOT / "docs/design.md").read_text().split("## Layers", 1)[1].split("\n## ")[0]
    rows = [re.findall(r"[\w.*]+", line) for line in section.splitlines() if line.startswith("    ")]
    heights = {name.removesuffix(".*"): height for height, row in enumerate(reversed(rows), start=1) for name in row}
    return heights | {"_version": 0, "": len(rows) + 1}


def test_every_part_stands_in_the_table_and_the_table_names_no_other() -> None:
    parts = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__", "__main__"}
    # A package of which there is only a name so far has nothing to hold.
    parts |= {path.name for path in PACKAGE.iterdir() if any(file.stat().st_size for file in path.glob("*.py"))}
    table = set(layers()) - {""}
    assert parts <= table, f"add to the table under ## Layers in docs/design.md: {sorted(parts - table)}"
    gone = {name for name in table if not part_exists(name)}
    assert not gone, f"docs/design.md names parts that there are not: {sorted(gone)}"


def test_imports_only_point_down() -> None:
    height = layers()
    height["__main__"] = max(height.values())
    up = [
        str(found)
        for found in imports()
        if found.part  # the package itself holds but the version and the way in
        and found.part != found.importer
        and height.get(found.importer, 0) <= height.get(found.part, 0)
    ]
    assert not up, "\n".join(up)


@pytest.mark.parametrize("library", CONFINED)
def test_a_library_is_imported_only_where_it_belongs(library: str) -> None:
    astray = [
        str(found)
        for found in imports()
        if found.module.split(".")[0] == library and found.importer not in CONFINED[library]
    ]
    assert not astray, "\n".join(astray)


def test_the_package_itself_imports_nothing_but_its_version_when_loaded() -> None:
    loaded = {found.module for found in imports() if found.importer == "" and found.when_loaded}
    assert loaded <= {"__future__", "typing", "taas_magic._version"}


def test_torch_is_imported_late_outside_ranks() -> None:
    early = [
        str(found)
        for found in imports()
        if found.module.split(".")[0] == "torch" and found.when_loaded and found.importer not in TORCH_AT_ONCE
    ]
    assert not early, "\n".join(early)


@pytest.mark.parametrize(
    "modules",
    [
        ["taas"],
        ["taas_magic"],
        ["taas_magic", "taas_magic.notebook", "taas_magic.client"],
        ["taas_magic.runner"],
        ["taas_magic.cli"],
    ],
    ids=lambda modules: modules[-1],
)
def test_what_is_loaded_in_the_kernel_and_the_runner_is_light(modules: list[str]) -> None:
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    if missing:
        pytest.skip(f"not written yet: {missing}")
    submodules = [name for module in modules for name in with_submodules(module)]
    heavy = loaded_by(submodules) & set(HEAVY)
    assert not heavy, f"importing {', '.join(modules)} loads {sorted(heavy)}"


def with_submodules(module: str) -> list[str]:
    """A package with everything in it, since which of its modules is loaded first is its own affair."""
    spec = importlib.util.find_spec(module)
    assert spec is not None
    if module in {"taas", "taas_magic"} or not spec.submodule_search_locations:
        return [module]
    directory = Path(spec.submodule_search_locations[0])
    return [module, *(f"{module}.{path.stem}" for path in directory.glob("*.py") if not path.stem.startswith("__"))]


def loaded_by(modules: list[str]) -> set[str]:
    code = f"""
import importlib, json, sys
for module in {modules!r}:
    importlib.import_module(module)
print(json.dumps(list(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))
