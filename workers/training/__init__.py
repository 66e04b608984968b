"""Training: runs a batch's items on the adapters' rows, in packed passes and steps.

Public, for the engine: `items.ItemRunner`, `passes.PassRunner` and `copies.AdapterCopies`. For trials also `memory`,
`passes.Request`, `pass_graphs`, `optim`, `kernel_scores`, `logits` and `losses`. Inside: `progress` (the fence),
`device_logits`, `block_scores`, `loss_kernels`, `adamw_launches` with `adamw_kernels`, `phase_times`.
"""
