"""Decides which sample runs next and on which worker, streams tokens, and commits finished samples.

Public interface: `assembly.make_sample_scheduler`, `scheduler.SampleScheduler` (all unfinished samples; its `streams`
have the listeners), `sample.Event`. Inside: `fair_queue` (which sample is next), `placement` (which worker has it).

Must not depend on cycles, on use cases or doors, or on what a token means.
"""
