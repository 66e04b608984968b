"""A CUDA device that computes nothing and counts everything, on a machine without a GPU.

`guard` lets torch's fake tensors run forward and backward for "cuda" on a build for CPUs; `device` stands in for the
parts of `torch.cuda` that the workers call; `counting` counts, by the rules of `costs`; `hardware` has the time model;
`engines` makes engines without weights; `processes` runs functions in a process of their own, which the guard needs.
What tests call there is in `operations`, `paths` and `scenarios`; the counted cases are in `scripts/bench/gpu_count`.
"""
