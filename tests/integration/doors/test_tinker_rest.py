"""Listings, checkpoints and downloads through the official SDK and its command line, with toy engines."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pyrage
import pytest
import tinker
from click.testing import CliRunner
from tinker import types
from tinker.cli.__main__ import main_cli

from coordinator.doors.tinker.runs import RUNS_MAX
from tests.support.doors.sdk import LEAKS, Wire, datum, sdk
from tests.support.served_pool import ServedPool
from tests.support.timelines import slices

pytestmark = [LEAKS, pytest.mark.slow]
WAIT_S = 30
RSA_OF_EXPONENT_0 = f"ssh-rsa AAAAB3NzaC1yc2EAAAABAAAAAEEAg{'A' * 84}Q=="


@pytest.fixture
def service(pool: ServedPool) -> Iterator[tinker.ServiceClient]:
    with sdk(pool.http_url, pool.key(), user_metadata={"who": "test"}, display_name="shown") as service:
        yield service


@pytest.fixture
def rest(pool: ServedPool) -> tinker.RestClient:
    return tinker.RestClient(base_url=pool.http_url, api_key=f"tml-{pool.key()}")


@pytest.fixture
def client(service: tinker.ServiceClient) -> Any:
    client: Any = service.create_lora_training_client("toy", rank=8, user_metadata={"run": "1"}).result(WAIT_S)
    client.forward_backward([datum(1, 2)], "cross_entropy")
    client.optim_step(types.AdamParams(learning_rate=1e-3))
    return client


def test_runs_and_sessions_are_listed_with_their_contents(rest: tinker.RestClient, client: Any) -> None:
    client.save_state("earlier").result(WAIT_S)
    state = client.save_state("first", user_metadata={"step": "1"}).result(WAIT_S).path
    sampler = client.save_weights_for_sampler("second").result(WAIT_S).path
    listed = rest.list_training_runs(limit=2).result(WAIT_S)
    run = listed.training_runs[0]
    assert (run.training_run_id, run.base_model, run.lora_rank) == (client.model_id, "toy", 8)
    assert (run.is_lora, run.model_owner, run.user_metadata) == (True, "alice", {"run": "1"})
    assert run.last_checkpoint is not None
    assert run.last_sampler_checkpoint is not None
    assert (run.last_checkpoint.tinker_path, run.last_sampler_checkpoint.tinker_path) == (state, sampler)
    assert run.last_checkpoint.user_metadata == {"step": "1"}
    assert rest.get_training_run_by_tinker_path(state).result(WAIT_S).training_run_id == client.model_id
    session_id = client.model_id.rsplit(":", 2)[0]
    assert session_id in rest.list_sessions().result(WAIT_S).sessions
    session = rest.get_session(session_id).result(WAIT_S)
    assert session.training_run_ids == [client.model_id]
    assert (session.user_metadata, session.display_name) == ({"who": "test"}, "shown")


def test_the_user_metadata_of_a_model_are_labels_of_the_pool_and_its_last_request_is_its_last_operation(
    pool: ServedPool, service: tinker.ServiceClient, rest: tinker.RestClient
) -> None:
    labels = {"name": "mine", "team": "nlp"}
    model: Any = service.create_lora_training_client("toy", rank=8, user_metadata=labels).result(WAIT_S)
    created = rest.get_training_run(model.model_id).result(WAIT_S).last_request_time
    model.forward([datum(1, 2)], "cross_entropy").result(WAIT_S)
    assert rest.get_training_run(model.model_id).result(WAIT_S).last_request_time > created
    with pool.client("alice") as client:
        own = client.create_rest_client()
        [run] = own.list_training_runs(labels=labels).result(WAIT_S).training_runs
        assert (run.training_run_id, run.name, run.user_metadata) == (model.model_id, "", labels)
        renamed = own.rename_training_run(model.model_id, "mine").result(WAIT_S)
    assert renamed.name == "mine"
    assert rest.get_training_run(model.model_id).result(WAIT_S).user_metadata == labels


def test_a_page_of_runs_takes_as_many_queries_as_one_run(
    pool: ServedPool, wire: Callable[[str], Wire], monkeypatch: pytest.MonkeyPatch
) -> None:
    wired = wire("carol")
    session = wired.session()
    database = pool.pool.store.database
    queries: list[str] = []
    read = database.read

    def counted(sql: str, *values: Any) -> Any:
        queries.append(sql)
        return read(sql, *values)

    monkeypatch.setattr(database, "read", counted)
    counts = []
    for index in range(3):
        wired.model(session, index)
        queries.clear()
        page = wired.get("/training_runs?limit=100000").json()
        assert (len(page["training_runs"]), page["cursor"]["limit"]) == (index + 1, RUNS_MAX)
        counts.append(len(queries))
    assert counts[0] == counts[-1]


def test_all_live_sessions_are_listed(wire: Callable[[str], Wire]) -> None:
    wired = wire("erin")
    ids = [wired.session() for _ in range(5)][::-1]
    listed = {limit: wired.get(f"/sessions?limit={limit}").json()["sessions"] for limit in (0, 3, 4, 100)}
    assert listed == {0: [], 3: ids[:3], 4: ids[:4], 100: ids}
    assert wired.get("/sessions?limit=2&offset=3").json()["sessions"] == ids[3:]


def test_pages_have_the_requested_size_and_the_total(rest: tinker.RestClient, client: Any) -> None:
    paths = [client.save_state(f"page{i}").result(WAIT_S).path for i in range(3)]
    of_run = rest.list_checkpoints(client.model_id).result(WAIT_S).checkpoints
    assert [checkpoint.tinker_path for checkpoint in of_run] == paths[::-1]
    everything = rest.list_user_checkpoints(limit=1000).result(WAIT_S)
    page = rest.list_user_checkpoints(limit=2, offset=1).result(WAIT_S)
    assert [c.tinker_path for c in page.checkpoints] == [c.tinker_path for c in everything.checkpoints[1:3]]
    assert page.cursor is not None
    assert (page.cursor.offset, page.cursor.limit) == (1, 2)
    assert page.cursor.total_count == len(everything.checkpoints) >= 3


@pytest.mark.parametrize(
    ("version", "is_listed"),
    [("0.18.2", False), ("0.27.2", False), ("0.28.0", True), ("1.0", True), ("x", True), ("", True)],
)
def test_a_client_is_listed_no_checkpoint_of_a_kind_that_its_version_does_not_know(
    wired: Wire, client: Any, version: str, is_listed: bool
) -> None:
    state = client.save_state("known").result(WAIT_S).path
    external = client.save_weights_external("unknown").result(WAIT_S).path
    headers = {"x-stainless-package-version": version} if version else {}
    expected = [external, state] if is_listed else [state]
    for path in ("/checkpoints?limit=2", f"/training_runs/{client.model_id}/checkpoints"):
        listed = [each["tinker_path"] for each in wired.get(path, **headers).json()["checkpoints"]]
        assert listed[: len(expected)] == expected
        assert (external in listed) is is_listed
    page = wired.get(f"/training_runs/{client.model_id}/checkpoints", **headers).json()
    assert page["cursor"]["total_count"] == len(expected)


def test_a_checkpoint_has_a_time_to_live_or_none_and_is_deleted(rest: tinker.RestClient, client: Any) -> None:
    path = client.save_state("kept", ttl_seconds=3600).result(WAIT_S).path

    def expiry() -> Any:
        return rest.list_checkpoints(client.model_id).result(WAIT_S).checkpoints[0].expires_at

    first = expiry()
    rest.set_checkpoint_ttl_from_tinker_path(path, 7200).result(WAIT_S)
    assert 3500 < (expiry() - first).total_seconds() < 3700
    rest.set_checkpoint_ttl_from_tinker_path(path, None).result(WAIT_S)
    assert expiry() is None
    rest.delete_checkpoint_from_tinker_path(path).result(WAIT_S)
    assert rest.list_checkpoints(client.model_id).result(WAIT_S).checkpoints == []
    with pytest.raises(tinker.NotFoundError):
        rest.delete_checkpoint_from_tinker_path(path).result(WAIT_S)


def test_a_published_checkpoint_is_readable_by_all_and_changed_by_its_owner_alone(
    pool: ServedPool, rest: tinker.RestClient, client: Any
) -> None:
    path = client.save_state("open").result(WAIT_S).path
    with sdk(pool.http_url, pool.key("bob")) as other:
        with pytest.raises(tinker.NotFoundError):
            other.create_training_client_from_state(path).result(WAIT_S)
        for _ in range(2):
            rest.publish_checkpoint_from_tinker_path(path).result(WAIT_S)
        assert rest.list_checkpoints(client.model_id).result(WAIT_S).checkpoints[0].public is True
        theirs = other.create_training_client_from_state_with_optimizer(path).result(WAIT_S)
        assert theirs.forward([datum(1)], "cross_entropy").result(WAIT_S).metrics["tokens:sum"] == 1
        with pytest.warns(FutureWarning):
            assert theirs.load_state(path).result(WAIT_S).path == path
        their_rest = tinker.RestClient(base_url=pool.http_url, api_key=f"tml-{pool.key('bob')}")
        assert their_rest.get_weights_info_by_tinker_path(path).result(WAIT_S).lora_rank == 8
        for change in (
            their_rest.delete_checkpoint_from_tinker_path,
            their_rest.unpublish_checkpoint_from_tinker_path,
        ):
            with pytest.raises(tinker.NotFoundError):
                change(path).result(WAIT_S)
        rest.unpublish_checkpoint_from_tinker_path(path).result(WAIT_S)
        with pytest.raises(tinker.NotFoundError):
            other.create_training_client_from_state(path).result(WAIT_S)


def test_a_checkpoint_is_copied_once_into_a_new_run(
    wired: Wire, rest: tinker.RestClient, service: tinker.ServiceClient, client: Any
) -> None:
    project = "the SDK wants one, and this pool has none"
    path = client.save_state("origin", user_metadata={"a": "b"}).result(WAIT_S).path
    copies = [
        rest.copy_weights(path, project, ttl_seconds=3600).result(WAIT_S),
        rest.copy_weights(path, project).result(WAIT_S),
    ]
    assert len({path, *copies}) == 3
    session = client.model_id.rsplit(":", 2)[0]
    into_session = {"source_path": path, "session_id": session, "model_seq_id": 7}
    again = {wired.ok("/copy_weights", into_session)["tinker_path"] for _ in range(2)}
    assert again == {f"tinker://{session}:train:7/weights/origin"}
    rest.delete_checkpoint_from_tinker_path(path).result(WAIT_S)
    for copy in copies:
        copied = service.create_training_client_from_state_with_optimizer(copy).result(WAIT_S)
        assert copied.optim_step(types.AdamParams()).result(WAIT_S).metrics
    listed = {c.tinker_path: c for c in rest.list_user_checkpoints(limit=1000).result(WAIT_S).checkpoints}
    assert [listed[copy].user_metadata for copy in copies] == [{"a": "b"}] * 2
    assert [listed[copy].expires_at is None for copy in copies] == [False, True]
    keys = {"x-idempotency-key": "one"}
    again = {wired.post("/copy_weights", {"source_path": copies[0]}, **keys).json()["tinker_path"] for _ in range(2)}
    assert len(again) == 1


def test_a_copy_has_the_kind_of_its_source(rest: tinker.RestClient, service: tinker.ServiceClient, client: Any) -> None:
    project = "the SDK wants one, and this pool has none"
    sampler = rest.copy_weights(client.save_weights_for_sampler("s").result(WAIT_S).path, project).result(WAIT_S)
    external = rest.copy_weights(client.save_weights_external("e").result(WAIT_S).path, project).result(WAIT_S)
    assert [path.split("/")[3:] for path in (sampler, external)] == [
        ["sampler_weights", "s"],
        ["external_weights", "e"],
    ]
    assert service.create_sampling_client(model_path=sampler).result(WAIT_S).get_base_model() == "toy"
    signed = rest.get_external_weights_urls(external).result(WAIT_S)
    assert json.loads(read(signed.urls["adapter_config.json"]))["r"] == 8


def test_a_refused_copy_leaves_nothing_behind(wired: Wire, client: Any) -> None:
    path = client.save_state("once").result(WAIT_S).path
    session = wired.session()
    num_runs = wired.get("/training_runs").json()["cursor"]["total_count"]
    keys = {"x-idempotency-key": "copy"}
    for body, headers, told in (
        ({}, {}, "X-Idempotency-Key"),
        ({"session_id": session}, {}, "X-Idempotency-Key"),
        ({"model_seq_id": 3}, {}, "X-Idempotency-Key"),
        ({"ttl_seconds": 10**12}, keys, "100 years"),
        ({"ttl_seconds": 0}, keys, "ttl_seconds"),
    ):
        response = wired.post("/copy_weights", {"source_path": path, **body}, **headers)
        assert response.status_code == 400
        assert told in response.json()["detail"]
    assert wired.get("/training_runs").json()["cursor"]["total_count"] == num_runs
    within = {"source_path": path, "session_id": session}
    again = {wired.post("/copy_weights", within, **keys).json()["tinker_path"] for _ in range(2)}
    assert again == {f"tinker://{session}:train:0/weights/once"}


def test_weights_info_has_the_settings_of_a_new_model(rest: tinker.RestClient, client: Any) -> None:
    path = client.save_state("info").result(WAIT_S).path
    info = rest.get_weights_info_by_tinker_path(path).result(WAIT_S)
    assert (info.base_model, info.is_lora, info.lora_rank) == ("toy", True, 8)
    assert (info.train_attn, info.train_mlp, info.train_unembed) == (True, True, True)


def test_weights_info_of_a_foreign_public_checkpoint_names_its_trained_modules(
    pool: ServedPool, rest: tinker.RestClient, service: tinker.ServiceClient
) -> None:
    client = service.create_lora_training_client("toy", rank=8, train_unembed=False).result(WAIT_S)
    path = client.save_state("shared").result(WAIT_S).path
    rest.publish_checkpoint_from_tinker_path(path).result(WAIT_S)
    theirs = tinker.RestClient(base_url=pool.http_url, api_key=f"tml-{pool.key('bob')}")
    info = theirs.get_weights_info_by_tinker_path(path).result(WAIT_S)
    assert (info.train_attn, info.train_mlp, info.train_unembed) == (True, True, False)


def test_a_foreign_public_checkpoint_is_copied_without_metadata_and_sampled_until_it_is_private(
    pool: ServedPool, rest: tinker.RestClient, client: Any
) -> None:
    path = client.save_state("shared", user_metadata={"a": "b"}).result(WAIT_S).path
    rest.publish_checkpoint_from_tinker_path(path).result(WAIT_S)
    theirs = tinker.RestClient(base_url=pool.http_url, api_key=f"tml-{pool.key('bob')}")
    copy = theirs.copy_weights(path, "the SDK wants one, and this pool has none").result(WAIT_S)
    listed = {c.tinker_path: c for c in theirs.list_user_checkpoints(limit=1000).result(WAIT_S).checkpoints}
    assert not listed[copy].user_metadata
    with sdk(pool.http_url, pool.key("bob")) as service:
        sampler = service.create_sampling_client(model_path=path).result(WAIT_S)
        prompt, params = types.ModelInput.from_ints([1, 2]), types.SamplingParams(max_tokens=2)
        assert sampler.sample(prompt, 1, params).result(WAIT_S).sequences
        rest.unpublish_checkpoint_from_tinker_path(path).result(WAIT_S)
        with pytest.raises(tinker.BadRequestError, match="has made it private again"):
            sampler.sample(prompt, 1, params).result(WAIT_S)


def test_an_export_is_downloaded_file_by_file_and_a_url_is_valid_for_its_file_alone(
    wire: Callable[[str], Wire], rest: tinker.RestClient, client: Any
) -> None:
    path = client.save_weights_external("out", ttl_seconds=3600).result(WAIT_S).path
    assert path == f"tinker://{client.model_id}/external_weights/out"
    signed = rest.get_external_weights_urls(path).result(WAIT_S)
    files = {name: read(url) for name, url in signed.urls.items()}
    assert json.loads(files["adapter_config.json"])["r"] == 8
    assert len(files["adapter_model.safetensors"]) > 0
    url = signed.urls["adapter_config.json"]
    for wrong in (
        url.replace("adapter_config.json?", "adapter_model.safetensors?"),
        url.replace("expires=", "expires=9"),
        url.replace("out", "other"),
        url.partition("?")[0],
    ):
        with pytest.raises(urllib.error.HTTPError) as raised:
            read(wrong)
        assert raised.value.code == 403
        assert "request a new one" in raised.value.read().decode()
    stranger = wire("mallory")
    run, kind, name = path.removeprefix("tinker://").split("/")
    response = stranger.get(f"/training_runs/{run}/checkpoints/{kind}/{name}/external_weights_urls")
    assert response.status_code == 404


@pytest.mark.parametrize("name", ["publish", "ttl", "archive", "external_weights_urls"])
def test_a_checkpoint_may_have_the_name_of_an_endpoint(rest: tinker.RestClient, client: Any, name: str) -> None:
    path = client.save_weights_external(name).result(WAIT_S).path

    def found() -> list[tuple[str, bool, bool]]:
        listed = rest.list_checkpoints(client.model_id).result(WAIT_S).checkpoints
        return [(c.checkpoint_id, c.public, c.expires_at is not None) for c in listed]

    rest.publish_checkpoint_from_tinker_path(path).result(WAIT_S)
    rest.set_checkpoint_ttl_from_tinker_path(path, 3600).result(WAIT_S)
    assert found() == [(f"external_weights/{name}", True, True)]
    rest.unpublish_checkpoint_from_tinker_path(path).result(WAIT_S)
    assert found() == [(f"external_weights/{name}", False, True)]
    assert rest.get_external_weights_urls(path).result(WAIT_S).urls
    rest.delete_checkpoint_from_tinker_path(path).result(WAIT_S)
    assert found() == []


def test_a_malformed_checkpoint_id_is_not_found(rest: tinker.RestClient, client: Any) -> None:
    with pytest.raises(tinker.NotFoundError, match="no checkpoint"):
        rest.delete_checkpoint(client.model_id, "without-its-kind").result(WAIT_S)


def test_a_download_url_ends_with_the_key_that_requested_it(pool: ServedPool) -> None:
    with sdk(pool.http_url, pool.key("dora")) as theirs:
        client: Any = theirs.create_lora_training_client("toy", rank=8).result(WAIT_S)
        path = client.save_weights_external("signed").result(WAIT_S).path
    rest = tinker.RestClient(base_url=pool.http_url, api_key=f"tml-{pool.key('dora')}")
    url = rest.get_external_weights_urls(path).result(WAIT_S).urls["adapter_config.json"]
    assert json.loads(read(url))["r"] == 8
    pool.revoke("dora")
    with pytest.raises(urllib.error.HTTPError) as raised:
        read(url)
    assert raised.value.code == 401
    assert "revoked" in raised.value.read().decode()


def test_a_url_of_a_save_that_was_overwritten_is_refused_and_never_serves_the_other_weights(
    rest: tinker.RestClient, client: Any, wired: Wire
) -> None:
    path = client.save_state("best").result(WAIT_S).path
    run, kind, name = path.removeprefix("tinker://").split("/")
    place = f"/training_runs/{run}/checkpoints/{kind}/{name}"

    def urls() -> list[str]:
        files = wired.get(f"{place}/external_weights_urls").json()["urls"]
        return [*files.values(), wired.get(f"{place}/archive").headers["location"]]

    earlier = urls()
    before = [read(url) for url in earlier]
    client.forward_backward([datum(1, 2)], "cross_entropy")
    client.optim_step(types.AdamParams(learning_rate=1e-3))
    assert client.save_state("best", overwrite=True).result(WAIT_S).path == path
    for url in earlier:
        with pytest.raises(urllib.error.HTTPError) as raised:
            read(url)
        assert raised.value.code == 412
        assert "was saved again" in (detail := raised.value.read().decode())
        assert "request a new one" in detail
    after = [read(url) for url in urls()]
    assert after[0] == before[0], "the configuration"
    assert after[1:] != before[1:]


def test_a_download_that_was_cut_is_resumed_and_has_the_bytes_of_the_whole(
    rest: tinker.RestClient, client: Any, pool: ServedPool
) -> None:
    signed = rest.get_external_weights_urls(client.save_weights_external("cut").result(WAIT_S).path).result(WAIT_S)
    url = signed.urls["adapter_model.safetensors"]
    whole = httpx.get(url)
    assert whole.headers["content-disposition"] == 'attachment; filename="adapter_model.safetensors"'
    asked = {"range": "bytes=100-", "if-range": whole.headers["etag"]}
    rest_of_it = httpx.get(url, headers=asked)
    assert (rest_of_it.status_code, whole.content[:100] + rest_of_it.content) == (206, whole.content)
    assert int(httpx.head(url).headers["content-length"]) == len(whole.content)


def test_the_timeline_of_a_session_is_exported_and_its_url_is_valid_for_it_alone(
    pool: ServedPool, rest: tinker.RestClient, client: Any, wire: Callable[[str], Wire], tmp_path: Path
) -> None:
    client.forward_backward([datum(1, 2)], "cross_entropy").result(WAIT_S)
    session_id = client.model_id.partition(":")[0]
    url = rest.export_session_trace(session_id).result(WAIT_S)
    requests = [each for each in slices(read(url)) if each.category == "request"]
    assert {each.values["adapter"] for each in requests} == {client.model_id}
    assert [each.name for each in requests].count("forward_backward") == 2
    command(pool, "session", "export-trace", session_id, "--output", str(tmp_path / "session.pftrace"))
    assert [each for each in slices((tmp_path / "session.pftrace").read_bytes()) if each.category == "request"]
    with sdk(pool.http_url, pool.key()) as second:
        other = second.create_lora_training_client("toy", rank=8).result(WAIT_S).model_id.partition(":")[0]
    for wrong in (url.replace(session_id, other), url.replace("sessions", "tinker%3A%2F%2Fsessions")):
        with pytest.raises(urllib.error.HTTPError) as raised:
            read(wrong)
        assert raised.value.code == 403
    stranger = wire("bob").get(f"/sessions/{session_id}/trace_export")
    assert (stranger.status_code, stranger.json()["reason"]) == (404, "NOT_FOUND")


def test_runs_are_not_listed_by_project(rest: tinker.RestClient) -> None:
    with pytest.raises(tinker.BadRequestError, match="leave project_id out"):
        rest.list_training_runs(project_id="p").result(WAIT_S)


def test_an_encrypted_export_is_read_by_its_recipients_alone(
    rest: tinker.RestClient, service: tinker.ServiceClient, client: Any
) -> None:
    recipients = [pyrage.x25519.Identity.generate() for _ in range(2)]
    keys = [str(identity.to_public()) for identity in recipients]
    path = client.save_weights_external("secret", age_encryption_recipients=keys).result(WAIT_S).path
    signed = rest.get_external_weights_urls(path).result(WAIT_S)
    assert set(signed.urls) == {"adapter_config.json.age", "adapter_model.safetensors.age"}
    stored = read(signed.urls["adapter_config.json.age"])
    for identity in recipients:
        assert json.loads(pyrage.decrypt(stored, [identity]))["r"] == 8
    with pytest.raises(pyrage.DecryptError):
        pyrage.decrypt(stored, [pyrage.x25519.Identity.generate()])
    for use in (service.create_training_client_from_state, lambda of: rest.copy_weights(of, "any")):
        with pytest.raises(tinker.BadRequestError, match="encrypted"):
            use(path).result(WAIT_S)


@pytest.mark.parametrize(
    ("recipients", "told"),
    [
        (["age1x"], "'age1x' is no recipient"),
        (["ssh-rsa x"], "no recipient"),
        (["age1x"] * 11, "at most 10"),
        (["age1" + "x" * 4000], "4004 characters"),
        # The library panics: at the last step with a point of low order, at the first one with an exponent of 0.
        (["age1qqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqq5cu47z"], "nothing can be encrypted to it"),
        ([RSA_OF_EXPONENT_0], "nothing can be encrypted to it"),
    ],
)
def test_a_wrong_recipient_of_an_export_is_refused_with_what_to_send(
    client: Any, recipients: list[str], told: str
) -> None:
    with pytest.raises(tinker.RequestFailedError, match=told):
        client.save_weights_external("wrong", age_encryption_recipients=recipients).result(WAIT_S)
    assert client.optim_step(types.AdamParams()).result(WAIT_S).metrics


def read(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=30) as response:
        content: bytes = response.read()
        return content


def command(pool: ServedPool, *arguments: str) -> Any:
    """Return the output of `tinker -f json <arguments>`. It runs in this process, for imports take seconds."""
    environment = {"TINKER_BASE_URL": pool.http_url, "TINKER_API_KEY": f"tml-{pool.key()}", "TINKER_TELEMETRY": "0"}
    done = CliRunner().invoke(main_cli, ["-f", "json", *arguments], env=environment)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_the_command_line_lists_and_downloads(pool: ServedPool, client: Any, tmp_path: Path) -> None:
    path = client.save_state("shell").result(WAIT_S).path
    [run] = [r for r in command(pool, "run", "list")["runs"] if r["training_run_id"] == client.model_id]
    assert run["lora_rank"] == 8
    checkpoints = command(pool, "checkpoint", "list", "--run-id", client.model_id)["checkpoints"]
    assert [checkpoint["tinker_path"] for checkpoint in checkpoints] == [path]
    command(pool, "checkpoint", "download", path, "--output", str(tmp_path / "out"))
    [config] = (tmp_path / "out").rglob("adapter_config.json")
    assert json.loads(config.read_text())["r"] == 8
    assert config.with_name("adapter_model.safetensors").stat().st_size > 0
