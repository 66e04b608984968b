"""Whether a Ray cluster listens at an address, and this host is a node of it: found out within seconds.

Ray itself tries for minutes, and ends the process then.

Does not depend on Ray. A head speaks gRPC, and each server of gRPC begins with a SETTINGS frame of HTTP/2.
"""

from __future__ import annotations

import asyncio
import os
import socket

CONNECT_TIMEOUT_S = 10.0
"""How long a cluster's head may take to accept a connection and to reply."""
REFUSAL_TIMEOUT_S = 2.0
"""How long a head that may refuse a connection is waited for: a refusal takes no time but the network's."""
REFUSED_S = 10.0
"""How long a head that has listened may refuse all connections, unless the operator gives it longer."""
RECONNECT_VARIABLE = "RAY_gcs_rpc_server_reconnect_timeout_s"
"""Ray's own: how long a process tries to reach a head again before Ray ends it."""
RECONNECT_S = 60.0
"""Its default."""
RECONNECT_MARGIN_S = 5.0
"""How long before Ray ends the process the pool ends by itself, and says why."""
TLS_VARIABLE = "RAY_USE_TLS"
"""Ray's own; "1" if the connections of a cluster have TLS."""

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""What a client of HTTP/2 sends first: the preface, and SETTINGS without a change (RFC 9113, 3.4)."""
_SETTINGS = 4
_HEADER_BYTES = 9


async def check_head(address: str) -> None:
    """Raise ConnectionError unless a server of gRPC replies at `host:port` or `ray://host:port`.

    Other forms of an address (`auto`) are Ray's to resolve. With Ray's TLS, a server only has to accept a connection.
    """
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or "/" in host or not port.isdecimal():
        return
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            problem = await _problem(host.strip("[]"), int(port))
    except TimeoutError:
        problem = f"no reply in {CONNECT_TIMEOUT_S:g} s"
    except OSError as error:
        problem = str(error)
    if problem:
        raise ConnectionError(
            f"no Ray listens at {address} ({problem}): start its head node with `ray start --head --port={port}`, give "
            "the address of another, or leave --ray-address out, and the pool starts a Ray of its own"
        )


def refused_s_max() -> float:
    """Return the seconds for which a head may refuse connections: most of Ray's own, if the operator has raised that.

    Raises ValueError.
    """
    reconnect_s = float(os.environ.get(RECONNECT_VARIABLE, RECONNECT_S))
    return REFUSED_S if reconnect_s <= RECONNECT_S else max(REFUSED_S, reconnect_s - RECONNECT_MARGIN_S)


def is_refused(address: str) -> bool:
    """Return whether `host:port` refuses a connection. A host that is silent does not refuse."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), REFUSAL_TIMEOUT_S):
            return False
    except OSError as error:
        return isinstance(error, ConnectionRefusedError)


async def _problem(host: str, port: int) -> str:
    """Return what is wrong with the server; empty if it speaks gRPC. Raises OSError."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        if os.environ.get(TLS_VARIABLE, "0").lower() not in {"", "0", "false"}:
            return ""
        writer.write(_PREFACE)
        await writer.drain()
        header = await reader.readexactly(_HEADER_BYTES)
        return "" if header[3] == _SETTINGS else "the server there does not speak gRPC"
    except asyncio.IncompleteReadError:
        return "the server there does not speak gRPC"
    finally:
        writer.transport.abort()
