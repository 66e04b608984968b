"""Whether the peer of a connection is this machine, and which network is its own. Does not depend on a protocol.

A peer is this machine if its address is a loopback, or the address that the door itself listens on: no other machine
can complete a connection from either. A relay on this machine makes all its clients local.
"""

from __future__ import annotations

import functools
import ipaddress


@functools.lru_cache(maxsize=4096)
def is_this_machine(peer: str, door_host: str) -> bool:
    """Return whether an address without a port is this machine's. `door_host`: where the door listens."""
    address = _address(peer)
    return address is not None and (address.is_loopback or address == _address(door_host))


def network_of(peer: str) -> str:
    """Return the network of an address without a port that one client has: an address, of IPv6 its first 64 bits.

    A client of IPv6 may connect from each of its 2^64 addresses. Text that is no address is returned as it is.
    """
    address = _address(peer)
    if isinstance(address, ipaddress.IPv6Address):
        return str(ipaddress.ip_network((address, 64), strict=False))
    return peer if address is None else str(address)


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return address
