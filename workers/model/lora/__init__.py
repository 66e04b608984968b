"""Multi-LoRA linear layers: one frozen product for all tenants' rows, and small products for each adapter's segment.

Public interface: `segments.Segment`, `linears` (`LinearGroup`, `MultiLoraLinear`, `Saved`, `FusedSaved`),
`routing.CurrentPass`; for trials `segments.Run` with the products, and `grouped`.
"""
