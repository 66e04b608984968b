"""Tries the library's gated delta rule on the device, with a model's sizes, against our own and against itself.

Wrong gradients look like gradients. So a rule that raises, that gives other numbers than ours, or other bits to a
sequence with others beside it, is not used: `delta_rule` then computes linear attention.
"""

from __future__ import annotations

import logging

from torch import Tensor

from workers.model.base_model import BaseModel
from workers.model.library_delta import LibraryDelta, Rule, rule_of_library
from workers.model.packed_delta import PackedDelta
from workers.selftest.sequence_invariance import TRIAL_LENGTHS, packed_keeps, packed_results, random_rows

logger = logging.getLogger(__name__)

TOLERANCE = 2.0**-5
"""Of the largest value of results and of each gradient: roundings to the 8 bits of bf16, along a sequence."""


def tried_rule(base_model: BaseModel) -> Rule | None:
    """Return the library's rule if it can be used and passes; otherwise None, and log why."""
    rule = rule_of_library(base_model.device, base_model.dtype)
    if rule is None:
        return None
    if problem := problem_of(base_model, rule):
        logger.warning("%s: linear attention is ours: fla %s", base_model.name, problem)
        return None
    return rule


def problem_of(base_model: BaseModel, rule: Rule) -> str:
    """Return what is wrong with a rule, for a log; empty: nothing was found."""
    weights = base_model.delta_layers[0].delta_weights
    rows = random_rows(weights, base_model.dtype)
    try:
        actual = packed_results(LibraryDelta(rule, TRIAL_LENGTHS, base_model.device), weights, rows)
        keeps = packed_keeps(lambda lengths: LibraryDelta(rule, lengths, base_model.device), weights, rows)
    except Exception as error:  # noqa: BLE001 (whatever it is: our own rule computes)
        return f"fails: {error}"
    expected = packed_results(PackedDelta(TRIAL_LENGTHS, base_model.device), weights, rows)
    if not all(map(_is_near, actual, expected)):
        return "gives other numbers"
    return "" if keeps else "gives a sequence other bits beside others"


def _is_near(actual: Tensor, expected: Tensor) -> bool:
    difference = (actual.float() - expected.float()).abs().max()
    return bool(difference <= TOLERANCE * expected.float().abs().max())  # False if it is not a number
