"""Continuous batching of samples: sequence slots, key-value blocks, prefill and decode passes, drawing.

Public interface: `sampler.Sampler` and `SamplerLimits`. Inside: `sequences` and `prompts` wait in the `slot_queue`;
`step_shares` chooses what a step takes of each scope; `prefill` with the `kv_cache` and `delta_states`, `sample_pass`
with its `attention`, `draws` and `drawing` make a step, on a GPU with `step_graphs`, `delta_steps`, its
`delta_kernels`, `device_drawing`, `draw_graphs` and the `graph_pool`; `errors`.
"""
