"""What the HTTP door uses of uvicorn without its documentation: a version that changes it fails here, by name."""

from __future__ import annotations

import asyncio
import inspect

import pytest
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from coordinator.doors.http.connections import Connection
from coordinator.doors.http_server import _Server  # the subclass under test

CHANGED = f"uvicorn {uvicorn.__version__} has changed: adapt coordinator/doors/http_server.py and http/connections.py"


@pytest.mark.parametrize(("ours", "theirs"), [(Connection, H11Protocol), (_Server, uvicorn.Server)])
def test_every_method_that_is_overridden_exists_with_these_parameters(ours: type, theirs: type) -> None:
    own = {"drop", "drop_calls"}
    for name, method in vars(ours).items():
        if not inspect.isfunction(method) or name in own | {"__init__"} or (name.startswith("_") and name[1] != "_"):
            continue
        assert hasattr(theirs, name), f"{CHANGED}: {theirs.__name__}.{name} is gone"
        expected = list(inspect.signature(getattr(theirs, name)).parameters)
        assert list(inspect.signature(method).parameters) == expected, f"{CHANGED}: {theirs.__name__}.{name}"


async def test_what_is_read_of_a_connection_and_of_a_server_is_there() -> None:
    async def app(scope: object, receive: object, send: object) -> None: ...

    config = uvicorn.Config(app, lifespan="off", log_config=None)
    config.load()
    protocol = H11Protocol(config, ServerState(), {})
    for name in ("cycle", "conn", "loop", "transport"):
        assert hasattr(protocol, name), f"{CHANGED}: a connection has no {name}"
    assert protocol.cycle is None, f"{CHANGED}: a connection begins with a call"
    assert protocol.conn.trailing_data == (b"", False), f"{CHANGED}: h11's trailing_data"
    server = uvicorn.Server(config)
    assert server.server_state.tasks == set(), f"{CHANGED}: running calls"
    assert server.server_state.connections == set(), f"{CHANGED}: connections"
    assert not server.started
    assert inspect.iscoroutinefunction(uvicorn.Server.shutdown)
    serving = inspect.getsource(uvicorn.Server._serve)
    for name in ("self.startup(", "self.shutdown("):
        assert name in serving, f"{CHANGED}: serving calls no {name}"
    assert "server.close()" in inspect.getsource(uvicorn.Server.shutdown), f"{CHANGED}: a stop closes no listener"
    assert asyncio.get_running_loop() is protocol.loop
