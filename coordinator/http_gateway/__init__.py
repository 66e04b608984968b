"""Door 2: the HTTP protocol of the Tinker SDK, thin over the use cases.

Every request becomes one of the contract's, every answer comes from one; what happens in between is `service`'s alone.
So both doors see the same runs, errors, order and log. Only the modules here know HTTP, JSON and that protocol.
"""

from coordinator.http_gateway.door import HttpConfig, HttpDoor, HttpDoorError

__all__ = ["HttpConfig", "HttpDoor", "HttpDoorError"]
