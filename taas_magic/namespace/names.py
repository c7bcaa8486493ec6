"""Which names of the notebook does a cell need? Found from its source, before anything runs.

The cell is walked once, statement by statement, in the order in which Python would run it. Along the way a set is
kept of the names that are *settled*: bound (or deleted) by the cell on every path that leads here, so that the
notebook's value can no longer be seen. A name that is read while it is not settled has to travel. Where paths meet,
only what all of them settled stays so; a loop's body may run no time; an exception may leave a ``try`` anywhere.

Functions run later than they stand. What their bodies take from the global namespace is read from their compiled
code, so nested scopes, ``nonlocal`` and comprehensions are resolved by Python itself.

Deliberate limits: a ``with`` block is taken to pass exceptions on unless its manager is called ``suppress`` or
``raises``, and ``from m import *`` settles nothing.
"""

from __future__ import annotations

import ast
import itertools
import sys
import types
from collections.abc import Callable, Iterable, Sequence

from taas_magic.namespace.code_names import (
    Function,
    body_of_function,
    body_of_lambda,
    compiled,
    global_uses,
    globals_of_code,
    loaded_names,
    parsed,
    stored_names,
)
from taas_magic.namespace.magic_text import Runs, cell_magic, expressions_in, foreign_words, line_magic, words_in
from taas_magic.namespace.name_ledger import CellNames, NameLedger, Settled, copied, joined
from taas_magic.namespace.string_names import StringNames, names_in_python, names_through_strings, text_of

__all__ = ["CellNames", "globals_of_code", "names_of_cell"]

_SWALLOWING = frozenset({"suppress", "raises", "assertRaises", "assertRaisesRegex"})
_SHELL_METHODS = frozenset({"system", "getoutput", "system_piped", "system_raw"})
#: Kinds of node that are walked like another kind.
_WALKED_LIKE = {
    "AsyncFor": "For",
    "AsyncFunctionDef": "FunctionDef",
    "AsyncWith": "With",
    "Continue": "Raise",
    "DictComp": "ListComp",
    "GeneratorExp": "ListComp",
    "SetComp": "ListComp",
    "TryStar": "Try",
}

_Comprehension = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp


def names_of_cell(source: str, transform: Callable[[str], str]) -> CellNames:
    """Find the names that a cell needs and binds.

    Args:
        source: The cell as typed: magics, ``!`` lines and top-level ``await`` included.
        transform: IPython's ``shell.transform_cell``.

    Raises:
        SyntaxError: The cell is not valid Python after ``transform``; ``lineno`` counts the cell's lines.
    """
    names = NameLedger()
    _Flow(transform, names).run_code(source)
    return names.names()


