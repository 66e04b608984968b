"""The frozen base model with multi-LoRA linears."""
