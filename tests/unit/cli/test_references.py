"""What an argument of a command means: unique beginnings of ids, names, and whole ids, which mean themselves."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import pytest
from google.protobuf.message import Message

from coordinator.base.errors import Code, ServiceError
from tests.support.command_line import Run
from tests.support.doors.fake_service import KEY, FakeService
from tests.support.doors.open_doors import open_door
from tinkerpool.credentials import Credentials, write_credentials
from tinkerpool.v1.adapters_pb2 import Adapter, DeleteAdapterResponse, ListAdaptersResponse
from tinkerpool.v1.admin_pb2 import ApiKey, ListApiKeysResponse, RevokeApiKeyResponse, RotateApiKeyResponse
from tinkerpool.v1.checkpoints_pb2 import Checkpoint, DeleteCheckpointResponse, ListCheckpointsResponse
from tinkerpool.v1.history_pb2 import GetHistoryEntryResponse, ListHistoryResponse

FIRST, SECOND, OTHER = "3f2a11:train:0", "3f2a11:train:1", "77ab:train:0"


@pytest.fixture
def service() -> Iterator[FakeService]:
    """A service that ignores references, as a pool of an older version: a command must check what it gets."""
    adapters = [
        Adapter(adapter_id=FIRST, name="sft"),
        Adapter(adapter_id=SECOND, name="sft"),
        Adapter(adapter_id=OTHER, name="poet"),
    ]
    paths = {FIRST: ["weights/step-10", "sampler_weights/final"], OTHER: ["weights/only"]}
    checkpoints = [
        Checkpoint(path=f"tinker://{each.adapter_id}/{rest}", adapter_id=each.adapter_id, adapter_name=each.name)
        for each in adapters
        for rest in paths.get(each.adapter_id, ())
    ]
    keys = [
        ApiKey(key_id="aaaaaaaaaaa1"),
        ApiKey(key_id="aaaaaaaaaaa2", is_revoked=True),
        ApiKey(key_id="bbbbbbbbbbb1", tenant="bob"),
    ]
    fake = FakeService(
        list_adapters=ListAdaptersResponse(adapters=adapters),
        delete_adapter=DeleteAdapterResponse(),
        list_checkpoints=ListCheckpointsResponse(checkpoints=checkpoints),
        delete_checkpoint=DeleteCheckpointResponse(),
        list_api_keys=ListApiKeysResponse(api_keys=keys),
        revoke_api_key=RevokeApiKeyResponse(),
        rotate_api_key=RotateApiKeyResponse(key="tp_ddddddddddd1_new"),
    )
    with open_door(fake) as url:
        write_credentials(Credentials(url=url, api_key=KEY))
        yield fake


def last(service: FakeService, name: str) -> Any:
    """Return the request of the last call, which is of this use case."""
    called, _, request = service.calls[-1]
    assert called == name
    assert isinstance(request, Message)
    return request


@pytest.mark.parametrize(
    ("reference", "adapter_id"),
    [("77", OTHER), ("poet", OTHER), (OTHER, OTHER), ("3f:train:1", SECOND), (FIRST, FIRST), ("3f2a11:train:0", FIRST)],
)
def test_an_adapter_is_found_by_a_unique_beginning_or_its_name(
    run: Run, service: FakeService, reference: str, adapter_id: str
) -> None:
    done = run("adapter", "delete", reference, "--yes")
    assert done.code == 0, done.err
    assert last(service, "delete_adapter").adapter_id == adapter_id


@pytest.mark.parametrize("reference", ["3f2a11", "sft", ":train:0"])
def test_an_ambiguous_reference_lists_the_candidates_with_their_names(
    run: Run, service: FakeService, reference: str
) -> None:
    done = run("adapter", "delete", reference, "--yes")
    assert done.code == 1
    assert f"Error: '{reference}' may mean more than one adapter" in done.err
    assert f"  {FIRST}  sft, used " in done.err
    last(service, "list_adapters")


@pytest.mark.parametrize("reference", ["", "po", "sft-1", "3f2a11:train", "3f2a11:tra"])
def test_what_means_no_adapter_is_refused(run: Run, service: FakeService, reference: str) -> None:
    done = run("adapter", "delete", reference, "--yes")
    assert (done.code, done.err.startswith("Error: ")) == (1, True)
    assert "delete_adapter" not in [name for name, _, _ in service.calls]


def test_a_whole_id_that_the_list_lacks_is_sent_as_it_is_and_means_no_longer_one(
    run: Run, service: FakeService
) -> None:
    """It may be another tenant's, which an administrator moves; adapter 10 is not what a script means by 1."""
    service.responses["list_adapters"] = ListAdaptersResponse(adapters=[Adapter(adapter_id="3f2a11:train:10")])
    service.responses["delete_adapter"] = ServiceError(Code.NOT_FOUND, "NOT_FOUND", "no adapter '3f2a11:train:1'")
    done = run("adapter", "delete", SECOND, "--yes")
    assert (done.code, done.err) == (1, f"Error: no adapter '{SECOND}'\n")
    assert last(service, "delete_adapter").adapter_id == SECOND


