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

    service: str
    name: str
    request_type: type[RequestT]
    response_type: type[ResponseT]

    @property
    def path(self) -> str:
        """The method's path in HTTP/2."""
        return f"/tinkerpool.v1.{self.service}/{self.name}"


@dataclass(frozen=True, slots=True)
class ServerStream(Unary[RequestT, ResponseT]):
    """One request, a stream of responses."""


GET_CAPABILITIES = Unary(
    "SessionService", "GetCapabilities", sessions.GetCapabilitiesRequest, sessions.GetCapabilitiesResponse
)
GET_TOKENIZER = Unary("SessionService", "GetTokenizer", sessions.GetTokenizerRequest, sessions.GetTokenizerResponse)
CREATE_SESSION = Unary("SessionService", "CreateSession", sessions.CreateSessionRequest, sessions.CreateSessionResponse)
HEARTBEAT = Unary("SessionService", "Heartbeat", sessions.HeartbeatRequest, sessions.HeartbeatResponse)
FINISH_SESSION = Unary("SessionService", "FinishSession", sessions.FinishSessionRequest, sessions.FinishSessionResponse)
GET_SESSION = Unary("SessionService", "GetSession", sessions.GetSessionRequest, sessions.GetSessionResponse)
LIST_SESSIONS = Unary("SessionService", "ListSessions", sessions.ListSessionsRequest, sessions.ListSessionsResponse)

CREATE_ADAPTER = Unary("AdapterService", "CreateAdapter", adapters.CreateAdapterRequest, adapters.CreateAdapterResponse)
GET_ADAPTER = Unary("AdapterService", "GetAdapter", adapters.GetAdapterRequest, adapters.GetAdapterResponse)
LIST_ADAPTERS = Unary("AdapterService", "ListAdapters", adapters.ListAdaptersRequest, adapters.ListAdaptersResponse)
RENAME_ADAPTER = Unary("AdapterService", "RenameAdapter", adapters.RenameAdapterRequest, adapters.RenameAdapterResponse)
DELETE_ADAPTER = Unary("AdapterService", "DeleteAdapter", adapters.DeleteAdapterRequest, adapters.DeleteAdapterResponse)

FORWARD = Unary("TrainingService", "Forward", training.ForwardRequest, training.ForwardResponse)
FORWARD_BACKWARD = Unary(
    "TrainingService", "ForwardBackward", training.ForwardBackwardRequest, training.ForwardBackwardResponse
)
OPTIM_STEP = Unary("TrainingService", "OptimStep", training.OptimStepRequest, training.OptimStepResponse)
TRAIN_STEP = Unary("TrainingService", "TrainStep", training.TrainStepRequest, training.TrainStepResponse)
LOAD_STATE = Unary("TrainingService", "LoadState", training.LoadStateRequest, training.LoadStateResponse)
DISCARD_GRADIENT = Unary(
    "TrainingService", "DiscardGradient", training.DiscardGradientRequest, training.DiscardGradientResponse
)

GET_HISTORY_ENTRY = Unary(
    "HistoryService", "GetHistoryEntry", history.GetHistoryEntryRequest, history.GetHistoryEntryResponse
)
LIST_HISTORY = Unary("HistoryService", "ListHistory", history.ListHistoryRequest, history.ListHistoryResponse)
EXPORT_SESSION_TRACE = ServerStream(
    "HistoryService", "ExportSessionTrace", history.ExportSessionTraceRequest, history.ExportSessionTraceResponse
)
REPORT_METRICS = Unary("HistoryService", "ReportMetrics", history.ReportMetricsRequest, history.ReportMetricsResponse)

CREATE_SAMPLER = Unary(
    "SamplingService", "CreateSampler", sampling.CreateSamplerRequest, sampling.CreateSamplerResponse
)
GET_SAMPLER = Unary("SamplingService", "GetSampler", sampling.GetSamplerRequest, sampling.GetSamplerResponse)
SAMPLE = Unary("SamplingService", "Sample", sampling.SampleRequest, sampling.SampleResponse)
STREAM_SAMPLE = ServerStream(
    "SamplingService", "StreamSample", sampling.StreamSampleRequest, sampling.StreamSampleResponse
)

