"""The endpoints: from a call to prompts in tokens, to samples, to the response."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

import numpy as np
from starlette.responses import JSONResponse, Response

from coordinator.base.errors import Code, ServiceError
from coordinator.doors.http.calls import INLINE_JSON_BYTES_MAX, Call
from coordinator.doors.http.responses import event_stream
from coordinator.doors.openai import schemas, weights
from coordinator.doors.openai.errors import refused
from coordinator.doors.openai.responses import ChatStyle, CompletionStyle, ResponseOptions, ResponseWriter, Style
from coordinator.doors.openai.samples import draw_seqs, events, outcomes
from coordinator.doors.openai.text_models import TextModel, TextModels
from coordinator.doors.openai.weights import Sampler, Samplers, Weights
from tinkerpool.convert import to_tensor
from tinkerpool.v1 import sampling_pb2 as pb

PREFIXES = ("/v1", "/oai/api/v1")
"""Path prefixes: OpenAI's, and Tinker's for the same API."""
CHOICES_MAX = 2048
"""Most choices in one response."""
LOGPROBS_MAX = 1 << 18
"""Most log-probabilities in one response: each choice repeats those of an echoed prompt. In JSON each has 20 to 100
bytes, and 250 while it is made."""
ECHO_CHARACTERS_MAX = 16 << 20
"""Most characters of echoed prompts in one response, likewise."""


class OpenAi:
    """The endpoints of one door."""

    def __init__(self) -> None:
        self._texts = TextModels()
        self._samplers = Samplers()

    async def completions(self, call: Call) -> Response:
        """POST /completions."""
        asked, _ = await schemas.read(call, schemas.Completion)
        found = await weights.find(call, asked.model)
        model = await self._texts.of(call, found.base_model)
        given = schemas.prompts_of(asked.prompt, model.vocab_size)
        texts = [each for each in given if isinstance(each, str)]
        encoded = iter(await model.encode(texts, call.principal.tenant_id, add_special_tokens=True))
        prompts = [next(encoded) if isinstance(each, str) else each for each in given]
        options = ResponseOptions(
            prompts=prompts,
            echoes=await model.texts_of(given, call.principal.tenant_id) if asked.echo else None,
            num_choices=asked.n,
            max_tokens=max(asked.max_tokens, 1),  # the service samples at least one token; `is_empty` drops it
            stops=asked.stops,
            num_top=asked.logprobs,
            is_empty=asked.max_tokens == 0,
            wants_usage=_wants_usage(asked),
        )
        return await self._respond(call, asked, found, model, options, CompletionStyle())

    async def chat(self, call: Call) -> Response:
        """POST /chat/completions."""
        asked, num_bytes = await schemas.read(call, schemas.Chat)
        found = await weights.find(call, asked.model)
        model = await self._texts.of(call, found.base_model)
        messages = await call.in_turn(
            num_bytes, lambda: schemas.messages_of(asked.messages), inline_bytes_max=INLINE_JSON_BYTES_MAX
        )
        prompt = await model.encode_chat(messages, asked.chat_template_kwargs, num_bytes, call.principal.tenant_id)
        options = ResponseOptions(
            prompts=[prompt],
            echoes=None,
            num_choices=asked.n,
            max_tokens=asked.max_completion_tokens or asked.max_tokens or 0,
            stops=asked.stops,
            num_top=asked.top_logprobs if asked.logprobs else None,
            is_empty=False,
            wants_usage=_wants_usage(asked),
        )
        return await self._respond(call, asked, found, model, options, ChatStyle())

    async def list_models(self, call: Call) -> Response:
        """GET /models."""
        return JSONResponse({"object": "list", "data": await weights.listing(call)})

    async def get_model(self, call: Call) -> Response:
        """GET /models/{model}."""
        return JSONResponse(await weights.describe(call, call.path("model")))

    async def _respond(
        self,
        call: Call,
        asked: schemas.Common,
        found: Weights,
        model: TextModel,
        options: ResponseOptions,
        style: Style,
    ) -> Response:
        _check_size(options, model, style.prompt_param)
        sampler = await self._samplers.of(call, found)
        seqs, is_kept = draw_seqs(call, len(options.prompts), is_repeatable=not asked.stream)
        params = _params(asked, model, options.max_tokens)
        requests = [
            _request(sampler, seq, prompt, options, params) for seq, prompt in zip(seqs, options.prompts, strict=True)
        ]
        writer = ResponseWriter(
            call=call,
            name=uuid.uuid4().hex,
            created_s=int(call.door.time.wall()),
            model_name=found.name,
            model=model,
            style=style,
            options=options,
        )
        if not asked.stream:
            operations = await outcomes(call, sampler, requests, is_kept=is_kept)
            return Response(await writer.whole(operations), media_type="application/json")
        stream = events(call, sampler, requests, takes_tokens=not options.is_streamed_late)
        try:
            # The response begins with the first event, so that a refusal can have its status.
            first = await anext(stream)
        except BaseException:
            await stream.aclose()
            raise
        return event_stream(writer.stream(first, stream, call.door.backend.authenticator.while_valid(call.principal)))


async def unknown(call: Call) -> Response:
    """Refuse any other path."""
    raise ServiceError(
        Code.NOT_FOUND,
        "UNKNOWN_URL",
        f"{call.request.method} {call.request.url.path[:200]} is not an endpoint: this pool has POST completions, POST "
        "chat/completions, GET models and GET models/{model}",
    )


def _wants_usage(asked: schemas.Common) -> bool:
    return asked.stream_options is not None and asked.stream_options.include_usage


def _check_size(options: ResponseOptions, model: TextModel, param: str) -> None:
    if len(options.prompts) * options.num_choices > CHOICES_MAX:
        raise refused(
            "n",
            f"{len(options.prompts)} prompts with n={options.num_choices}: at most {CHOICES_MAX} choices are allowed",
        )
    num_kept_min = 0 if options.is_empty else max(options.max_tokens, 1)
    for prompt in options.prompts:
        if not prompt:
            raise refused(param, f"{param} is empty: send at least one token")
        if len(prompt) + num_kept_min > model.max_tokens:
            raise refused(
                param,
                f"{model.name} takes {model.max_tokens} tokens in all, and the prompt has {len(prompt)}"
                + (f" while max_tokens is {options.max_tokens}" if options.max_tokens and not options.is_empty else "")
                + ": shorten the prompt, or request fewer tokens",
                "CONTEXT_LENGTH_EXCEEDED",
            )
    if options.num_top is not None and (number := _num_logprobs(options, model)) > LOGPROBS_MAX:
        raise refused(
            "logprobs",
            f"the response may have {number} log-probabilities, and at most {LOGPROBS_MAX} are allowed: ask for fewer "
            "choices (n), tokens (max_tokens) or log-probabilities of each token, or without echo",
        )
    num_characters = options.num_choices * sum(map(len, options.echoes or ()))
    if num_characters > ECHO_CHARACTERS_MAX:
        raise refused(
            "echo",
            f"the response would repeat {num_characters} characters of prompts, and at most {ECHO_CHARACTERS_MAX} are "
            "allowed: ask for fewer choices (n), or without echo",
        )


def _num_logprobs(options: ResponseOptions, model: TextModel) -> int:
    """Return the log-probabilities that a response has at most."""
    num_positions = 0
    for prompt in options.prompts:
        num_positions += options.max_tokens or model.max_tokens - len(prompt)
        num_positions += len(prompt) if options.echoes is not None else 0
    return options.num_choices * num_positions * (1 + (options.num_top or 0))


def _params(asked: schemas.Common, model: TextModel, max_tokens: int) -> pb.SamplingParams:
    # In OpenAI's API, stop strings are added to the model's own end of a text; in the contract they replace it.
    stop = pb.StopCondition(strings=asked.stops, tokens=model.eos_tokens) if asked.stops else None
    return pb.SamplingParams(
        max_tokens=max_tokens,
        temperature=asked.temperature,
        top_k=asked.top_k,
        top_p=asked.top_p,
        seed=asked.seed,
        stop=stop,
    )


def _request(
    sampler: Sampler, seq: int, prompt: Sequence[int], options: ResponseOptions, params: pb.SamplingParams
) -> pb.SampleRequest:
    num_top, is_echoed = options.num_top, options.echoes is not None
    return pb.SampleRequest(
        sampler_id=sampler.sampler_id,
        seq=seq,
        prompt=to_tensor(np.array(prompt, np.int32)),
        num_samples=options.num_choices,
        params=params,
        include_prompt_logprobs=is_echoed and num_top is not None,
        topk_prompt_logprobs=(num_top or 0) if is_echoed else 0,
        topk_sample_logprobs=num_top or 0,
    )
