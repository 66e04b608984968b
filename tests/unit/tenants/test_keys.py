"""API keys: only their hash is stored, wrong ones are refused alike; roles, expiry, last use, rotation."""

import asyncio
import json
from pathlib import Path

import pytest

from coordinator.base.errors import Code, ServiceError
from coordinator.storage.store import Store
from coordinator.tenants.accounts import Accounts
from coordinator.tenants.keys import PACE, USE_INTERVAL_S, Authenticator
from coordinator.tenants.principals import Caller, Principal, Role
from tests.support.toy_pool import FakeTime

LOCAL, REMOTE = Caller(is_local=True), Caller(is_local=False)


def refusal(keys: Authenticator, key: str) -> tuple[Code, str, str]:
    with pytest.raises(ServiceError) as raised:
        keys.authenticate(key)
    return raised.value.code, raised.value.reason, raised.value.message


async def test_a_key_determines_its_tenant(keys: Authenticator) -> None:
    key, _ = await keys.create_key("alice", role=Role.ADMIN)
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
    assert refusal(Authenticator(store, Accounts(store, lambda: 2.0), lambda: 2.0), key)[0] is Code.UNAUTHENTICATED


async def test_a_key_in_use_during_its_revocation_does_not_return_to_the_cache(keys: Authenticator) -> None:
    key, row = await keys.create_key("alice")
    revoking = asyncio.create_task(keys.revoke_key(row.key_id))
    await asyncio.sleep(0)  # the revocation is not yet durable ...
    keys.authenticate(key)  # ... and this caches the key
    await revoking
    assert refusal(keys, key)[0] is Code.UNAUTHENTICATED


async def test_the_last_administrators_key_cannot_be_revoked(keys: Authenticator) -> None:
    _, first = await keys.create_key("alice", role=Role.ADMIN)
    _, second = await keys.create_key("bob", role=Role.ADMIN)
    await keys.revoke_key(first.key_id)
    with pytest.raises(ServiceError) as raised:
        await keys.revoke_key(second.key_id)
    assert raised.value.reason == "LAST_ADMIN_KEY"
    await keys.revoke_key(first.key_id)


async def test_two_administrators_cannot_revoke_each_other_at_once(keys: Authenticator, store: Store) -> None:
    rows = [(await keys.create_key(name, role=Role.ADMIN))[1] for name in ("alice", "bob")]
    results = await asyncio.gather(*(keys.revoke_key(row.key_id) for row in rows), return_exceptions=True)
    assert sum(isinstance(result, ServiceError) for result in results) == 1
    assert len(store.api_keys.unrevoked()) == 1


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


