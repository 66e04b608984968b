"""OpenAI's completions, chat completions and models.

Public interface: `endpoints.OpenAi`, with a handler for each path, and `errors.error_response`. Every choice is a
sample of the service: durable, fair among tenants, and with the same seed the same as through the other doors. The
coordinator handles text in this package alone (`text_models`, `templates`, `detokenizer`); tokenizers and templates are
files of the base model. `schemas`, `weights` and `samples` lead to the service, `choices` and `responses` back.
"""
