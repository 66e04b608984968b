"""The use cases: the only place with behaviour behind the doors. One module per service of the contract, one
for a method that needs several, and one for a door whose samplers have several clients.

Every method takes who asks and the contract's request message, and returns its response message (an async generator of
them where the contract streams). Refusals are `ServiceError`. Knows no transport.
"""

from coordinator.service.adapters import AdapterUseCases
from coordinator.service.admin import AdminUseCases
from coordinator.service.checkpoints import CheckpointUseCases
from coordinator.service.clients import SamplingClientUseCases
from coordinator.service.copying import CopyUseCases
from coordinator.service.operations import OperationUseCases
from coordinator.service.pool import PoolUseCases
from coordinator.service.sessions import SessionUseCases
from coordinator.service.training import TrainingUseCases

__all__ = ["Service"]


class Service(
    CopyUseCases,
    SessionUseCases,
    AdapterUseCases,
    TrainingUseCases,
    SamplingClientUseCases,
    CheckpointUseCases,
    OperationUseCases,
    PoolUseCases,
    AdminUseCases,
):
    """All use cases, by the name of their RPC in snake case."""
