"""Parts of the HTTP server that the Tinker and the OpenAI protocol share.

Public interface: `calls` (a call and its body), `connections`, `downloads` (signed URLs), `encoding` (large JSON
bodies), `errors` (status and headers), `schemas`, `tokenizers`.
"""
