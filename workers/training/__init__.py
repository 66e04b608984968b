"""Training: runs a batch's items on the adapters' rows, in packed passes and steps.

Public, for the engine: `items.ItemRunner`, `passes.PassRunner` and `copies.AdapterCopies`. For trials also `memory`,
`passes.Request`, `pass_graphs` and `optim`. Inside: `progress` (the fence), `logits` or `device_logits`, with
`block_scores` or `kernel_scores` and its `loss_kernels`, `losses`, `adamw_launches` with `adamw_kernels`,
`phase_times`.
"""
