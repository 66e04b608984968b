"""The use cases, which the doors call: authentication, ownership, validation, and the calls into the other rooms.

Public interface: `Service`, with a method for every RPC, and `access` (`Authenticator`, `Principal`). A method takes
the caller's principal and the contract's request message, and returns the response message, or an async generator of
them where the contract streams. Refusals are `ServiceError`. Must not depend on any transport.

There is one module for each file of the contract; `access`, `listings` and `roles` are for all of them, `activity`
and `problems` are parts of `pool`, and `session_traces` of `history`.
"""

from coordinator.service.adapters import AdapterUseCases
from coordinator.service.admin import AdminUseCases
from coordinator.service.checkpoints import CheckpointUseCases, CopyUseCases
from coordinator.service.history import HistoryUseCases
from coordinator.service.imports import ImportUseCases
from coordinator.service.limits import LimitUseCases
from coordinator.service.operations import OperationUseCases
from coordinator.service.pool import PoolUseCases
from coordinator.service.probation import ProbationUseCases
from coordinator.service.sampling import SamplingUseCases
from coordinator.service.session_traces import SessionTraceUseCases
from coordinator.service.sessions import SessionUseCases
from coordinator.service.training import TrainingUseCases

__all__ = ["Service"]


class Service(
    ImportUseCases,
    CopyUseCases,
    SessionUseCases,
    AdapterUseCases,
    TrainingUseCases,
    SamplingUseCases,
    CheckpointUseCases,
    OperationUseCases,
    HistoryUseCases,
    SessionTraceUseCases,
    PoolUseCases,
    AdminUseCases,
    LimitUseCases,
    ProbationUseCases,
):
    """All use cases. A method's name is the RPC's in snake case."""
