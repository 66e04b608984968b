"""JSON bodies of HTTP routes, made from the shapes that the door parses: valid ones, nearly valid ones, broken ones."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import BaseModel

from coordinator.doors.openai import schemas as openai
from coordinator.doors.tinker import schemas
from scripts.reliability.fuzz.values import TOKENS_MAX, Values

DEPTH_MAX = 8


def _pass(values: Values) -> dict[str, Any]:
    tokens = values.tokens(values.rng.randint(1, 9)).tolist()
    inputs = {
        "target_tokens": {"data": tokens, "dtype": "int64", "shape": [len(tokens)]},
        "weights": {"data": [1.0] * len(tokens), "dtype": "float32"},
    }
    return {
        "model_id": values.known.newest("adapter"),
        "seq_id": values.rng.randint(1, 60),
        "forward_backward_input": {
            "loss_fn": "cross_entropy",
            "data": [{"model_input": _prompt(tokens), "loss_fn_inputs": inputs}],
        },
    }


def _prompt(tokens: list[int]) -> dict[str, Any]:
    return {"chunks": [{"type": "encoded_text", "tokens": tokens}]}


PLAIN: Mapping[type[BaseModel], Callable[[Values], dict[str, Any]]] = {
    schemas.CreateModel: lambda values: {
        "session_id": values.known.newest("session"),
        "model_seq_id": values.rng.randrange(60),
        "base_model": values.known.newest("model"),
        "lora_config": {"rank": 8},
    },
    schemas.CreateSamplingSession: lambda values: {
        "session_id": values.known.newest("session"),
        "sampling_session_seq_id": values.rng.randrange(60),
        "base_model": values.known.newest("model"),
    },
    schemas.LoadWeights: lambda values: {
        "model_id": values.known.newest("adapter"),
        "seq_id": values.rng.randint(1, 60),
        "path": values.string("path"),
    },
    schemas.JsonPass: _pass,
    schemas.OptimStep: lambda values: {
        "model_id": values.known.newest("adapter"),
        "seq_id": values.rng.randint(1, 60),
        "adam_params": {"learning_rate": 1e-3},
    },
    schemas.SaveWeights: lambda values: {
        "model_id": values.known.newest("adapter"),
        "seq_id": values.rng.randint(1, 60),
        "path": f"s{values.rng.randrange(20)}",
    },
    schemas.Sample: lambda values: {
        "sampling_session_id": values.known.newest("sampler"),
        "seq_id": values.rng.randrange(1000),
        "prompt": _prompt(values.tokens(5).tolist()),
        "num_samples": values.rng.randint(1, 3),
        "sampling_params": {"max_tokens": values.rng.randint(1, 6)},
    },
    openai.Completion: lambda values: {
        "model": values.string("model"),
        "prompt": values.tokens(5).tolist(),
        "max_tokens": values.rng.randint(1, 6),
        "stream": values.chance(0.3),
    },
    openai.Chat: lambda values: {
        "model": values.string("model"),
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": values.rng.randint(1, 6),
    },
}
"""The plainly valid form of a body, where values of its shape would hardly ever be valid."""


class Bodies:
    """Makes bodies."""

    def __init__(self, values: Values) -> None:
        self._values = values
        self._makers: dict[str, Callable[[str, int], Any]] = {
            "object": self.anything,
            "string": lambda name, _: values.string(name),
            "boolean": lambda *_: values.chance(0.5),
            "number": lambda *_: values.number(),
            "null": lambda *_: None,
        }

    def body(self, model: type[BaseModel]) -> bytes:
        """Return the bytes of a body of this shape."""
        values = self._values
        if values.chance(0.05):
            return values.data()
        if model in PLAIN and values.chance(0.5):
            made: Any = PLAIN[model](values)
        else:
            schema = _schema(model)
            made = self._of(schema, schema.get("$defs", {}), "", 0)
        if values.chance(0.4):
            made = self._with_odd_part(made)
        body = json.dumps(made, ensure_ascii=values.chance(0.5)).encode(errors="surrogatepass")
        return values.damaged(body) if values.chance(0.15) else body

    def anything(self, name: str = "", depth: int = 0) -> Any:
        """Return any JSON value."""
        values = self._values
        kind = values.rng.randrange(7 if depth < DEPTH_MAX else 5)
        if kind == 5:
            return [self.anything(name, depth + 1) for _ in range(values.count())]
        if kind == 6:
            return {values.string("key"): self.anything(name, depth + 1) for _ in range(values.count())}
        made: tuple[Any, ...] = (None, values.chance(0.5), values.integer(), values.number(), values.string(name))
        return made[kind]

    def _of(self, schema: dict[str, Any], shapes: dict[str, Any], name: str, depth: int) -> Any:
        """Return a value of a JSON schema."""
        values = self._values
        if "$ref" in schema:
            return self._of(shapes[schema["$ref"].rpartition("/")[2]], shapes, name, depth)
        if "anyOf" in schema:
            return self._of(values.rng.choice(schema["anyOf"]), shapes, name, depth)
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return values.rng.choice(schema["enum"])
        kind = schema.get("type", "any")
        if kind == "object" and "properties" in schema:
            required = schema.get("required", ())
            return {
                key: self._of(part, shapes, key, depth + 1)
                for key, part in schema["properties"].items()
                if key in required or values.chance(0.5)
            }
        if kind == "object" and isinstance(part := schema.get("additionalProperties"), dict):
            return {values.string("key"): self._of(part, shapes, name, depth + 1) for _ in range(values.count())}
        if kind == "array":
            return [self._of(schema.get("items", {}), shapes, name, depth + 1) for _ in range(max(values.count(), 1))]
        if kind == "integer":
            if name == "tokens":
                return values.rng.randrange(TOKENS_MAX)
            high = schema.get("maximum", schema.get("exclusiveMaximum", 2**63) - 1)
            return values.integer(schema.get("minimum", -(2**63)), high)
        return self._makers.get(kind, self.anything)(name, depth)

    def _with_odd_part(self, made: Any) -> Any:
        """Return the value with one part replaced, removed or added."""
        values = self._values
        if isinstance(made, dict) and made:
            key = values.rng.choice(list(made))
            if values.chance(0.5) and isinstance(made[key], dict | list):
                return made | {key: self._with_odd_part(made[key])}
            odd = values.rng.randrange(3)
            if odd == 0:
                return {name: part for name, part in made.items() if name != key}
            return made | ({key: self.anything(key)} if odd == 1 else {values.string("key"): self.anything()})
        if isinstance(made, list) and made:
            at = values.rng.randrange(len(made))
            return [*made[:at], self._with_odd_part(made[at]), *made[at + 1 :]]
        return self.anything()


@functools.cache
def _schema(model: type[BaseModel]) -> dict[str, Any]:
    return model.model_json_schema()
