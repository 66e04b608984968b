"""The contract between coordinator and workers; imports neither torch nor ray.

All of it is public: `messages`, `contents` (of states), `protocols` (Engine, Pool and their errors), `settings`,
`logs`, `capacity` (samples), `loss_inputs`, `gradient_windows`, `adapted_modules`, `model_descriptions`, `failpoints`.
"""
