"""API keys: only their hash is stored, wrong ones are refused, and all refusals are equal."""

import asyncio
from pathlib import Path

import pytest

from coordinator.base.errors import Code, ServiceError
from coordinator.storage.store import Store
from coordinator.tenants.keys import Authenticator


@pytest.fixture
def keys(store: Store) -> Authenticator:
    return Authenticator(store, lambda: 1.0)


def refusal(keys: Authenticator, key: str) -> tuple[Code, str, str]:
    with pytest.raises(ServiceError) as raised:
        keys.authenticate(key)
    return raised.value.code, raised.value.reason, raised.value.message


async def test_a_key_determines_its_tenant(keys: Authenticator) -> None:
    key, _ = await keys.create_key("alice", is_admin=True)
    other, _ = await keys.create_key("alice")
    principal, second = keys.authenticate(key), keys.authenticate(other)
    assert (principal.tenant_name, principal.is_admin, second.is_admin) == ("alice", True, False)
    assert principal.tenant_id == second.tenant_id


async def test_the_prefix_that_some_clients_require_is_accepted(keys: Authenticator) -> None:
    key, _ = await keys.create_key("alice")
    assert keys.authenticate(f"tml-{key}") == keys.authenticate(f" {key}\n") == keys.authenticate(key)


async def test_no_file_of_the_database_has_the_secret(keys: Authenticator, store: Store, tmp_path: Path) -> None:
    key, _ = await keys.create_key("canary")
    secret = key.split("_", 2)[2]
    keys.authenticate(key)

    def contents() -> bytes:
        return b"".join(path.read_bytes() for path in tmp_path.iterdir())

    while_open = contents()
    await store.close()
    for content in (while_open, contents()):
        assert b"canary" in content
        assert secret.encode() not in content


async def test_every_wrong_key_gets_the_same_refusal(keys: Authenticator) -> None:
    key, row = await keys.create_key("alice")
    wrong = [
        key[:-1] + ("A" if key[-1] != "A" else "B"),
        f"tp_{'0' * 12}_{key.split('_', 2)[2]}",
        f"tp_{row.key_id}_{'A' * 43}",
        "sk-of-somebody-else",
        "tp_" + "x" * 10_000,
        key.upper(),
        f"{key}\x00",
    ]
    refusals = {refusal(keys, each) for each in wrong}
    assert len(refusals) == 1
    [(code, reason, message)] = refusals
    assert (code, reason) == (Code.UNAUTHENTICATED, "API_KEY_INVALID")
    assert row.key_id not in message


def test_a_missing_key_is_refused_with_how_to_send_one(keys: Authenticator) -> None:
    assert "authorization: Bearer" in refusal(keys, "")[2]


async def test_a_revoked_key_is_refused_at_once_and_like_an_unknown_one(keys: Authenticator, store: Store) -> None:
    key, row = await keys.create_key("alice")
    keys.authenticate(key)
    await keys.revoke_key(row.key_id)
    await keys.revoke_key(row.key_id)
    assert refusal(keys, key) == refusal(keys, "tp_unknown")
    assert refusal(Authenticator(store, lambda: 2.0), key)[0] is Code.UNAUTHENTICATED


async def test_a_key_in_use_during_its_revocation_does_not_return_to_the_cache(keys: Authenticator) -> None:
    key, row = await keys.create_key("alice")
    revoking = asyncio.create_task(keys.revoke_key(row.key_id))
    await asyncio.sleep(0)  # the revocation is not yet durable ...
    keys.authenticate(key)  # ... and this caches the key
    await revoking
    assert refusal(keys, key)[0] is Code.UNAUTHENTICATED


async def test_the_last_administrators_key_cannot_be_revoked(keys: Authenticator) -> None:
    _, first = await keys.create_key("alice", is_admin=True)
    _, second = await keys.create_key("bob", is_admin=True)
    await keys.revoke_key(first.key_id)
    with pytest.raises(ServiceError) as raised:
        await keys.revoke_key(second.key_id)
    assert raised.value.reason == "LAST_ADMIN_KEY"
    await keys.revoke_key(first.key_id)


async def test_two_administrators_cannot_revoke_each_other_at_once(keys: Authenticator) -> None:
    rows = [(await keys.create_key(name, is_admin=True))[1] for name in ("alice", "bob")]
    results = await asyncio.gather(*(keys.revoke_key(row.key_id) for row in rows), return_exceptions=True)
    assert sum(isinstance(result, ServiceError) for result in results) == 1
    assert sum(row.revoked_at is None for row in keys.list_keys()) == 1


async def test_an_unknown_key_cannot_be_revoked_and_a_tenants_name_is_checked(keys: Authenticator) -> None:
    with pytest.raises(ServiceError) as unknown:
        await keys.revoke_key("unknown")
    assert unknown.value.code is Code.NOT_FOUND
    for name in ("", "a" * 65, "a b", "../x", "é"):
        with pytest.raises(ServiceError, match="1 to 64"):
            await keys.create_key(name)


async def test_a_flood_of_unknown_keys_reads_nothing_from_the_database(keys: Authenticator, store: Store) -> None:
    await keys.create_key("alice")
    statements: list[str] = []
    store.database._reader.set_trace_callback(statements.append)  # private: the reader counts nothing itself
    for number in range(1000):
        assert refusal(keys, f"tp_{number:012}_{'A' * 43}")[0] is Code.UNAUTHENTICATED
    assert statements == []
    key, _ = await keys.create_key("bob")
    assert keys.authenticate(key).tenant_name == "bob", "a key that is created later is accepted at once"


async def test_a_call_is_cancelled_and_refused_when_its_key_is_revoked(keys: Authenticator) -> None:
    _, row = await keys.create_key("alice")
    principal = keys.holder(row.key_id)
    begun = asyncio.Event()

    async def call() -> None:
        with keys.while_valid(principal):
            begun.set()
            await asyncio.Event().wait()

    calls = [asyncio.create_task(call()) for _ in range(2)]
    await begun.wait()
    calls[0].cancel()
    await asyncio.wait(calls[:1])
    await keys.revoke_key(row.key_id)
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert isinstance(results[0], asyncio.CancelledError), "a call that its client cancelled stays cancelled"
    assert isinstance(results[1], ServiceError)
    with pytest.raises(ServiceError, match="was revoked"):
        await call()
