"""The client has the names and arguments of the installed Tinker SDK, but for the differences listed here."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, assert_type, get_type_hints

import numpy as np
import pytest
import tinker
import torch

import tinkerpool
from tests.support.doors.fake_transport import FakePool
from tinkerpool import APIFuture, RestClient, SamplingClient, ServiceClient, TensorData, types
from tinkerpool.client.calls import encoding
from tinkerpool.foreign_names import INSTEAD, refuse
from tinkerpool.foreign_names import MISSING as MISSING_IN_MODULES
from tinkerpool.v1 import sampling_pb2

CLIENTS = ("ServiceClient", "TrainingClient", "SamplingClient", "RestClient", "APIFuture")

MISSING = {
    "APIFuture.coroutine": "await the future itself",
    "RestClient.assign_session_project": "a pool has no projects",
    "RestClient.assign_session_project_async": "a pool has no projects",
    "RestClient.export_session_trace": "`tinkerpool session trace` writes the file",
    "RestClient.export_session_trace_async": "`tinkerpool session trace` writes the file",
    "RestClient.get_audit_log": "for administrators: `tinkerpool audit`",
    "RestClient.get_audit_log_async": "for administrators: `tinkerpool audit`",
    "RestClient.get_billing_usage": "a pool sends no bills: get_usage",
    "RestClient.get_billing_usage_async": "a pool sends no bills: get_usage",
    "RestClient.get_current_checkpoint_storage_usage": "`tinkerpool usage` shows the bytes",
    "RestClient.get_current_checkpoint_storage_usage_async": "`tinkerpool usage` shows the bytes",
    "RestClient.get_external_weights_urls": "export_checkpoint writes the files",
    "RestClient.get_external_weights_urls_async": "export_checkpoint writes the files",
    "RestClient.get_telemetry": "the client reports to nobody",
    "RestClient.get_weights_info_by_tinker_path": "get_checkpoint",
    "RestClient.search_sessions": "list_sessions",
    "SamplingClient.create": "internal: create_sampling_client",
    "SamplingClient.get_telemetry": "the client reports to nobody",
    "SamplingClient.on_queue_state_change": "internal",
    "ServiceClient.create_custom_loss": "forward_backward_custom runs any function",
    "ServiceClient.get_console_url": "a pool has no web pages",
    "ServiceClient.get_telemetry": "the client reports to nobody",
    "ServiceClient.holder": "internal",
    "TrainingClient.get_console_url": "a pool has no web pages",
    "TrainingClient.get_telemetry": "the client reports to nobody",
}
"""What the SDK has and the client does not, with the reason or what to use."""

DIFFERENT = {
    "RestClient.__init__: _holder": "private; here it is a connection",
    "ServiceClient.__init__: default_headers_overrides": "gRPC has no such headers",
    "ServiceClient.__init__: display_name": "label sessions by user_metadata",
    "ServiceClient.__init__: kwargs": "unknown arguments are refused",
    "ServiceClient.__init__: project_id": "a pool has no projects",
    "ServiceClient.__init__: user_metadata": "the address comes first: it is what a user of a pool passes",
    "ServiceClient.close: detail": "a session of a pool ends without a verdict",
    "ServiceClient.close: status": "a session of a pool ends without a verdict",
}
"""Parameters of the SDK that are missing or elsewhere; with more freedom than in the SDK they are no difference."""

CONSTRUCTED_BY_USERS = ("ServiceClient", "RestClient")


def parameters(function: Any) -> list[inspect.Parameter]:
    return [each for name, each in inspect.signature(function).parameters.items() if name != "self"]


def differences(name: str, theirs: Any, ours: Any) -> set[str]:
    """Return the parameters of the SDK's function with which a call of it would not do here."""
    found = {each.name: (index, each) for index, each in enumerate(parameters(ours))}
    different = set()
    for index, param in enumerate(parameters(theirs)):
        our_index, our = found.get(param.name, (None, None))
        is_positional = param.kind is param.POSITIONAL_OR_KEYWORD
        fits = our is not None and (not is_positional or (our.kind is param.kind and our_index == index))
        # An argument that the SDK requires may have a default here, and a base model or rank a better one.
        has_same_default = our is not None and (our.default == param.default or our.default is None)
        if not fits or not (has_same_default or param.default is param.empty):
            different.add(f"{name}: {param.name}")
    return different


