"""OpenAI's completions, chat completions and models, thin over the same use cases as the other doors.

Every choice is a sample of the service: durable, fair among tenants, and by its seed the same as through the other
doors. Only the modules here know OpenAI's shapes, and only here does the coordinator know text: tokenizers and chat
templates are files that a base model brings along.
"""
