"""The contract between coordinator and workers; imports neither torch nor ray.

All of it is public: `messages`, `protocols` (Engine, Pool and their errors), `settings`, `capacity` (samples),
`training_rules` (inputs of losses, gradient windows), `failpoints`.
"""
