"""Parts of the HTTP server that the Tinker and the OpenAI protocol share.

Public interface: `calls` (a call and its body), `responses` (statuses, large JSON, event streams), `downloads`
(signed URLs), `tokenizers`. For the server: `connections`, `places`, `bodies`, `request_ids`.
"""