class Clock:
    """A time of day that the test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def timed(store: Store, clock: Clock) -> Authenticator:
    return Authenticator(store, Accounts(store, clock), clock)


async def kept(keys: Authenticator, seconds: float) -> None:
    """Let the keys be kept for seconds of service time, then stop that as a stop of the pool does."""
    time = FakeTime()
    keeping = asyncio.create_task(keys.keep(time))
    await asyncio.sleep(0)
    await time.advance(seconds)
    await asyncio.sleep(0)
    keeping.cancel()
    await asyncio.wait([keeping])


def reason(keys: Authenticator, key: str, caller: Caller = LOCAL, least: Role = Role.READ_ONLY) -> str:
    try:
        keys.admit(key, caller, least)
    except ServiceError as error:
        return error.reason
    return ""


async def test_a_key_is_refused_from_its_expiry_on_also_after_a_restart(
    timed: Authenticator, clock: Clock, store: Store
) -> None:
    key, row = await timed.create_key("alice", ttl_s=60)
    clock.now = 1059.9
    assert timed.authenticate(key).tenant_name == "alice"
    clock.now = 1060.0
    assert reason(timed, key) == reason(Authenticator(store, Accounts(store, clock), clock), key) == "API_KEY_EXPIRED"
    assert refusal(timed, key)[0] is Code.UNAUTHENTICATED
    with pytest.raises(ServiceError, match="has expired"):
        timed.holder(row.key_id)
    wrong = key[:-1] + ("A" if key[-1] != "A" else "B")
    assert reason(timed, wrong) == "API_KEY_INVALID", "only the holder of the secret is told that it has expired"


async def test_calls_of_a_key_end_when_it_expires_and_those_of_others_do_not(
    timed: Authenticator, clock: Clock
) -> None:
    principals = [timed.authenticate((await timed.create_key("alice", ttl_s=ttl_s))[0]) for ttl_s in (60, 0)]

    async def call(principal: Principal) -> None:
        with timed.while_valid(principal):
            await asyncio.Event().wait()

    calls = [asyncio.create_task(call(principal)) for principal in principals]
    await kept(timed, 1.0)
    assert not any(each.done() for each in calls)
    clock.now = 1060.0
    await kept(timed, 1.0)
    with pytest.raises(ServiceError) as raised:
        await calls[0]
    assert raised.value.reason == "API_KEY_EXPIRED"
    assert not calls[1].done()
    calls[1].cancel()


async def test_a_keys_last_use_is_known_at_once_and_stored_once_an_hour_and_at_the_end(
    timed: Authenticator, clock: Clock, store: Store
) -> None:
    key, row = await timed.create_key("alice")
    assert timed.last_use(row) is None
    num_commits = store.database.num_commits
    for _ in range(100):
        clock.now += 1
        timed.admit(key, LOCAL, Role.MEMBER)
    assert timed.last_use(row) == 1100.0
    assert store.database.num_commits == num_commits
    keeping = asyncio.create_task(timed.keep(FakeTime()))
    await asyncio.sleep(0)
    assert store.database.num_commits == num_commits
    keeping.cancel()
    await asyncio.wait([keeping])
    [stored] = store.api_keys.unrevoked()
    assert stored.last_used_at == 1100.0
    assert Authenticator(store, Accounts(store, clock), clock).last_use(stored) == 1100.0
    await kept(timed, USE_INTERVAL_S)
    assert store.database.num_commits == num_commits + 1, "a use is stored once"


async def test_a_refused_call_is_no_use_of_its_key(timed: Authenticator) -> None:
    key, row = await timed.create_key("alice", role=Role.READ_ONLY)
    assert reason(timed, key, least=Role.MEMBER) == "READ_ONLY_KEY"
    assert timed.last_use(row) is None


async def test_each_role_admits_what_needs_it_or_less(keys: Authenticator) -> None:
    reasons = {
        role: [reason(keys, (await keys.create_key("alice", role=role))[0], least=least) for least in Role]
        for role in Role
    }
    assert reasons == {
        Role.READ_ONLY: ["", "READ_ONLY_KEY", "ADMIN_ONLY"],
        Role.MEMBER: ["", "", "ADMIN_ONLY"],
        Role.ADMIN: ["", "", ""],
    }


async def test_the_machines_own_key_is_an_administrators_for_local_callers_and_a_members_for_others(
    keys: Authenticator,
) -> None:
    key, _ = await keys.create_key("default", role=Role.ADMIN, is_local=True)
    assert keys.admit(key, LOCAL, Role.ADMIN).is_admin
    assert keys.admit(key, REMOTE, Role.MEMBER).role is Role.MEMBER
    with pytest.raises(ServiceError, match=r"on the pool's machine only.*key create") as raised:
        keys.admit(key, REMOTE, Role.ADMIN)
    assert raised.value.reason == "ADMIN_ONLY"
    other, _ = await keys.create_key("default", role=Role.ADMIN)
    assert keys.admit(other, REMOTE, Role.ADMIN).is_admin


async def test_a_key_that_is_bound_to_a_certificate_works_only_with_it(keys: Authenticator) -> None:
    fingerprint = "AB:" * 31 + "CD"
    key, row = await keys.create_key("alice", certificate_sha256=fingerprint)
    assert row.certificate_sha256 == "ab" * 31 + "cd"
    for certificate, expected in (
        ("", "CERTIFICATE_REQUIRED"),
        ("0" * 64, "CERTIFICATE_REQUIRED"),
        ("ab" * 31 + "cd", ""),
    ):
        assert reason(keys, key, Caller(is_local=True, certificate_sha256=certificate)) == expected
    with pytest.raises(ServiceError, match="64 hexadecimal digits"):
        await keys.create_key("alice", certificate_sha256="ab")


async def test_a_rotated_key_stays_valid_for_its_grace_and_its_successor_has_the_same_rights(
    timed: Authenticator, clock: Clock, store: Store
) -> None:
    key, row = await timed.create_key("alice", role=Role.ADMIN, ttl_s=5000, is_local=True, certificate_sha256="ab" * 32)
    await timed.create_key("root", role=Role.ADMIN)
    by = timed.authenticate(key)
    clock.now = 2000.0
    new, successor, replaced = await timed.rotate_key(row.key_id, grace_s=600, by=by)
    assert (successor.role, successor.tenant_name, successor.expires_at) == ("admin", "alice", 6000.0)
    assert (successor.is_local, successor.certificate_sha256, successor.created_at) == (True, "ab" * 32, 2000.0)
    assert (replaced.successor, replaced.expires_at, replaced.revoked_at) == (successor.key_id, 2600.0, None)
    for keys in (timed, Authenticator(store, Accounts(store, clock), clock)):
        assert keys.authenticate(key).key_id == row.key_id
        assert keys.authenticate(new).key_id == successor.key_id
    clock.now = 2600.0
    for keys in (timed, Authenticator(store, Accounts(store, clock), clock)):
        assert keys.authenticate(new).key_id == successor.key_id
        with pytest.raises(ServiceError, match=f"replaced by key '{successor.key_id}'"):
            keys.authenticate(key)


async def test_a_key_that_is_rotated_without_grace_ends_at_once_with_its_calls(timed: Authenticator) -> None:
    key, row = await timed.create_key("alice")
    principal = timed.authenticate(key)

    async def call() -> None:
        with timed.while_valid(principal):
            await asyncio.Event().wait()

    running = asyncio.create_task(call())
    await asyncio.sleep(0)
    new, _, _ = await timed.rotate_key(row.key_id, grace_s=0, by=principal)
    assert reason(timed, key) == "API_KEY_INVALID"
    assert timed.authenticate(new).tenant_name == "alice"
    with pytest.raises(ServiceError, match="was revoked"):
        await running


async def test_a_key_is_rotated_once_and_never_lives_longer_by_it(timed: Authenticator, clock: Clock) -> None:
    key, row = await timed.create_key("alice", ttl_s=60)
    by = timed.authenticate(key)
    _, successor, replaced = await timed.rotate_key(row.key_id, grace_s=3600, by=by)
    assert successor.expires_at == replaced.expires_at == 1060.0
    with pytest.raises(ServiceError) as again:
        await timed.rotate_key(row.key_id, grace_s=0, by=by)
    assert again.value.reason == "KEY_NOT_ROTATED"
    clock.now = 1060.0
    with pytest.raises(ServiceError) as expired:
        await timed.rotate_key(successor.key_id, grace_s=0, by=by)
    assert expired.value.reason == "KEY_NOT_ROTATED"
    with pytest.raises(ServiceError) as unknown:
        await timed.rotate_key("unknown", grace_s=0, by=by)
    assert unknown.value.code is Code.NOT_FOUND
    with pytest.raises(ServiceError, match="30 days"):
        await timed.rotate_key(successor.key_id, grace_s=31 * 86_400, by=by)


async def test_members_replace_a_bounded_number_of_keys_within_a_day_and_administrators_any(
    timed: Authenticator, clock: Clock, store: Store
) -> None:
    members = [timed.authenticate((await timed.create_key("alice"))[0]) for _ in range(PACE.rotations_max + 20)]
    results = await asyncio.gather(
        *(timed.rotate_key(each.key_id, grace_s=0, by=each) for each in members), return_exceptions=True
    )
    refused = [result for result in results if isinstance(result, ServiceError)]
    assert len(refused) == 20, "exact also for calls at the same time"
    assert {(error.reason, error.retry_delay_s) for error in refused} == {("RATE_LIMITED", PACE.within_s)}
    late = members[-1]
    clock.now += PACE.within_s - 1
    for keys in (timed, Authenticator(store, Accounts(store, clock), clock)):
        with pytest.raises(ServiceError, match="keys of yours replaced within a day: 100 in use") as error:
            await keys.rotate_key(late.key_id, grace_s=0, by=late)
        assert error.value.retry_delay_s == 1.0
    bob = timed.authenticate((await timed.create_key("bob"))[0])
    await timed.rotate_key(bob.key_id, grace_s=0, by=bob)
    root = timed.authenticate((await timed.create_key("root", role=Role.ADMIN))[0])
    await timed.rotate_key(members[-2].key_id, grace_s=0, by=root)
    clock.now += 1
    await timed.rotate_key(late.key_id, grace_s=0, by=late)


async def test_an_administrators_key_that_expires_does_not_replace_the_last_one(timed: Authenticator) -> None:
    key, row = await timed.create_key("root", role=Role.ADMIN)
    await timed.create_key("root", role=Role.ADMIN, ttl_s=60)
    with pytest.raises(ServiceError) as raised:
        await timed.revoke_key(row.key_id)
    assert raised.value.reason == "LAST_ADMIN_KEY"
    by = timed.authenticate(key)
    _, successor, _ = await timed.rotate_key(row.key_id, grace_s=60, by=by)
    assert await timed.revoke_key(row.key_id) == [successor.key_id]
    with pytest.raises(ServiceError):
        await timed.revoke_key(successor.key_id)


@pytest.mark.parametrize("grace_s", [0, 600])
async def test_a_revocation_names_the_successors_that_are_still_valid(timed: Authenticator, grace_s: float) -> None:
    key, row = await timed.create_key("alice")
    _, bobs = await timed.create_key("bob")
    thief = timed.authenticate(key)
    _, successor, _ = await timed.rotate_key(row.key_id, grace_s=grace_s, by=thief)
    last_key, last, _ = await timed.rotate_key(successor.key_id, grace_s=grace_s, by=thief)
    live = [successor.key_id, last.key_id] if grace_s else [last.key_id]
    assert await timed.revoke_key(row.key_id) == live
    assert timed.authenticate(last_key).tenant_name == "alice"
    for number, key_id in enumerate(live, 1):
        assert await timed.revoke_key(key_id) == live[number:]
    assert await timed.revoke_key(row.key_id) == []
    assert await timed.revoke_key(bobs.key_id) == []


async def test_every_change_of_keys_is_in_the_audit_log_without_secrets(timed: Authenticator, store: Store) -> None:
    key, row = await timed.create_key("root", role=Role.ADMIN)
    by = timed.authenticate(key)
    secrets = [key.split("_", 2)[2]]
    bobs, bob = await timed.create_key("bob", role=Role.READ_ONLY, ttl_s=60, by=by)
    new, successor, _ = await timed.rotate_key(bob.key_id, grace_s=0, by=by)
    await timed.revoke_key(successor.key_id, by=by)
    await timed.revoke_key(successor.key_id, by=by)
    secrets += [each.split("_", 2)[2] for each in (bobs, new)]
    entries = store.audit.newest(100)[::-1]
    assert [(entry.key_id, entry.tenant, entry.act, entry.subject) for entry in entries[1:]] == [
        ("", "", "tenant.create", "root"),
        ("", "", "key.create", row.key_id),
        (row.key_id, "root", "tenant.create", "bob"),
        (row.key_id, "root", "key.create", bob.key_id),
        (row.key_id, "root", "key.rotate", bob.key_id),
        (row.key_id, "root", "key.revoke", successor.key_id),
    ]
    details = [json.loads(entry.details) for entry in entries]
    assert details[4] == {"tenant": "bob", "role": "read-only", "ttl_seconds": "60"}
    assert details[5] == {"successor": successor.key_id, "grace_seconds": "0"}
    assert not any(secret in str(entries) for secret in secrets)