def members(client: Any) -> dict[str, Any]:
    return {name: getattr(client, name) for name in dir(client) if not name.startswith("_")}


def test_each_public_name_of_the_sdk_is_here_or_listed_with_a_reason() -> None:
    missing = {
        f"{client}.{name}"
        for client in CLIENTS
        for name in members(getattr(tinker, client))
        if not hasattr(getattr(tinkerpool, client), name)
    }
    assert missing == MISSING.keys()


def test_each_public_name_of_the_sdks_modules_is_here_or_refused_with_what_to_use() -> None:
    # Modules in `types` have the same names again.
    in_types = {name for name, value in members(tinker.types).items() if not inspect.ismodule(value)}
    missing = {name for name in members(tinker) if not hasattr(tinkerpool, name)}
    missing |= {name for name in in_types if not hasattr(types, name)}
    assert missing == MISSING_IN_MODULES.keys()
    page = (Path(__file__).resolve().parents[3] / "docs" / "tinker.md").read_text(encoding="utf-8")
    for name, instead in MISSING_IN_MODULES.items():
        with pytest.raises(AttributeError, match=f"has no attribute '{name}': {re.escape(instead)}"):
            getattr(tinkerpool if hasattr(tinker, name) else types, name)
        assert not hasattr(tinker, name) or f"`{name}`" in page


def test_each_name_that_is_here_and_in_both_modules_is_one_thing() -> None:
    both = members(tinker).keys() & members(tinker.types).keys() - MISSING_IN_MODULES.keys()
    assert {"AdamParams", "ParsedCheckpointTinkerPath"} <= both
    assert all(getattr(tinkerpool, name) is getattr(types, name) for name in both)


def test_a_checkpoints_path_has_the_parts_that_the_sdk_finds() -> None:
    for kind in ("weights", "sampler_weights", "external_weights"):
        path = f"tinker://s:train:0/{kind}/a"
        theirs = tinker.ParsedCheckpointTinkerPath.from_tinker_path(path)
        ours = tinkerpool.ParsedCheckpointTinkerPath.from_tinker_path(path)
        assert theirs.model_dump() == dataclasses.asdict(ours)
    with pytest.raises(ValueError, match="expected tinker://"):
        tinkerpool.ParsedCheckpointTinkerPath.from_tinker_path("tinker://a")


def test_adamw_may_be_named_as_the_optimizer(service: ServiceClient) -> None:
    service.create_lora_training_client("toy", optimizer=tinkerpool.AdamOptimizerConfig())


@pytest.mark.parametrize(
    ("function", "argument", "message"),
    [
        (types.AdamParams, "lr", "AdamParams has no argument 'lr': did you mean learning_rate?"),
        (types.AdamParams, "betas", "AdamParams has no argument 'betas': did you mean beta1 and beta2?"),
        (types.AdamParams, "max_tokens", "AdamParams has no argument 'max_tokens': it takes learning_rate, beta1,"),
        (types.SamplingParams, "max_new_tokens", "'max_new_tokens': did you mean max_tokens?"),
        (types.SamplingParams, "temprature", "'temprature': did you mean temperature?"),
        (ServiceClient, "url", "ServiceClient has no argument 'url': did you mean base_url?"),
        (
            ServiceClient.create_lora_training_client,
            "lora_rank",
            "ServiceClient.create_lora_training_client has no argument 'lora_rank': did you mean rank?",
        ),
        (ServiceClient.create_lora_training_client, "run_name", "no argument 'run_name': did you mean name?"),
        (ServiceClient.create_lora_training_client, "tags", "no argument 'tags': did you mean labels?"),
        (
            tinkerpool.SamplingClient.sample,
            "max_new_tokens",
            "'max_new_tokens': did you mean sampling_params=SamplingParams(max_tokens=...)?",
        ),
    ],
)
def test_an_argument_by_its_name_elsewhere_is_refused_with_its_name_here(
    function: Callable[..., object], argument: str, message: str
) -> None:
    with pytest.raises(TypeError, match=re.escape(message)):
        function(**{argument: 1})