@pytest.mark.parametrize(
    ("reference", "path"),
    [
        ("poet", f"tinker://{OTHER}/weights/only"),
        ("77", f"tinker://{OTHER}/weights/only"),
        ("tinker://77", f"tinker://{OTHER}/weights/only"),
        ("sft/weights/step-10", f"tinker://{FIRST}/weights/step-10"),
        ("3f2a/weights/step-10", f"tinker://{FIRST}/weights/step-10"),
        ("3f2a:train:0/s", f"tinker://{FIRST}/sampler_weights/final"),
        ("sft/weights/", f"tinker://{FIRST}/weights/step-10"),
        (f"tinker://{FIRST}/weights/step-10", f"tinker://{FIRST}/weights/step-10"),
        (f"tinker://{FIRST}/weights/step-1", f"tinker://{FIRST}/weights/step-1"),  # whole: the pool says it is missing
    ],
)
def test_a_checkpoint_is_found_by_its_adapters_beginning_or_name(
    run: Run, service: FakeService, reference: str, path: str
) -> None:
    done = run("checkpoint", "delete", reference, "--yes")
    assert done.code == 0, done.err
    assert last(service, "delete_checkpoint").path == path


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("sft/weights/step-1", "no checkpoint 'sft/weights/step-1': give its path"),
        ("weights/step-10", "no checkpoint 'weights/step-10': give its path"),
        (
            "sft",
            f"'sft' may mean more than one checkpoint: name one of these\n  tinker://{FIRST}/weights/step-10  sft\n",
        ),
        ("", "the argument is empty"),
    ],
)
def test_what_means_no_checkpoint_or_several_is_refused(
    run: Run, service: FakeService, reference: str, message: str
) -> None:
    done = run("checkpoint", "delete", reference, "--yes")
    assert (done.code, message in done.err) == (1, True), done.err
    assert "delete_checkpoint" not in [name for name, _, _ in service.calls]


@pytest.mark.parametrize(
    ("reference", "name"),
    [
        ("poet:7", f"{OTHER}:7"),
        ("77:train:0:7", f"{OTHER}:7"),
        (f"{SECOND}:12", f"{SECOND}:12"),
        ("gone:train:0:7", "gone:train:0:7"),  # whole, of an adapter that the list lacks
        ("77ab:sample:0:7", "77ab:sample:0:7"),
    ],
)
def test_an_operation_is_found_by_its_adapter_and_its_number(
    run: Run, service: FakeService, reference: str, name: str
) -> None:
    service.responses["get_history_entry"] = GetHistoryEntryResponse()
    assert run("why", reference, "--json").code == 0
    assert last(service, "get_history_entry").name == name


@pytest.mark.parametrize("reference", ["poet", "poet:", ":7", "poet:x", "sft:7", "po:7"])
def test_what_means_no_operation_is_refused(run: Run, service: FakeService, reference: str) -> None:
    done = run("why", reference)
    assert (done.code, done.err.startswith("Error: ")) == (1, True)
    assert "get_history_entry" not in [name for name, _, _ in service.calls]


def test_a_history_is_of_an_adapter_by_its_name_or_of_a_sampler_by_its_id(run: Run, service: FakeService) -> None:
    service.responses["list_history"] = ListHistoryResponse()
    for reference, target_id in (("poet", OTHER), ("77ab:sample:0", "77ab:sample:0")):
        assert run("history", reference).code == 0
        assert last(service, "list_history").target_id == target_id


@pytest.mark.parametrize("act", ["revoke", "rotate"])
def test_a_key_is_found_by_a_unique_beginning_among_those_that_are_not_revoked(
    run: Run, service: FakeService, act: str
) -> None:
    for reference, key_id in (("a", "aaaaaaaaaaa1"), ("bbb", "bbbbbbbbbbb1"), ("cccccccccccc", "cccccccccccc")):
        assert run("key", act, reference, "--yes").code == 0
        assert last(service, f"{act}_api_key").key_id == key_id
    assert "no key has an id that begins with 'c'" in run("key", act, "c").err


@pytest.mark.parametrize("act", ["revoke", "rotate"])
def test_a_key_is_revoked_or_replaced_by_the_beginning_of_its_id_only_once_its_tenant_is_confirmed(
    run: Run, service: FakeService, monkeypatch: pytest.MonkeyPatch, act: str
) -> None:
    for answer, code in (("n\n", 1), ("y\n", 0)):
        assert f"{act}_api_key" not in [name for name, _, _ in service.calls]
        monkeypatch.setattr("sys.stdin", io.StringIO(answer))
        done = run("key", act, "b")
        assert (done.code, "key bbbbbbbbbbb1 of tenant bob" in done.out) == (code, True), done.err
    assert last(service, f"{act}_api_key").key_id == "bbbbbbbbbbb1"
