"""Names that a cell reaches through a string: ``eval("x")``, ``globals()["x"]``, ``frame.query("a > @x")``.

Whether such code runs, and whether the string means a name of the notebook, is never sure. All other strings, and
strings that are put together at run time, are not looked at; for these the user has ``--with``.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from taas_magic.namespace.code_names import loaded_names, parsed, stored_names

_NAMESPACE_CALLS = frozenset({"globals", "locals", "vars"})
_NAMESPACE_METHODS = frozenset({"get", "pop", "setdefault", "__getitem__"})
_QUERY_NAME = re.compile(r"@([^\W\d]\w*)")


@dataclass(frozen=True)
class StringNames:
    """Names that may be read, in order, and names that may be bound."""

    reads: tuple[str, ...] = ()
    binds: tuple[str, ...] = ()


def names_through_strings(node: ast.AST) -> StringNames:
    """The names that ``node`` itself, not its children, reaches through a string or the module ``__main__``."""
    match node:
        case ast.Call(func=ast.Name() as function):
            return _through_function(node, function.id)
        case ast.Call(func=ast.Attribute() as method):
            return _through_method(node, method)
        case ast.Subscript(value=space, slice=ast.Constant(value=str(name)), ctx=context) if _is_namespace(space):
            reads = () if isinstance(context, ast.Store) else (name,)
            return StringNames(reads, () if isinstance(context, ast.Load) else (name,))
        case ast.Attribute(value=module, attr=name) if _is_main(module):
            return StringNames((name,))
    return StringNames()


def names_in_python(python: str) -> StringNames:
    """All names in ``python``, whatever their scope; none where it doesn't parse."""
    try:
        tree = parsed(python.strip())
    except (SyntaxError, ValueError):
        return StringNames()
    return StringNames(tuple(loaded_names(tree)), tuple(stored_names(tree)))


def text_of(node: ast.expr) -> str:
    """The text of a string, or the fixed parts of an f-string; empty for anything else."""
    if isinstance(node, ast.JoinedStr):
        return " ".join(text_of(part) for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _through_function(node: ast.Call, function: str) -> StringNames:
    match function, node.args:
        case (("eval" | "exec"), [code, *_]):
            return names_in_python(text_of(code))
        case "getattr", [module, name, *_] if _is_main(module):
            return StringNames((text_of(name),))
    return StringNames()


def _through_method(node: ast.Call, method: ast.Attribute) -> StringNames:
    if method.attr in _NAMESPACE_METHODS and node.args and _is_namespace(method.value):
        return StringNames((text_of(node.args[0]),))
    if method.attr not in ("query", "eval"):
        return StringNames()
    texts = list(_expression_texts(node))
    reads = [name for text in texts for name in _QUERY_NAME.findall(text)]
    if isinstance(method.value, ast.Name) and method.value.id in ("pd", "pandas"):  # here names need no @
        reads += [name for text in texts for name in names_in_python(text.replace("@", "")).reads]
    return StringNames(tuple(reads))


def _expression_texts(node: ast.Call) -> Iterator[str]:
    """The texts that pandas may take as the expression of ``query`` or ``eval``."""
    yield from map(text_of, node.args[:1])
    yield from (text_of(keyword.value) for keyword in node.keywords if keyword.arg == "expr")


def _is_namespace(node: ast.expr) -> bool:
    """Whether ``node`` is ``globals()``, ``locals()``, ``vars()``, or ``vars(__main__)``, ``__main__.__dict__``."""
    match node:
        case ast.Call(func=ast.Name(id=name), args=args) if name in _NAMESPACE_CALLS:
            return not args or _is_main(args[0])
        case ast.Attribute(value=module, attr="__dict__"):
            return _is_main(module)
    return False


def _is_main(node: ast.expr) -> bool:
    """Whether ``node`` is ``__main__`` or ``sys.modules["__main__"]``."""
    match node:
        case ast.Name(id="__main__"):
            return True
        case ast.Subscript(value=ast.Attribute(attr="modules"), slice=ast.Constant(value="__main__")):
            return True
    return False