class _Flow(ast.NodeVisitor):
    """Walks the cell. The fields are where the walk stands and what it has found."""

    def __init__(self, transform: Callable[[str], str], names: NameLedger) -> None:
        self._transform = transform
        self._names = names
        #: What was settled at each ``break`` of the loops around, innermost last.
        self._breaks: list[list[Settled]] = []
        self._has_lazy_annotations = False
        #: How many lines of the cell stand above the code that is being walked.
        self._num_lines_above = 0

    def run_code(self, source: str, num_lines_above: int = 0) -> None:
        """Walk ``source``: a cell, or a magic's code, ``num_lines_above`` lines below the head of what is walked."""
        outside = self._num_lines_above
        self._num_lines_above += num_lines_above
        python = self._transform(source)
        self._num_lines_above += _num_blank_lines(source) - _num_blank_lines(python)  # IPython drops those at the head
        try:
            tree = parsed(python)
            compiled(tree)  # finds what the parser lets pass: a return outside of a function, say
        except SyntaxError as error:
            self._num_lines_above, num_lines = outside, self._num_lines_above
            if error.lineno is not None:
                error.lineno += num_lines
            if error.end_lineno is not None:
                error.end_lineno += num_lines
            raise
        self._block(tree.body)
        self._num_lines_above = outside

    # ---- names

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Store):
            self._names.bind(node.id)
            return
        self._names.read(node.id)
        if isinstance(node.ctx, ast.Del):
            self._names.unbind(node.id)

    # ---- paths

    def visit(self, node: ast.AST) -> None:
        if self._names.settled is None:  # code that no path leads to reads nothing
            return
        kind = type(node).__name__
        getattr(self, f"visit_{_WALKED_LIKE.get(kind, kind)}", self.generic_visit)(node)

    def _block(self, nodes: Iterable[ast.AST]) -> None:
        for node in nodes:
            self.visit(node)

    def _branches(self, *branches: Sequence[ast.AST]) -> None:
        """Walk each branch from here; behind them, only what all of them settled is settled."""
        before = self._names.settled
        ends = []
        for branch in branches:
            self._names.settled = copied(before)
            self._block(branch)
            ends.append(self._names.settled)
        self._names.settled = joined(ends)

    def visit_If(self, node: ast.If) -> None:
        self.visit(node.test)
        self._branches(node.body, node.orelse)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self.visit(node.test)
        self._branches([node.body], [node.orelse])

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        self.visit(node.values[0])
        self._branches(node.values[1:], [])

    def visit_BinOp(self, node: ast.BinOp) -> None:
        operands: list[ast.expr] = []
        left: ast.expr = node
        while isinstance(left, ast.BinOp):  # a sum of many terms is as many levels deep
            operands.append(left.right)
            left = left.left
        self._block([left, *reversed(operands)])

    def visit_Compare(self, node: ast.Compare) -> None:
        self._block([node.left, node.comparators[0]])
        self._branches(node.comparators[1:], [])

    def visit_Assert(self, node: ast.Assert) -> None:
        self.visit(node.test)
        before = copied(self._names.settled)
        if node.msg is not None:
            self.visit(node.msg)
        self._names.settled = before

    def visit_While(self, node: ast.While) -> None:
        self.visit(node.test)
        is_endless = isinstance(node.test, ast.Constant) and bool(node.test.value)
        self._loop([], node.body, node.orelse, is_endless=is_endless)

    def visit_For(self, node: ast.For | ast.AsyncFor) -> None:
        self.visit(node.iter)
        self._loop([node.target], node.body, node.orelse, is_endless=False)

    def _loop(self, targets: list[ast.expr], body: list[ast.stmt], orelse: list[ast.stmt], *, is_endless: bool) -> None:
        before = copied(self._names.settled)
        self._breaks.append([])
        self._block([*targets, *body])
        breaks = self._breaks.pop()
        # One walk is enough: whoever comes round again has settled at least what was settled before.
        self._names.settled = None if is_endless else before
        self._block(orelse)
        self._names.settled = joined([self._names.settled, *breaks])

    def visit_Break(self, _: ast.Break) -> None:
        self._breaks[-1].append(self._names.settled)
        self._names.settled = None

    def visit_Raise(self, node: ast.Raise | ast.Continue) -> None:
        self.generic_visit(node)
        self._names.settled = None

    def visit_Try(self, node: ast.Try | ast.TryStar) -> None:
        before = copied(self._names.settled)
        self._block([*node.body, *node.orelse])
        ends = [self._names.settled]
        for handler in node.handlers:
            self._names.settled = copied(before)
            self.visit(handler)
            ends.append(self._names.settled)
        normal = joined(ends)
        self._names.settled = before  # the final block runs after an exception anywhere, too
        self._block(node.finalbody)
        self._names.settled = None if normal is None or self._names.settled is None else normal | self._names.settled

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        if node.type is not None:
            self.visit(node.type)
        if node.name is not None:
            self._names.bind(node.name)
        self._block(node.body)
        if node.name is not None:
            self._names.unbind(node.name)

    def visit_With(self, node: ast.With | ast.AsyncWith) -> None:
        self._block(node.items)
        before = copied(self._names.settled)
        self._block(node.body)
        if self._names.settled is None or any(_swallows_exceptions(item.context_expr) for item in node.items):
            self._names.settled = before

    def visit_Match(self, node: ast.Match) -> None:
        self.visit(node.subject)
        branches: list[list[ast.AST]] = [
            [case.pattern, *([case.guard] if case.guard else []), *case.body] for case in node.cases
        ]
        last = node.cases[-1]
        if last.guard is not None or not isinstance(last.pattern, ast.MatchAs) or last.pattern.pattern is not None:
            branches.append([])  # no case may match
        self._branches(*branches)

    def visit_MatchAs(self, node: ast.MatchAs) -> None:
        self.generic_visit(node)
        if node.name is not None:
            self._names.bind(node.name)

    def visit_MatchStar(self, node: ast.MatchStar) -> None:
        if node.name is not None:
            self._names.bind(node.name)

    def visit_MatchMapping(self, node: ast.MatchMapping) -> None:
        self.generic_visit(node)
        if node.rest is not None:
            self._names.bind(node.rest)

    # ---- bindings

    def visit_Assign(self, node: ast.Assign) -> None:
        self._block([node.value, *node.targets])

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if isinstance(node.target, ast.Name):
            self._names.read(node.target.id)
        self._block([node.value, node.target])

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self._block([node.value, node.target])
        elif not isinstance(node.target, ast.Name):  # a bare `x: int` binds nothing
            self.visit(node.target)
        self._annotation(node.annotation)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self._block([node.value, node.target])

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._names.bind(alias.asname or alias.name.partition(".")[0])

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.module == "__future__" and any(alias.name == "annotations" for alias in node.names):
            self._has_lazy_annotations = True
        for alias in node.names:
            if alias.name != "*":
                self._names.bind(alias.asname or alias.name)

    # ---- scopes

    def _annotation(self, annotation: ast.expr | None) -> None:
        if annotation is None:
            return
        if self._has_lazy_annotations or sys.version_info >= (3, 14):
            self._names.read_perhaps(loaded_names(annotation))
        else:
            self.visit(annotation)

    def visit_ListComp(self, node: _Comprehension) -> None:
        # A generator runs when it is asked; nearly all are asked at once, so they are read as if at once.
        first = node.generators[0]
        self.visit(first.iter)
        outside = copied(self._names.settled), self._names.hidden, self._names.class_scope
        for generator in node.generators:
            self._names.hidden |= set(stored_names(generator.target))
        self._names.class_scope = None  # names of a class body are not seen in here
        for generator in node.generators:
            if generator is not first:
                self.visit(generator.iter)
            self._block([generator.target, *generator.ifs])
        self._block([node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt])
        self._names.settled, self._names.hidden, self._names.class_scope = outside

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self._defaults(node.args)
        self._body_runs_later(body_of_lambda(node), [node.body])

    def visit_FunctionDef(self, node: Function) -> None:
        self._block(node.decorator_list)
        self._defaults(node.args)
        outside = self._names.hidden
        self._names.hidden |= self._type_parameters(node)
        for argument in _arguments_of(node.args):
            self._annotation(argument.annotation)
        self._annotation(node.returns)
        self._names.hidden = outside
        body = body_of_function(node)
        if node.decorator_list:  # a decorator may call the function before its name is bound
            self._body_runs_later(body, node.body)
            self._names.bind(node.name)
        else:
            self._names.bind(node.name)
            self._body_runs_later(body, node.body)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._block(node.decorator_list)
        outside = self._names.hidden, self._names.class_scope, self._names.promised
        self._names.hidden |= self._type_parameters(node)
        self._block([*node.bases, *node.keywords])
        if self._names.class_scope is None and _is_bound_before_its_methods_run(node):
            self._names.promised |= {node.name}
        global_names = {name for each in node.body if isinstance(each, ast.Global) for name in each.names}
        self._names.enter_class(node.name, global_names)
        self._block(node.body)
        self._names.hidden, self._names.class_scope, self._names.promised = outside
        self._names.bind(node.name)

    def visit_TypeAlias(self, node: ast.AST) -> None:
        """``type X = ...`` (Python 3.12): the value is found when it is asked for."""
        self._body_runs_later(ast.Module([node], type_ignores=[]), [])  # type: ignore[list-item]  # typed from 3.12 on
        name = getattr(node, "name", None)
        if isinstance(name, ast.Name):
            self._names.bind(name.id)

    def _type_parameters(self, node: Function | ast.ClassDef) -> frozenset[str]:
        """The names of ``[T: Bound]`` (Python 3.12); bounds and defaults are found when they are asked for."""
        parameters: list[ast.AST] = getattr(node, "type_params", [])
        names = frozenset(getattr(parameter, "name", "") for parameter in parameters)
        for parameter in parameters:
            for name in loaded_names(parameter):
                if name not in names:
                    self._names.read_later(name)
        return names

    def _defaults(self, args: ast.arguments) -> None:
        self._block([*args.defaults, *(default for default in args.kw_defaults if default is not None)])

    def _body_runs_later(self, tree: ast.Module | ast.Expression, body: Sequence[ast.AST]) -> None:
        """Note what the code nested in ``tree`` takes from the global namespace; ``body`` may have names in strings."""
        if self._names.settled is None:
            return
        for constant in compiled(tree, has_lazy_annotations=self._has_lazy_annotations).co_consts:
            if isinstance(constant, types.CodeType):
                loads, stores = global_uses(constant)
                for name in loads:
                    self._names.read_later(name)
                self._names.bind_elsewhere(stores)
        for node in itertools.chain.from_iterable(map(ast.walk, body)):
            if isinstance(node, ast.Call | ast.Subscript | ast.Attribute):
                self._strings_of(node, runs_now=False)

    # ---- names in strings

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        self._strings_of(node, runs_now=True)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        self._block([node.value, node.slice])
        self._strings_of(node, runs_now=True)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.visit(node.value)
        self._strings_of(node, runs_now=True)

    def _strings_of(self, node: ast.AST, *, runs_now: bool) -> None:
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Call(func=ast.Name(id="get_ipython")), attr=method)):
                self._ipython_call(node, method, runs_now=runs_now)
            case _:
                self._string_names(names_through_strings(node))

    def _string_names(self, names: StringNames) -> None:
        self._names.read_perhaps(names.reads)
        self._names.bind_elsewhere(names.binds)

    # ---- IPython

    def _ipython_call(self, node: ast.Call, method: str, *, runs_now: bool) -> None:
        texts = [text_of(argument) for argument in node.args]
        if method in _SHELL_METHODS and len(texts) == 1:
            self._expressions(expressions_in(texts[0]), runs_now=runs_now)
        elif method in ("ev", "ex") and texts:
            self._string_names(names_in_python(texts[0]))
        elif method in ("run_line_magic", "run_cell_magic") and len(texts) == (2 if "line" in method else 3):
            self._magic(texts, node.lineno, runs_now=runs_now)

    def _magic(self, texts: list[str], lineno: int, *, runs_now: bool) -> None:
        magic = line_magic(*texts) if len(texts) == 2 else cell_magic(*texts)
        self._expressions(magic.expressions, runs_now=runs_now)
        self._names.read_perhaps(magic.words)
        if not runs_now:
            for code in magic.code:
                self._string_names(names_in_python(code))
            return
        before, mark = copied(self._names.settled), self._names.mark()
        for code in magic.code:
            is_body = len(texts) == 3 and code is magic.code[-1]
            try:
                self.run_code(code, num_lines_above=lineno if is_body else lineno - 1)
            except SyntaxError:
                if magic.is_python:
                    raise
                self._names.read_perhaps(words_in(code) if len(texts) == 2 else foreign_words(code))
        if magic.runs is not Runs.HERE:
            self._names.settled = before
        if magic.runs is Runs.PRIVATELY:
            self._names.forget_binds(mark)
        for name in magic.binds:
            self._names.bind(name)

    def _expressions(self, expressions: Iterable[str], *, runs_now: bool) -> None:
        for text in expressions:
            try:
                tree = parsed(f"({text})")
            except (SyntaxError, ValueError):
                self._names.read_perhaps(words_in(text))
                continue
            if runs_now:
                self._block(tree.body)
            else:
                self._names.read_perhaps(loaded_names(tree))


def _num_blank_lines(text: str) -> int:
    """How many blank lines stand at the head of ``text``."""
    return text[: len(text) - len(text.lstrip())].count("\n")


def _arguments_of(args: ast.arguments) -> list[ast.arg]:
    stars = [each for each in (args.vararg, args.kwarg) if each is not None]
    return [*args.posonlyargs, *args.args, *args.kwonlyargs, *stars]


def _is_bound_before_its_methods_run(node: ast.ClassDef) -> bool:
    """Whether nothing can call a method before the class has its name: no decorator, metaclass or call in the body."""
    at_once = [each for each in node.body if not isinstance(each, Function)]
    calls = any(isinstance(part, ast.Call) for each in at_once for part in ast.walk(each))
    return not (node.decorator_list or node.keywords or calls)


def _swallows_exceptions(manager: ast.expr) -> bool:
    called = manager.func if isinstance(manager, ast.Call) else manager
    name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
    return name in _SWALLOWING
