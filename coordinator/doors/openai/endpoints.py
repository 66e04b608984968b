"""The endpoints: from a call to prompts in tokens, to samples, to the answer."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

import numpy as np
from starlette.responses import JSONResponse, Response

from coordinator.base.errors import Code, ServiceError
from coordinator.doors.http.calls import Call
from coordinator.doors.openai import shapes, weights
from coordinator.doors.openai.answers import Answer, Asked, ChatStyle, CompletionStyle, Style
from coordinator.doors.openai.clients import EventStream, unless_gone
from coordinator.doors.openai.errors import refused
from coordinator.doors.openai.runs import events, numbers, outcomes
from coordinator.doors.openai.samplers import Sampler, Samplers
from coordinator.doors.openai.texts import TextModel, Texts
from coordinator.doors.openai.weights import Weights
from tinkerpool.convert import to_tensor
from tinkerpool.v1 import sampling_pb2 as pb

PREFIXES = ("/v1", "/oai/api/v1")
"""Where OpenAI's clients look, and where Tinker has it."""
CHOICES_MAX = 2048
"""In one answer."""


class OpenAi:
    """The endpoints of one door."""

    def __init__(self) -> None:
        self._texts = Texts()
        self._samplers = Samplers()

    async def completions(self, call: Call) -> Response:
        """POST /completions."""
        asked = await shapes.read(call, shapes.Completion)
        found = await weights.find(call, asked.model)
        model = await self._texts.of(call, found.base_model)
        given = shapes.prompts_of(asked.prompt, model.vocab_size)
        encoded = iter(await model.encode([each for each in given if isinstance(each, str)], add_special_tokens=True))
        prompts = [next(encoded) if isinstance(each, str) else each for each in given]
        wanted = Asked(
            prompts=prompts,
            echoes=[each if isinstance(each, str) else model.text_of(each) for each in given] if asked.echo else None,
            num_choices=asked.n,
            max_tokens=max(asked.max_tokens, 1),  # the service samples one at least; nobody is told of it
            stops=asked.stops,
            num_likeliest=asked.logprobs,
            is_empty=asked.max_tokens == 0,
            wants_usage=_wants_usage(asked),
        )
        return await self._answer(call, asked, found, model, wanted, CompletionStyle())

    async def chat(self, call: Call) -> Response:
        """POST /chat/completions."""
        asked = await shapes.read(call, shapes.Chat)
        found = await weights.find(call, asked.model)
        model = await self._texts.of(call, found.base_model)
        prompt = await model.encode_chat(shapes.messages_of(asked.messages), asked.chat_template_kwargs)
        wanted = Asked(
            prompts=[prompt],
            echoes=None,
            num_choices=asked.n,
            max_tokens=asked.max_completion_tokens or asked.max_tokens or 0,
            stops=asked.stops,
            num_likeliest=asked.top_logprobs if asked.logprobs else None,
            is_empty=False,
            wants_usage=_wants_usage(asked),
        )
        return await self._answer(call, asked, found, model, wanted, ChatStyle())

    async def list_models(self, call: Call) -> Response:
        """GET /models."""
        return JSONResponse({"object": "list", "data": await weights.listing(call)})

    async def get_model(self, call: Call) -> Response:
        """GET /models/{model}."""
        return JSONResponse(await weights.describe(call, call.path("model")))

    async def _answer(
        self, call: Call, asked: shapes.Common, found: Weights, model: TextModel, wanted: Asked, style: Style
    ) -> Response:
        _check_size(wanted, model, style.prompt_param)
        sampler = await self._samplers.of(call, found)
        seqs, is_kept = numbers(call, len(wanted.prompts), is_repeatable=not asked.stream)
        params = _params(asked, model, wanted.max_tokens)
        requests = [
            _request(sampler, seq, prompt, wanted, params) for seq, prompt in zip(seqs, wanted.prompts, strict=True)
        ]
        answer = Answer(
            name=uuid.uuid4().hex,
            created_s=int(call.door.wall()),
            model_name=found.name,
            model=model,
            style=style,
            asked=wanted,
        )
        if not asked.stream:
            operations = await outcomes(call, sampler, requests, is_kept=is_kept)
            return Response(await answer.whole(operations), media_type="application/json")
        happening = events(call, sampler, requests)
        try:
            # What is refused is refused with its status: nothing is sent before something has come.
            first = await unless_gone(call.request.receive, anext(happening))
        except BaseException:
            await happening.aclose()
            raise
        return EventStream(answer.stream(first, happening))


async def unknown(call: Call) -> Response:
    """Any other path."""
    raise ServiceError(
        Code.NOT_FOUND,
        "UNKNOWN_URL",
        f"{call.request.method} {call.request.url.path[:200]} is not there: this pool has POST completions, POST "
        "chat/completions, GET models and GET models/{model}",
    )


def _wants_usage(asked: shapes.Common) -> bool:
    return asked.stream_options is not None and asked.stream_options.include_usage


def _check_size(wanted: Asked, model: TextModel, param: str) -> None:
    if len(wanted.prompts) * wanted.num_choices > CHOICES_MAX:
        raise refused("n", f"{len(wanted.prompts)} prompts with n={wanted.num_choices}: at most {CHOICES_MAX} choices")
    for prompt in wanted.prompts:
        if not prompt:
            raise refused(param, f"{param} is empty: there must be a token to go on from")
        if len(prompt) + max(wanted.max_tokens, 1) > model.max_tokens:
            raise refused(
                param,
                f"{model.name} takes {model.max_tokens} tokens in all, and the prompt has {len(prompt)}"
                + (f" while max_tokens is {wanted.max_tokens}" if wanted.max_tokens else "")
                + ": shorten the prompt, or ask for fewer tokens",
                "CONTEXT_LENGTH_EXCEEDED",
            )


def _params(asked: shapes.Common, model: TextModel, max_tokens: int) -> pb.SamplingParams:
    params = pb.SamplingParams(
        max_tokens=max_tokens, temperature=asked.temperature, top_k=asked.top_k, top_p=asked.top_p, seed=asked.seed
    )
    if asked.stops:
        # With OpenAI they come on top of what ends a text by itself.
        params.stop.CopyFrom(pb.StopCondition(strings=asked.stops, tokens=model.eos_tokens))
    return params


def _request(
    sampler: Sampler, seq: int, prompt: Sequence[int], wanted: Asked, params: pb.SamplingParams
) -> pb.SampleRequest:
    num_likeliest, is_echoed = wanted.num_likeliest, wanted.echoes is not None
    return pb.SampleRequest(
        sampler_id=sampler.sampler_id,
        seq=seq,
        prompt=to_tensor(np.array(prompt, np.int32)),
        num_samples=wanted.num_choices,
        params=params,
        include_prompt_logprobs=is_echoed and num_likeliest is not None,
        topk_prompt_logprobs=(num_likeliest or 0) if is_echoed else 0,
        topk_sample_logprobs=num_likeliest or 0,
    )
