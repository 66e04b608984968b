"""Types that JSON bodies of both protocols are made of."""

from __future__ import annotations

from typing import Annotated, TypeVar

from pydantic import Field

Item = TypeVar("Item")
Items = Annotated[list[Item], Field(fail_fast=True)]
"""A list. Validation stops at the first wrong item: reasons for a million wrong items would take gigabytes."""
Named = Annotated[dict[str, Item], Field(fail_fast=True)]
"""A dictionary, with the same limit."""
