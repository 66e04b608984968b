"""The methods of the contract that the client calls, with their request and response types. Data only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from google.protobuf.message import Message

from tinkerpool.v1 import adapters_pb2 as adapters
from tinkerpool.v1 import admin_pb2 as admin
from tinkerpool.v1 import checkpoints_pb2 as checkpoints
from tinkerpool.v1 import history_pb2 as history
from tinkerpool.v1 import imports_pb2 as imports
from tinkerpool.v1 import limits_pb2 as limits
from tinkerpool.v1 import operations_pb2 as operations
from tinkerpool.v1 import pool_pb2 as pool
from tinkerpool.v1 import probation_pb2 as probation
from tinkerpool.v1 import sampling_pb2 as sampling
from tinkerpool.v1 import sessions_pb2 as sessions
from tinkerpool.v1 import training_pb2 as training

RequestT = TypeVar("RequestT", bound=Message)
ResponseT = TypeVar("ResponseT", bound=Message)


@dataclass(frozen=True, slots=True)
class Unary(Generic[RequestT, ResponseT]):
    """One request, one response."""

    request_type: type[RequestT]
    response_type: type[ResponseT]

    @property
    def name(self) -> str:
        """The method's name: that of its request, without the suffix."""
        return self.request_type.DESCRIPTOR.name.removesuffix("Request")

    @property
    def path(self) -> str:
        """The method's path in HTTP/2: each file of the contract has one service."""
        [service] = self.request_type.DESCRIPTOR.file.services_by_name.values()
        return f"/{service.full_name}/{self.name}"


@dataclass(frozen=True, slots=True)
class ServerStream(Unary[RequestT, ResponseT]):
    """One request, a stream of responses."""


GET_CAPABILITIES = Unary(sessions.GetCapabilitiesRequest, sessions.GetCapabilitiesResponse)
GET_TOKENIZER = Unary(sessions.GetTokenizerRequest, sessions.GetTokenizerResponse)
CREATE_SESSION = Unary(sessions.CreateSessionRequest, sessions.CreateSessionResponse)
HEARTBEAT = Unary(sessions.HeartbeatRequest, sessions.HeartbeatResponse)
FINISH_SESSION = Unary(sessions.FinishSessionRequest, sessions.FinishSessionResponse)
GET_SESSION = Unary(sessions.GetSessionRequest, sessions.GetSessionResponse)
LIST_SESSIONS = Unary(sessions.ListSessionsRequest, sessions.ListSessionsResponse)

CREATE_ADAPTER = Unary(adapters.CreateAdapterRequest, adapters.CreateAdapterResponse)
GET_ADAPTER = Unary(adapters.GetAdapterRequest, adapters.GetAdapterResponse)
LIST_ADAPTERS = Unary(adapters.ListAdaptersRequest, adapters.ListAdaptersResponse)
RENAME_ADAPTER = Unary(adapters.RenameAdapterRequest, adapters.RenameAdapterResponse)
DELETE_ADAPTER = Unary(adapters.DeleteAdapterRequest, adapters.DeleteAdapterResponse)

FORWARD = Unary(training.ForwardRequest, training.ForwardResponse)
FORWARD_BACKWARD = Unary(training.ForwardBackwardRequest, training.ForwardBackwardResponse)
OPTIM_STEP = Unary(training.OptimStepRequest, training.OptimStepResponse)
TRAIN_STEP = Unary(training.TrainStepRequest, training.TrainStepResponse)
LOAD_STATE = Unary(training.LoadStateRequest, training.LoadStateResponse)
DISCARD_GRADIENT = Unary(training.DiscardGradientRequest, training.DiscardGradientResponse)

GET_HISTORY_ENTRY = Unary(history.GetHistoryEntryRequest, history.GetHistoryEntryResponse)
LIST_HISTORY = Unary(history.ListHistoryRequest, history.ListHistoryResponse)
EXPORT_SESSION_TRACE = ServerStream(history.ExportSessionTraceRequest, history.ExportSessionTraceResponse)
REPORT_METRICS = Unary(history.ReportMetricsRequest, history.ReportMetricsResponse)

CREATE_SAMPLER = Unary(sampling.CreateSamplerRequest, sampling.CreateSamplerResponse)
GET_SAMPLER = Unary(sampling.GetSamplerRequest, sampling.GetSamplerResponse)
SAMPLE = Unary(sampling.SampleRequest, sampling.SampleResponse)
STREAM_SAMPLE = ServerStream(sampling.StreamSampleRequest, sampling.StreamSampleResponse)

