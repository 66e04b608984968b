"""Parts of the HTTP server that its protocols and the page share.

Public interface: `calls` (a call and its body), `responses` (statuses, large JSON, event streams), `downloads`
(signed URLs), `files` (ranges of files), `sign_ins` (cookies of browsers), `tokenizers`. For these: `signatures`. For
the server: `connections`, `places`, `bodies`, `request_ids`.
"""
