"""The RPCs of the contract, as its descriptors name them. No door lists them again."""

from __future__ import annotations

import re
from collections.abc import Iterator

from google.protobuf.descriptor import Descriptor, MethodDescriptor, ServiceDescriptor

from tinkerpool.v1 import (
    adapters_pb2,
    admin_pb2,
    checkpoints_pb2,
    history_pb2,
    imports_pb2,
    limits_pb2,
    operations_pb2,
    pool_pb2,
    probation_pb2,
    sampling_pb2,
    sessions_pb2,
    training_pb2,
)

SERVICES: tuple[ServiceDescriptor, ...] = tuple(
    service
    for module in (
        sessions_pb2,
        adapters_pb2,
        training_pb2,
        sampling_pb2,
        checkpoints_pb2,
        imports_pb2,
        operations_pb2,
        history_pb2,
        pool_pb2,
        admin_pb2,
        limits_pb2,
        probation_pb2,
    )
    for service in module.DESCRIPTOR.services_by_name.values()
)
"""The services of the contract."""


def methods() -> Iterator[MethodDescriptor]:
    """Yield every RPC."""
    for service in SERVICES:
        yield from service.methods


def path_of(method: MethodDescriptor) -> str:
    """Return the path of an RPC's calls, over gRPC and over HTTP: `/tinkerpool.v1.PoolService/GetPoolStatus`."""
    return f"/{method.containing_service.full_name}/{method.name}"


def use_case_name(method: MethodDescriptor) -> str:
    """Return the name of an RPC's use case: `create_adapter` for `CreateAdapter`."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", method.name).lower()


def has_bytes(message: Descriptor) -> bool:
    """Return whether a message has tensors, or parts of files."""
    fields = message.fields
    parts = [field.message_type for field in fields if field.message_type is not None]
    return any(field.type == field.TYPE_BYTES for field in fields) or any(has_bytes(part) for part in parts)
