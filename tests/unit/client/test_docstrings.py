"""`help()` of every public name says what it is, with each field of each type."""

from __future__ import annotations

import dataclasses
import inspect
import re
from typing import Any

import pytest

import tinkerpool
from tinkerpool import errors, types

CLASSES: dict[str, Any] = {
    name: value
    for module in (tinkerpool, types, errors)
    for name in (tinkerpool.__all__ if module is tinkerpool else vars(module))
    if inspect.isclass(value := getattr(module, name))
    and value.__module__.startswith("tinkerpool")
    and not name.startswith("_")
}


@pytest.mark.parametrize("public", CLASSES.values(), ids=CLASSES)
def test_a_class_its_methods_and_its_fields_are_explained(public: Any) -> None:
    assert public.__doc__, "no docstring"
    assert not public.__doc__.startswith(f"{public.__name__}("), "the docstring that dataclass makes"
    for name, member in inspect.getmembers(public):
        if not name.startswith("_") and (inspect.isfunction(member) or isinstance(member, property)):
            assert inspect.getdoc(member), f"{name} has no docstring"
    if dataclasses.is_dataclass(public):
        fields = {field.name for field in dataclasses.fields(public)}
        explained = re.findall(r"^        (\w+): ", public.__doc__.partition("Attributes:\n")[2], flags=re.MULTILINE)
        assert set(explained) == fields
