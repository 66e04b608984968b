"""The least role for each RPC of the contract, by the name of its use case. Data only; the doors check it.

The HTTP door's routes name use cases of this table. A role that only reads may also wait for results: that changes
nothing, because a result that it fetches does not count as fetched.
"""

from __future__ import annotations

from collections.abc import Mapping

from coordinator.tenants.principals import Role

LEAST_ROLES: Mapping[str, Role] = {
    **dict.fromkeys(
        (
            "get_capabilities",
            "get_tokenizer",
            "get_session",
            "list_sessions",
            "get_adapter",
            "list_adapters",
            "get_sampler",
            "get_checkpoint",
            "list_checkpoints",
            "export_checkpoint",
            "get_operation",
            "wait_operations",
            "get_history_entry",
            "list_history",
            "export_session_trace",
            "get_pool_status",
            "watch_cycles",
            "get_usage",
            "get_tenant_limits",
        ),
        Role.READ_ONLY,
    ),
    **dict.fromkeys(
        (
            "create_session",
            "heartbeat",
            "finish_session",
            "create_adapter",
            "delete_adapter",
            "move_adapter",
            "rename_adapter",
            "forward",
            "forward_backward",
            "optim_step",
            "train_step",
            "load_state",
            "discard_gradient",
            "save_state",
            "save_weights_for_sampler",
            "delete_checkpoint",
            "set_checkpoint_ttl",
            "set_checkpoint_access",
            "copy_checkpoint",
            "create_upload",
            "upload_part",
            "import_checkpoint",
            "create_sampler",
            "sample",
            "stream_sample",
            "cancel_operation",
            "report_metrics",
            "rotate_api_key",
        ),
        Role.MEMBER,
    ),
    **dict.fromkeys(
        (
            "create_api_key",
            "list_api_keys",
            "revoke_api_key",
            "create_tenant",
            "list_tenants",
            "get_tenant",
            "suspend_tenant",
            "resume_tenant",
            "delete_tenant",
            "set_tenant_limits",
            "list_audit_entries",
            "release_tenant",
            "drain_worker",
            "undrain_worker",
        ),
        Role.ADMIN,
    ),
}
"""Use case to the least role of its callers."""