SAVE_STATE = Unary(checkpoints.SaveStateRequest, checkpoints.SaveStateResponse)
SAVE_WEIGHTS_FOR_SAMPLER = Unary(checkpoints.SaveWeightsForSamplerRequest, checkpoints.SaveWeightsForSamplerResponse)
LIST_CHECKPOINTS = Unary(checkpoints.ListCheckpointsRequest, checkpoints.ListCheckpointsResponse)
GET_CHECKPOINT = Unary(checkpoints.GetCheckpointRequest, checkpoints.GetCheckpointResponse)
DELETE_CHECKPOINT = Unary(checkpoints.DeleteCheckpointRequest, checkpoints.DeleteCheckpointResponse)
SET_CHECKPOINT_TTL = Unary(checkpoints.SetCheckpointTtlRequest, checkpoints.SetCheckpointTtlResponse)
SET_CHECKPOINT_ACCESS = Unary(checkpoints.SetCheckpointAccessRequest, checkpoints.SetCheckpointAccessResponse)
COPY_CHECKPOINT = Unary(checkpoints.CopyCheckpointRequest, checkpoints.CopyCheckpointResponse)
EXPORT_CHECKPOINT = ServerStream(checkpoints.ExportCheckpointRequest, checkpoints.ExportCheckpointResponse)

CREATE_UPLOAD = Unary(imports.CreateUploadRequest, imports.CreateUploadResponse)
UPLOAD_PART = Unary(imports.UploadPartRequest, imports.UploadPartResponse)
IMPORT_CHECKPOINT = Unary(imports.ImportCheckpointRequest, imports.ImportCheckpointResponse)

GET_OPERATION = Unary(operations.GetOperationRequest, operations.GetOperationResponse)
WAIT_OPERATIONS = ServerStream(operations.WaitOperationsRequest, operations.WaitOperationsResponse)
CANCEL_OPERATION = Unary(operations.CancelOperationRequest, operations.CancelOperationResponse)

MOVE_ADAPTER = Unary(adapters.MoveAdapterRequest, adapters.MoveAdapterResponse)

GET_POOL_STATUS = Unary(pool.GetPoolStatusRequest, pool.GetPoolStatusResponse)
WATCH_CYCLES = ServerStream(pool.WatchCyclesRequest, pool.WatchCyclesResponse)
DRAIN_WORKER = Unary(pool.DrainWorkerRequest, pool.DrainWorkerResponse)
UNDRAIN_WORKER = Unary(pool.UndrainWorkerRequest, pool.UndrainWorkerResponse)
GET_USAGE = Unary(pool.GetUsageRequest, pool.GetUsageResponse)
CREATE_API_KEY = Unary(admin.CreateApiKeyRequest, admin.CreateApiKeyResponse)
LIST_API_KEYS = Unary(admin.ListApiKeysRequest, admin.ListApiKeysResponse)
REVOKE_API_KEY = Unary(admin.RevokeApiKeyRequest, admin.RevokeApiKeyResponse)
CREATE_TENANT = Unary(admin.CreateTenantRequest, admin.CreateTenantResponse)
LIST_TENANTS = Unary(admin.ListTenantsRequest, admin.ListTenantsResponse)
GET_TENANT_LIMITS = Unary(limits.GetTenantLimitsRequest, limits.GetTenantLimitsResponse)
SET_TENANT_LIMITS = Unary(limits.SetTenantLimitsRequest, limits.SetTenantLimitsResponse)
ROTATE_API_KEY = Unary(admin.RotateApiKeyRequest, admin.RotateApiKeyResponse)
LIST_AUDIT_ENTRIES = Unary(admin.ListAuditEntriesRequest, admin.ListAuditEntriesResponse)
RELEASE_TENANT = Unary(probation.ReleaseTenantRequest, probation.ReleaseTenantResponse)
GET_TENANT = Unary(admin.GetTenantRequest, admin.GetTenantResponse)
SUSPEND_TENANT = Unary(admin.SuspendTenantRequest, admin.SuspendTenantResponse)
RESUME_TENANT = Unary(admin.ResumeTenantRequest, admin.ResumeTenantResponse)
DELETE_TENANT = Unary(admin.DeleteTenantRequest, admin.DeleteTenantResponse)
