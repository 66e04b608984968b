"""Trials that run when a base model is loaded: the conditions of equal bits, the longest sequence that fits, costs.

Public: `loading.load_base_model` (with the trials of rows and batching, `row_invariance`, of sequences,
`sequence_invariance`, of experts, `expert_invariance`, of a library's linear attention, `library_delta`, and of kernels
of our own, `training_kernels` and `loss_kernels`) and `fitting_tokens`, `thread_invariance.is_thread_count_invariant`,
`page_attention.tried_page_kernel`, `adapter_costs.measured_costs`, `step_costs.sequences_of_fixed_time`.
"""
