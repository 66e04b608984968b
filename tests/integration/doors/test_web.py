"""The page's source: RPCs in JSON, the stream of cycles, sign-ins of browsers. With toy engines; no browser."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import grpc
import httpx
import pytest
from google.protobuf import json_format
from google.protobuf.message_factory import GetMessageClass

from coordinator.doors.http import sign_ins
from coordinator.doors.rpcs import SERVICES
from coordinator.doors.web.cycles import PATH as CYCLES
from coordinator.doors.web.page import HOME
from coordinator.doors.web.rpcs import unary
from tests.support.served_pool import ServedPool
from tinkerpool.v1 import checkpoints_pb2, pool_pb2

STATIC = Path(sign_ins.__file__).parents[1] / "web" / "static"
PAGE_CALLS = set(re.findall(r'"([A-Z]\w+Service/\w+)"', "".join(each.read_text() for each in STATIC.glob("*.js"))))
"""The RPCs that the page names."""
POOL = "/tinkerpool.v1.PoolService/"
Web = Callable[..., httpx.Client]


@pytest.fixture
def web(pool: ServedPool) -> Iterator[Web]:
    """Return a function that makes a client with headers; each keeps its cookies, as a browser does."""
    with ExitStack() as clients:
        yield lambda **headers: clients.enter_context(httpx.Client(base_url=pool.http_url, headers=headers, timeout=20))


@pytest.fixture
def browser(web: Web, pool: ServedPool) -> httpx.Client:
    """Return a browser that alice has signed in."""
    browser = web(origin=pool.http_url)
    assert browser.post("/ui/sign-in", headers=bearer(pool.key())).is_success
    return browser


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def refusal(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["reason"]


@pytest.fixture
def trained(pool: ServedPool) -> str:
    """Return an adapter of alice with a checkpoint; bob has one too."""
    adapter_id = ""
    for tenant in ("bob", "alice"):
        with pool.client(tenant) as service:
            client = service.create_lora_training_client(rank=8, name=f"{tenant}-run", user_metadata={"who": tenant})
            adapter_id = client.model_id
            client.save_state(f"of-{tenant}-{time.monotonic_ns()}").result(20)
    return adapter_id


def test_every_rpc_that_the_page_names_is_served_in_json() -> None:
    assert len(PAGE_CALLS) > 15
    served = {path.removeprefix("/tinkerpool.v1.") for path in unary()}
    assert served >= PAGE_CALLS


def test_rpcs_without_tensors_or_files_are_served_in_json_and_no_others() -> None:
    names = {method.full_name for service in SERVICES for method in service.methods}
    left_out = {name.rpartition(".")[2] for name in names - {method.full_name for method in unary().values()}}
    assert {"Forward", "ForwardBackward", "Sample", "UploadPart", "GetTokenizer", "WatchCycles"} <= left_out
    assert not left_out & {"GetPoolStatus", "ListHistory", "CreateAdapter", "CreateApiKey", "DeleteCheckpoint"}


@pytest.mark.parametrize(
    ("name", "request_json"),
    [
        ("SessionService/GetCapabilities", {}),
        ("AdapterService/ListAdapters", {"pageSize": 100}),
        ("AdapterService/GetAdapter", {"adapterId": None}),
        ("HistoryService/ListHistory", {"targetId": None}),
        ("CheckpointService/ListCheckpoints", {"pageSize": 50}),
        ("LimitService/GetTenantLimits", {}),
        ("PoolService/GetUsage", {"groupBy": ["USAGE_GROUP_TENANT", "USAGE_GROUP_DAY"]}),
        ("PoolService/GetPoolStatus", {"numCycles": 5}),
    ],
)
def test_what_the_page_reads_is_what_the_rpc_returns(
    pool: ServedPool, browser: httpx.Client, trained: str, name: str, request_json: dict[str, Any]
) -> None:
    request_json = {field: trained if value is None else value for field, value in request_json.items()}
    method = unary()[f"/tinkerpool.v1.{name}"]
    shown = browser.post(f"/tinkerpool.v1.{name}", json=request_json)
    request = json_format.ParseDict(request_json, GetMessageClass(method.input_type)())
    with grpc.insecure_channel(pool.url.removeprefix("http://")) as channel:
        call: Any = channel.unary_unary(f"/tinkerpool.v1.{name}")
        metadata = list(bearer(pool.key()).items())
        body = call(request.SerializeToString(), metadata=metadata)
    returned = GetMessageClass(method.output_type).FromString(body)
    expected = json_format.MessageToDict(returned, always_print_fields_with_no_presence=True)
    for each in (expected, found := shown.json()):
        each.pop("uptimeSeconds", None)
        for worker in (*each.get("workers", ()), *each.get("tenants", ())):
            for field in [field for field in worker if field.endswith("PerSecond")]:
                del worker[field]  # measured anew at each call
    assert found == expected


def test_the_page_downloads_a_checkpoint_as_the_pools_own_client_does_and_not_with_the_names_of_tinker(
    pool: ServedPool, browser: httpx.Client, trained: str
) -> None:
    listed = browser.post("/tinkerpool.v1.CheckpointService/ListCheckpoints", json={}).json()["checkpoints"]
    path = next(each["path"] for each in listed if trained in each["path"])
    run, checkpoint = path.removeprefix("tinker://").split("/", 1)
    link = re.search(r"`(/api/v1/training_runs/.*)`", (STATIC / "checkpoints.js").read_text())
    assert link is not None
    url = link[1].replace("${run}", run).replace('${checkpoint.join("/")}', checkpoint)
    with grpc.insecure_channel(pool.url.removeprefix("http://")) as channel:
        call: Any = channel.unary_stream("/tinkerpool.v1.CheckpointService/ExportCheckpoint")
        request = checkpoints_pb2.ExportCheckpointRequest(path=path)
        pieces = call(request.SerializeToString(), metadata=list(bearer(pool.key()).items()))
        exported = b"".join(checkpoints_pb2.ExportCheckpointResponse.FromString(piece).data for piece in pieces)
    downloaded = browser.get(url, follow_redirects=True)
    assert downloaded.content == exported
    named = f'attachment; filename="{checkpoint.rpartition("/")[2]}.tar"'
    assert downloaded.headers["content-disposition"] == named, "a browser prefers it to the name in the page"
    for_tinker = browser.get(url.partition("?")[0], follow_redirects=True)
    assert for_tinker.is_success
    assert for_tinker.content != exported, "the header is written again"
    assert for_tinker.headers["etag"] != downloaded.headers["etag"]


def test_a_member_is_refused_what_administrators_read(browser: httpx.Client) -> None:
    for name in ("AdminService/ListTenants", "AdminService/ListApiKeys", "AdminService/ListAuditEntries"):
        assert refusal(browser.post(f"/tinkerpool.v1.{name}", json={})) == (403, "ADMIN_ONLY")


def test_a_wrong_request_says_what_is_wrong_and_an_error_has_the_form_of_connect(web: Web, pool: ServedPool) -> None:
    client = web(**bearer(pool.key()))
    wrong = client.post(POOL + "GetPoolStatus", json={"numCycle": 5})
    assert (wrong.status_code, wrong.json()["code"]) == (400, "invalid_argument")
    assert 'no field named "numCycle"' in wrong.json()["message"]
    assert client.post(POOL + "GetPoolStatus", content=b"[1").status_code == 400
    missing = client.post("/tinkerpool.v1.AdapterService/GetAdapter", json={"adapterId": "none"})
    assert (missing.status_code, missing.json()["code"]) == (404, "not_found")
    assert refusal(web().post(POOL + "GetPoolStatus", json={})) == (401, "API_KEY_MISSING")


def test_the_cookie_can_be_read_by_no_script_and_is_sent_to_no_other_site(web: Web, pool: ServedPool) -> None:
    browser = web(origin=pool.http_url)
    response = browser.post("/ui/sign-in", headers=bearer(pool.key()))
    assert response.json() == {"tenant": "alice", "role": "member"}
    cookie = response.headers["set-cookie"]
    for attribute in ("HttpOnly", "SameSite=strict", f"Max-Age={sign_ins.SIGN_IN_S}", "Path=/"):
        assert attribute in cookie
    assert pool.key() not in cookie
    assert pool.key().split("_")[2] not in cookie
    assert browser.post(POOL + "GetPoolStatus", json={}).is_success


def test_a_wrong_key_signs_nobody_in(web: Web, pool: ServedPool) -> None:
    browser = web(origin=pool.http_url)
    response = browser.post("/ui/sign-in", headers=bearer(pool.key()[:-1] + "?"))
    assert refusal(response) == (401, "API_KEY_INVALID")
    assert "set-cookie" not in response.headers


@pytest.mark.parametrize("origin", ["http://elsewhere.example", "http://[", "null", ""])
def test_another_site_changes_nothing_with_a_sign_in(browser: httpx.Client, origin: str) -> None:
    headers = {"origin": origin}
    for path in (POOL + "GetPoolStatus", "/ui/sign-out", "/api/v1/create_session", "/v1/completions"):
        response = browser.post(path, json={}, headers=headers)
        assert response.status_code == 403, path
        assert "FOREIGN_ORIGIN" in response.text or "origin" in response.text, path
    assert browser.get("/v1/models", headers=headers).is_success, "a read needs none: no other site sees its response"


def test_no_other_site_signs_a_browser_in(web: Web, pool: ServedPool) -> None:
    response = web(origin="http://elsewhere.example").post("/ui/sign-in", headers=bearer(pool.key()))
    assert refusal(response) == (403, "FOREIGN_ORIGIN")


def test_a_sign_in_is_not_renewed_without_the_key(browser: httpx.Client) -> None:
    response = browser.post("/ui/sign-in")
    assert refusal(response) == (401, "API_KEY_MISSING")
    assert "set-cookie" not in response.headers


def test_a_sign_in_ends_with_its_key_when_it_expires_when_it_is_forged_and_by_the_sign_out(
    browser: httpx.Client, web: Web, pool: ServedPool
) -> None:
    def asks(client: httpx.Client) -> tuple[int, str] | None:
        response = client.post(POOL + "GetPoolStatus", json={})
        return None if response.is_success else refusal(response)

    [(name, value)] = browser.cookies.items()
    forged = web(origin=pool.http_url)
    key_id, expires, signature = value.split(".")
    for value in (f"{key_id}.{int(expires) + 1}.{signature}", f"{key_id}.{expires}.", "x", f"..{signature}"):
        forged.cookies.set(name, value)
        assert asks(forged) == (401, "SIGN_IN_EXPIRED")

    with mock.patch.object(sign_ins, "SIGN_IN_S", -1):
        late = web(origin=pool.http_url).post("/ui/sign-in", headers=bearer(pool.key()))
    forged.cookies.set(name, late.headers["set-cookie"].partition("=")[2].partition(";")[0])
    assert asks(forged) == (401, "SIGN_IN_EXPIRED")

    other = web(origin=pool.http_url)
    other.post("/ui/sign-in", headers=bearer(pool.key("carol")))
    assert asks(other) is None
    pool.revoke("carol")
    assert asks(other) == (401, "API_KEY_INVALID")

    assert browser.post("/ui/sign-out").status_code == 204
    assert asks(browser) == (401, "API_KEY_MISSING")


def test_cycles_stream_as_they_commit_and_a_member_sees_no_other_tenants_name(
    browser: httpx.Client, pool: ServedPool, trained: str
) -> None:
    with browser.stream("GET", CYCLES, timeout=20) as stream, pool.client("bob") as service:
        assert stream.headers["content-type"].startswith("text/event-stream")
        lines = stream.iter_lines()
        assert next(lines).startswith(":")
        service.create_lora_training_client(rank=8).save_state("again").result(20)
        data = next(line for line in lines if line.startswith("data: ")).removeprefix("data: ")
    assert "bob" not in data
    cycle = json_format.Parse(data, pool_pb2.WatchCyclesResponse()).cycle
    assert [(entry.tenant, entry.adapter_id) for entry in cycle.entries] == [("", "")]
    assert "passSeconds" in json.loads(data)["cycle"]


def test_a_stream_ends_with_its_key_and_says_so(web: Web, pool: ServedPool) -> None:
    browser = web(origin=pool.http_url)
    browser.post("/ui/sign-in", headers=bearer(pool.key("dora")))
    with browser.stream("GET", CYCLES, timeout=20) as stream:
        lines = stream.iter_lines()
        next(lines)
        pool.revoke("dora")
        rest = list(lines)
    assert "event: refusal" in rest
    assert "API_KEY_INVALID" in "".join(rest)


def test_the_pages_files_come_from_here_alone(web: Web) -> None:
    client = web()
    home = client.get("/", follow_redirects=True)
    assert home.url.path == HOME
    for file in STATIC.iterdir():
        response = client.get(HOME + file.name)
        assert response.is_success, file.name
        policy = response.headers["content-security-policy"]
        assert "default-src 'none'; script-src 'self';" in policy
        assert "unsafe" not in policy
        assert response.headers["x-content-type-options"] == "nosniff"
        text = response.text.replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|<script>|\bon\w+=|\sstyle=|innerHTML|eval\(", text), file.name
    etag = client.get(HOME + "main.js").headers["etag"]
    assert client.get(HOME + "main.js", headers={"if-none-match": etag}).status_code == 304
    assert client.get(HOME + "..%2fpage.py").status_code == 404
