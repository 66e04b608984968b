"""The page for browsers at `/ui`, and what it reads: the contract's RPCs in JSON, and cycles as they commit.

`rpcs` serves the RPCs to any client that speaks JSON, with an API key or a browser's sign-in, and `cycles` streams the
cycles. The page has no other source but OpenAI's API, for its playground. `page` serves its files, the sign-in and the
sign-out. The files are in `static`: plain JavaScript modules, no build step.
"""
