"""Whether a call comes from this machine, at both doors."""

from __future__ import annotations

import pytest

from coordinator.doors.grpc.callers import caller_of
from coordinator.doors.peers import is_this_machine, network_of


@pytest.mark.parametrize(
    ("peer", "door", "expected"),
    [
        ("127.0.0.1", "127.0.0.1", True),
        ("127.8.9.1", "0.0.0.0", True),
        ("::1", "::", True),
        ("::ffff:127.0.0.1", "::", True),
        ("10.0.0.5", "10.0.0.5", True),
        ("10.0.0.6", "10.0.0.5", False),
        ("10.0.0.5", "0.0.0.0", False),
        ("::ffff:10.0.0.6", "::", False),
        ("fe80::1%eth0", "::", False),
        ("0.0.0.0", "0.0.0.0", True),  # no peer has this address
        ("", "localhost", False),
        ("localhost", "localhost", False),
    ],
)
def test_only_loopback_and_the_doors_own_address_are_this_machine(peer: str, door: str, *, expected: bool) -> None:
    assert is_this_machine(peer, door) is expected


class FakeContext:
    """A context of gRPC with a peer."""

    def __init__(self, peer: str) -> None:
        self._peer = peer

    def peer(self) -> str:
        return self._peer

    def auth_context(self) -> dict[str, list[bytes]]:
        return {}


@pytest.mark.parametrize(
    ("peer", "expected"),
    [
        ("ipv4:127.0.0.1:5000", True),
        ("ipv6:%5B::1%5D:5000", True),
        ("ipv6:[::1]:5000", True),
        ("ipv6:%5B::ffff:127.0.0.1%5D:5000", True),
        ("ipv4:10.0.0.6:5000", False),
        ("ipv6:%5Bfe80::2%25eth0%5D:5000", False),
        ("unix:/tmp/socket", True),
        ("unix:", True),
        ("unknown", False),
        ("", False),
    ],
)
def test_the_peer_of_a_grpc_call_is_read_from_its_form(peer: str, *, expected: bool) -> None:
    context: object = FakeContext(peer)
    assert caller_of(context, "0.0.0.0").is_local is expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("peer", "network"),
    [
        ("10.0.0.5", "10.0.0.5"),
        ("::ffff:10.0.0.5", "10.0.0.5"),
        ("2001:db8:1:2::5", "2001:db8:1:2::/64"),
        ("2001:db8:1:2:ffff::7", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("", ""),
    ],
)
def test_a_client_of_ipv6_is_one_peer_with_all_addresses_of_its_network(peer: str, network: str) -> None:
    assert network_of(peer) == network