def test_other_mistakes_in_a_call_are_said_as_python_says_them() -> None:
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'prompt'"):
        tinkerpool.SamplingClient.sample(None)  # type: ignore[call-arg,arg-type]
    with pytest.raises(TypeError, match="takes 1 positional argument but 2 were given"):
        types.AdamParams(1e-3)  # type: ignore[call-arg]


def test_each_argument_of_the_sdk_is_taken_or_listed_with_a_reason() -> None:
    different = set()
    for client in CLIENTS:
        theirs, ours = getattr(tinker, client), getattr(tinkerpool, client)
        names = [name for name, value in members(theirs).items() if callable(value) and hasattr(ours, name)]
        if client in CONSTRUCTED_BY_USERS:
            names.append("__init__")
        for name in names:
            different |= differences(f"{client}.{name}", getattr(theirs, name), getattr(ours, name))
    assert different == DIFFERENT.keys()


def test_every_async_method_takes_what_its_twin_takes() -> None:
    for client in CLIENTS:
        ours = members(getattr(tinkerpool, client))
        for name in ours:
            if f"{name}_async" in ours and name not in {"result", "close"}:
                first, second = parameters(ours[name]), parameters(ours[f"{name}_async"])
                assert [(p.name, p.kind, p.default) for p in first] == [(p.name, p.kind, p.default) for p in second], (
                    name
                )


def test_every_async_method_looks_as_if_it_was_written_out() -> None:
    for client in CLIENTS:
        ours = members(getattr(tinkerpool, client))
        for name in [name for name in ours if f"{name}_async" in ours]:
            method, twin = ours[name], ours[f"{name}_async"]
            assert inspect.iscoroutinefunction(twin)
            assert (twin.__name__, twin.__qualname__) == (f"{name}_async", f"{client}.{name}_async")
            assert twin.__module__ == method.__module__
            assert name == "result" or inspect.getdoc(twin) in {f"`{name}`, awaited.", f"`{name}`, as a future."}
            result = method.__annotations__["return"]
            if client != "TrainingClient":
                result = re.sub(r"^APIFuture\[(.*)\]$", r"\1", result)
            assert (twin.__annotations__["return"], inspect.signature(twin).return_annotation) == (result, result)
            assert get_type_hints(twin).keys() == twin.__annotations__.keys()


async def test_an_async_method_calls_its_twin_also_an_overridden_one_once_it_is_awaited(
    pool: FakePool, service: ServiceClient
) -> None:
    class Recording(RestClient):
        def get_sampler(self, sampler_id: str) -> APIFuture[types.GetSamplerResponse]:
            looked_up.append(sampler_id)
            return super().get_sampler(sampler_id)

    looked_up: list[str] = []
    pool.handlers["GetSampler"] = lambda request: sampling_pb2.GetSamplerResponse(sampler=sampling_pb2.Sampler())
    looking_up = Recording(service._connection).get_sampler_async(sampler_id="s:sample:0")
    assert not looked_up
    await looking_up
    assert looked_up == ["s:sample:0"]


async def test_a_type_checker_sees_arguments_and_results_of_async_methods(service: ServiceClient) -> None:
    client = await service.create_lora_training_client_async("toy")
    future = assert_type(await client.optim_step_async(adam_params=None), APIFuture[types.OptimStepResponse])
    assert_type(await future, types.OptimStepResponse)
    sampler = assert_type(await client.save_weights_and_get_sampling_client_async(), SamplingClient)
    assert_type(await sampler.sample_async([1], sampling_params=None), types.SampleResponse)
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        await client.optim_step_async(path="a")  # type: ignore[call-arg]