SAVE_STATE = Unary("CheckpointService", "SaveState", checkpoints.SaveStateRequest, checkpoints.SaveStateResponse)
SAVE_WEIGHTS_FOR_SAMPLER = Unary(
    "CheckpointService",
    "SaveWeightsForSampler",
    checkpoints.SaveWeightsForSamplerRequest,
    checkpoints.SaveWeightsForSamplerResponse,
)
LIST_CHECKPOINTS = Unary(
    "CheckpointService", "ListCheckpoints", checkpoints.ListCheckpointsRequest, checkpoints.ListCheckpointsResponse
)
GET_CHECKPOINT = Unary(
    "CheckpointService", "GetCheckpoint", checkpoints.GetCheckpointRequest, checkpoints.GetCheckpointResponse
)
DELETE_CHECKPOINT = Unary(
    "CheckpointService", "DeleteCheckpoint", checkpoints.DeleteCheckpointRequest, checkpoints.DeleteCheckpointResponse
)
SET_CHECKPOINT_TTL = Unary(
    "CheckpointService",
    "SetCheckpointTtl",
    checkpoints.SetCheckpointTtlRequest,
    checkpoints.SetCheckpointTtlResponse,
)
SET_CHECKPOINT_ACCESS = Unary(
    "CheckpointService",
    "SetCheckpointAccess",
    checkpoints.SetCheckpointAccessRequest,
    checkpoints.SetCheckpointAccessResponse,
)
COPY_CHECKPOINT = Unary(
    "CheckpointService", "CopyCheckpoint", checkpoints.CopyCheckpointRequest, checkpoints.CopyCheckpointResponse
)
EXPORT_CHECKPOINT = ServerStream(
    "CheckpointService", "ExportCheckpoint", checkpoints.ExportCheckpointRequest, checkpoints.ExportCheckpointResponse
)

CREATE_UPLOAD = Unary("ImportService", "CreateUpload", imports.CreateUploadRequest, imports.CreateUploadResponse)
UPLOAD_PART = Unary("ImportService", "UploadPart", imports.UploadPartRequest, imports.UploadPartResponse)
IMPORT_CHECKPOINT = Unary(
    "ImportService", "ImportCheckpoint", imports.ImportCheckpointRequest, imports.ImportCheckpointResponse
)

GET_OPERATION = Unary(
    "OperationService", "GetOperation", operations.GetOperationRequest, operations.GetOperationResponse
)
WAIT_OPERATIONS = ServerStream(
    "OperationService", "WaitOperations", operations.WaitOperationsRequest, operations.WaitOperationsResponse
)
CANCEL_OPERATION = Unary(
    "OperationService", "CancelOperation", operations.CancelOperationRequest, operations.CancelOperationResponse
)

MOVE_ADAPTER = Unary("AdapterService", "MoveAdapter", adapters.MoveAdapterRequest, adapters.MoveAdapterResponse)

GET_POOL_STATUS = Unary("PoolService", "GetPoolStatus", pool.GetPoolStatusRequest, pool.GetPoolStatusResponse)
WATCH_CYCLES = ServerStream("PoolService", "WatchCycles", pool.WatchCyclesRequest, pool.WatchCyclesResponse)
DRAIN_WORKER = Unary("PoolService", "DrainWorker", pool.DrainWorkerRequest, pool.DrainWorkerResponse)
UNDRAIN_WORKER = Unary("PoolService", "UndrainWorker", pool.UndrainWorkerRequest, pool.UndrainWorkerResponse)
GET_USAGE = Unary("PoolService", "GetUsage", pool.GetUsageRequest, pool.GetUsageResponse)
CREATE_API_KEY = Unary("AdminService", "CreateApiKey", admin.CreateApiKeyRequest, admin.CreateApiKeyResponse)
LIST_API_KEYS = Unary("AdminService", "ListApiKeys", admin.ListApiKeysRequest, admin.ListApiKeysResponse)
REVOKE_API_KEY = Unary("AdminService", "RevokeApiKey", admin.RevokeApiKeyRequest, admin.RevokeApiKeyResponse)
CREATE_TENANT = Unary("AdminService", "CreateTenant", admin.CreateTenantRequest, admin.CreateTenantResponse)
LIST_TENANTS = Unary("AdminService", "ListTenants", admin.ListTenantsRequest, admin.ListTenantsResponse)
GET_TENANT_LIMITS = Unary(
    "LimitService", "GetTenantLimits", limits.GetTenantLimitsRequest, limits.GetTenantLimitsResponse
)
SET_TENANT_LIMITS = Unary(
    "LimitService", "SetTenantLimits", limits.SetTenantLimitsRequest, limits.SetTenantLimitsResponse
)
ROTATE_API_KEY = Unary("AdminService", "RotateApiKey", admin.RotateApiKeyRequest, admin.RotateApiKeyResponse)
LIST_AUDIT_ENTRIES = Unary(
    "AdminService", "ListAuditEntries", admin.ListAuditEntriesRequest, admin.ListAuditEntriesResponse
)
RELEASE_TENANT = Unary(
    "ProbationService", "ReleaseTenant", probation.ReleaseTenantRequest, probation.ReleaseTenantResponse
)
GET_TENANT = Unary("AdminService", "GetTenant", admin.GetTenantRequest, admin.GetTenantResponse)
SUSPEND_TENANT = Unary("AdminService", "SuspendTenant", admin.SuspendTenantRequest, admin.SuspendTenantResponse)
RESUME_TENANT = Unary("AdminService", "ResumeTenant", admin.ResumeTenantRequest, admin.ResumeTenantResponse)
DELETE_TENANT = Unary("AdminService", "DeleteTenant", admin.DeleteTenantRequest, admin.DeleteTenantResponse)
