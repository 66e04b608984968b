"""What people can see of a pool: what each operation waited for, timelines of sessions, metrics, traces.

Public interface: `timeline.WaitClock` and `timeline.Timeline`; `throughput.Throughput`; `metrics`, the counters and
histograms of the process; `session_trace.SessionTrace`; `traces.Traces`, imported only by a pool that sends traces.

It is told what happens and decides nothing: no other room reads from it what to do. Must not depend on operations,
cycles or transports.
"""
