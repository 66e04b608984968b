"""The frozen base model with multi-LoRA linears.

Public interface: `base_model.BaseModel`, `pretrained.UnsupportedModelError`, `attention.Attend`, `packed_delta.Recur`
with the `delta_rule`, and the layers that a pass is made of (`segments.Segment`, `linears`). For trials: `numerics`,
`frozen_products`, `segments`, `expert_products`, `expert_shares`. Inside: `files` of a model, `families`,
`replacement`, `gated_delta`, `library_delta`, `experts`, `expert_groups`, `clamped_gate`, `fused_modules`,
`recomputation`, `gpu_attention`, `fixed_order`; `usual_layers`, `sampling_layers`, `training_layers`, `fused_runs`, and
our own kernels: `gpu_operations`, `adapter_kernels`, `gate_kernels`, `few_rows`, `few_rows_kernels`, `expert_kernels`,
`layer_operations`, `layer_kernels`, `delta_heads`, `delta_head_kernels`, `product_kernels`, `attention_kernels`.
"""
