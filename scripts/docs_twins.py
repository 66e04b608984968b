"""Shows the `_async` twins of the clients' methods as methods in the client API: in the source they are assignments.

mkdocstrings reads the source by griffe, which loads this module (`extensions` in mkdocs.yml).
"""

from __future__ import annotations

import ast
from typing import Any

import griffe

DOCSTRINGS = {"awaited": "`{}`, awaited.", "submitted": "`{}`, as a future."}
"""What the functions in tinkerpool/client/calls/futures.py give a twin as its docstring."""


class Twins(griffe.Extension):  # type: ignore[misc]  # griffe is installed only where the site is built
    """Writes twins out."""

    def on_class_node(self, *, node: ast.ClassDef, **_: Any) -> None:
        """Replace each `f_async = awaited(f)` or `submitted(f)` by a method. Raises KeyError for another assignment."""
        methods = {each.name: each for each in node.body if isinstance(each, ast.FunctionDef)}
        for index, each in enumerate(node.body):
            match each:
                case ast.Assign([ast.Name(name)], ast.Call(ast.Name(how), [ast.Name(of)])) if name.endswith("_async"):
                    [twin] = ast.parse(f'async def {name}(): "{DOCSTRINGS[how].format(of)}"').body
                    future = methods[of].returns
                    assert isinstance(twin, ast.AsyncFunctionDef)
                    assert isinstance(future, ast.Subscript), f"{of} does not return APIFuture[...]"
                    twin.args = methods[of].args
                    twin.returns = future.slice if how == "awaited" else future
                    node.body[index] = ast.copy_location(twin, each)
