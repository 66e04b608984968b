"""Which versions of client and pool fit, and what a client says if they do not."""

import time
from importlib.metadata import version

import pytest

from tests.support.doors.fake_transport import UNREACHABLE, FakePool
from tests.support.logs import logged_by
from tinkerpool import ServiceClient
from tinkerpool.client.calls.versions import mismatch
from tinkerpool.v1 import sessions_pb2


@pytest.mark.parametrize(
    ("client", "pool"),
    [("0.2.0", "0.2.7"), ("0.2.0", "0.1.3"), ("0.2.0", "0.3.0"), ("1.9.0", "1.10.0"), ("0.2.0", ""), ("0.2.0", "dev")],
)
def test_versions_within_one_minor_fit(client: str, pool: str) -> None:
    assert mismatch(client, pool) is None


@pytest.mark.parametrize(
    ("client", "pool", "install"),
    [
        ("0.2.0", "0.4.1", "tinkerpool==0.4.*"),
        ("0.3.0", "0.1.0", "tinkerpool==0.1.*"),
        ("0.9.0", "1.0.0", "tinkerpool==1.0.*"),
        ("0.2.0", "0.10.0.dev1", "tinkerpool==0.10.*"),
    ],
)
def test_versions_further_apart_do_not_fit_and_the_sentence_says_what_to_install(
    client: str, pool: str, install: str
) -> None:
    said = mismatch(client, pool)
    assert said is not None
    assert all(part in said for part in (client, pool, install))


def warnings_of(pool: FakePool, caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the warnings of a client of this pool that makes a session, once it has asked for the pool's version."""
    with ServiceClient(transport=pool) as service:
        service.create_sampling_client(base_model="toy")
        end = time.monotonic() + 10
        while not pool.requests("GetCapabilities"):
            assert time.monotonic() < end
            time.sleep(0.001)
        service.create_sampling_client(base_model="toy")  # the reply has been read
    return logged_by("tinkerpool", caplog)


def test_a_client_of_a_pool_that_is_two_minor_versions_ahead_says_so_once_and_works(
    pool: FakePool, caplog: pytest.LogCaptureFixture
) -> None:
    major, minor, *_ = version("tinkerpool").split(".")
    theirs = f"{major}.{int(minor) + 2}.0"
    pool.handlers["GetCapabilities"] = lambda _: sessions_pb2.GetCapabilitiesResponse(version=theirs)
    [warning] = warnings_of(pool, caplog)
    assert warning == mismatch(version("tinkerpool"), theirs)


def test_a_pool_whose_version_cannot_be_asked_for_is_used_without_a_word(
    pool: FakePool, caplog: pytest.LogCaptureFixture
) -> None:
    pool.faults["GetCapabilities"] = [UNREACHABLE]
    assert warnings_of(pool, caplog) == []