@pytest.mark.parametrize("name", INSTEAD)
def test_an_argument_that_means_nothing_here_is_refused_with_what_to_do(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is not supported here: "):
        refuse(**{name: object()})
    refuse(**{name: None})


def test_the_refused_arguments_are_checked_where_they_are_taken(service: ServiceClient) -> None:
    client = service.create_lora_training_client("toy")
    rest = service.create_rest_client()
    path = "tinker://x:train:0/weights/a"
    anything: Any = object()
    calls: list[Callable[[], object]] = [
        lambda: service.create_lora_training_client("toy", optimizer=anything),
        lambda: service.create_training_client_from_state(path, weights_access_token=anything),
        lambda: service.create_training_client_from_state(path, optimizer=anything),
        lambda: service.create_training_client_from_state_with_optimizer(path, weights_access_token=anything),
        lambda: service.create_sampling_client(base_model="toy", retry_config=anything),
        lambda: service.copy_weights(path, weights_access_token=anything),
        lambda: client.load_state(path, anything),
        lambda: client.load_state_with_optimizer(path, anything),
        lambda: client.save_weights_and_get_sampling_client(None, anything),
        lambda: client.create_sampling_client(path, anything),
        lambda: client.save_weights_external("a", None, anything),
        lambda: rest.list_training_runs(project_id=anything),
        lambda: rest.list_sessions(access_scope=anything),
        lambda: rest.get_session("s", anything),
        lambda: rest.get_training_run("x:train:0", anything),
        lambda: rest.copy_weights(path, anything),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="is not supported here"):
            call()


def test_a_step_takes_its_parameters_under_both_names(pool: FakePool, service: ServiceClient) -> None:
    client = service.create_lora_training_client("toy")
    given = types.AdamParams(learning_rate=0.5)
    for future in (
        client.optim_step(given),
        client.optim_step(optim_params=given),
        client.optim_step(adam_params=given),
    ):
        future.result(60)
    assert [request.adam.learning_rate for request in pool.requests("OptimStep")] == [0.5, 0.5, 0.5]
    with pytest.raises(ValueError, match="two names of one argument"):
        client.optim_step(given, adam_params=given)


def test_weights_for_export_are_saved_under_a_name(pool: FakePool, service: ServiceClient) -> None:
    client = service.create_lora_training_client("toy")
    client.save_weights_external("final", ttl_seconds=5).result(60)
    [request] = pool.requests("SaveWeightsForSampler")
    assert (request.name, request.ttl_seconds, request.for_export) == ("final", 5, True)
    with pytest.raises(ValueError, match="name is empty"):
        client.save_weights_external("")


def test_a_sampler_is_looked_up(pool: FakePool, service: ServiceClient) -> None:
    sampler = sampling_pb2.Sampler(sampler_id="s:sample:0", base_model="toy")
    pool.handlers["GetSampler"] = lambda request: sampling_pb2.GetSamplerResponse(sampler=sampler)
    found = service.create_rest_client().get_sampler("s:sample:0").result(60)
    assert found == types.GetSamplerResponse(sampler_id="s:sample:0", base_model="toy", model_path=None)


def test_a_matrix_in_sparse_rows_is_held_dense() -> None:
    matrix = np.array([[0, 7, 0], [0, 0, 0], [5, 0, 6]])
    theirs = tinker.TensorData.from_torch_sparse(torch.tensor(np.pad(matrix, ((0, 0), (0, 5)))))
    assert theirs.sparse_crow_indices is not None
    rows = {"sparse_crow_indices": [0, 1, 1, 3], "sparse_col_indices": [1, 0, 2]}
    ours = TensorData([7, 5, 6], "int64", [3, 3], **rows)
    assert ours == TensorData(matrix) == TensorData.from_torch_sparse(torch.tensor(matrix))
    targets = [[-1, 7, -1], [-1, -1, -1], [5, -1, 6]]
    for tensor in (ours, TensorData.from_torch_sparse(torch.tensor(matrix))):
        assert encoding.prompt_targets(tensor) == encoding.prompt_targets(targets)
    assert TensorData.from_torch_sparse(torch.arange(3)) == TensorData([0, 1, 2])


@pytest.mark.parametrize(
    ("shape", "crow_indices", "col_indices", "message"),
    [
        ([3], [0, 1, 1, 3], [1, 0, 2], "two dimensions"),
        ([3, 3], [0, 1, 3], [1, 0, 2], "must have 4 numbers"),
        ([3, 3], [0, 2, 1, 3], [1, 0, 2], "none below"),
        ([3, 3], [0, 1, 1, 2], [1, 0, 2], "number of values, 3"),
        ([3, 3], [0, 1, 1, 3], [1, 0, 3], "columns from 0 to 2"),
        ([3, 3], [0, 1, 1, 3], None, "belong together"),
    ],
)
def test_sparse_rows_that_do_not_fit_are_refused(
    shape: list[int], crow_indices: list[int], col_indices: list[int] | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        TensorData([7, 5, 6], "int64", shape, crow_indices, col_indices)
