"""Parsing and compiling pieces of a cell, and the global names that compiled code uses."""

from __future__ import annotations
import __future__

import ast
import dis
import functools
import types
import warnings

_FILE_NAME = "<cell>"

Function = ast.FunctionDef | ast.AsyncFunctionDef


def globals_of_code(code: types.CodeType) -> frozenset[str]:
    """Global names that ``code``, or code nested in it, loads, stores or deletes. Cached; builtins are among them.

    The body of a class inside a function looks its own names up like global ones, so these are among them, too.
    """
    loads, stores = global_uses(code)
    return frozenset(loads) | stores


@functools.lru_cache(maxsize=2048)
def global_uses(code: types.CodeType) -> tuple[tuple[str, ...], frozenset[str]]:
    """Global names that ``code`` and nested code load or delete, in order, and those that they store or delete."""
    loads: dict[str, None] = {}
    stores: set[str] = set()
    for instruction in dis.get_instructions(code) if code.co_names else ():
        match instruction.opname:
            case "LOAD_GLOBAL" | "LOAD_NAME" | "LOAD_FROM_DICT_OR_GLOBALS":
                loads[instruction.argval] = None
            case "STORE_GLOBAL":
                stores.add(instruction.argval)
            case "DELETE_GLOBAL":
                loads[instruction.argval] = None
                stores.add(instruction.argval)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            nested_loads, nested_stores = global_uses(constant)
            loads.update(dict.fromkeys(nested_loads))
            stores |= nested_stores
    return tuple(loads), frozenset(stores)


def parsed(python: str) -> ast.Module:
    """Parse statements; ``await`` may stand at top level, as in a cell.

    Raises:
        SyntaxError: ``python`` is not valid.
        ValueError: ``python`` contains null bytes (before Python 3.12).
    """
    tree = _compile_silently(python, "exec", ast.PyCF_ONLY_AST)
    assert isinstance(tree, ast.Module)
    return tree


def compiled(tree: ast.Module | ast.Expression, *, has_lazy_annotations: bool = False) -> types.CodeType:
    """Compile a tree; with ``has_lazy_annotations`` as if behind ``from __future__ import annotations``.

    Raises:
        SyntaxError: What the parser lets pass and the compiler doesn't, such as a ``return`` outside of a function.
    """
    flags = __future__.annotations.compiler_flag if has_lazy_annotations else 0
    code = _compile_silently(tree, "eval" if isinstance(tree, ast.Expression) else "exec", flags)
    assert isinstance(code, types.CodeType)
    return code


def _compile_silently(source: str | ast.Module | ast.Expression, mode: str, flags: int) -> object:
    """Compile without the ``__future__`` flags of this module, and without warnings: the cell will give its own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return compile(source, _FILE_NAME, mode, flags=flags | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)


def loaded_names(tree: ast.AST) -> list[str]:
    """Every name that ``tree`` loads anywhere, whatever its scope."""
    return [node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)]


def stored_names(tree: ast.AST) -> list[str]:
    """Every name that ``tree`` stores anywhere, whatever its scope; those of imports and definitions left out."""
    return [node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]


def body_of_lambda(node: ast.Lambda) -> ast.Expression:
    """What of a lambda runs when it is called, ready to be compiled."""
    return ast.Expression(ast.copy_location(ast.Lambda(args=_bare_arguments(node.args), body=node.body), node))


def body_of_function(node: Function) -> ast.Module:
    """What of a function runs when it is called, ready to be compiled."""
    fields = {name: getattr(node, name) for name in node._fields}
    fields |= {"args": _bare_arguments(node.args), "decorator_list": [], "returns": None}
    return ast.Module([ast.copy_location(type(node)(**fields), node)], type_ignores=[])


def _bare_arguments(args: ast.arguments) -> ast.arguments:
    """The parameters without defaults and annotations, which run where the function stands, not when it is called."""

    def bare(argument: ast.arg) -> ast.arg:
        return ast.copy_location(ast.arg(argument.arg), argument)

    return ast.arguments(
        posonlyargs=[bare(each) for each in args.posonlyargs],
        args=[bare(each) for each in args.args],
        vararg=None if args.vararg is None else bare(args.vararg),
        kwonlyargs=[bare(each) for each in args.kwonlyargs],
        kw_defaults=[None] * len(args.kwonlyargs),
        kwarg=None if args.kwarg is None else bare(args.kwarg),
        defaults=[],
    )
