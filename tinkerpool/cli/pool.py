"""`status` and `watch`: the cycles of a pool, its queue, and what its tenants do."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Annotated

import typer
from rich.text import Text

from tinkerpool.cli import show
from tinkerpool.cli.connection import TIMEOUT_S, JsonOption, call, follow
from tinkerpool.cli.finding import Target, calls_pool
from tinkerpool.cli.workers import show_workers
from tinkerpool.client.calls.methods import GET_POOL_STATUS, WATCH_CYCLES
from tinkerpool.client.calls.transport import Transport
from tinkerpool.history import kind_name, reason_of
from tinkerpool.v1 import pool_pb2, probation_pb2

OTHERS = "(others)"
"""Stands for tenants whose names this API key may not see."""
RUNNING_ROWS = 20
"""Running adapters that `status` shows."""


@calls_pool
def status(
    target: Target,
    num_cycles: Annotated[
        int, typer.Option("--cycles", "-n", min=0, max=1000, help="Number of last cycles to show.")
    ] = 8,
    json: JsonOption = False,
) -> None:
    """Show the workers, the queued operations, and the last cycles with their tenants."""
    response = call(target, GET_POOL_STATUS, pool_pb2.GetPoolStatusRequest(num_cycles=num_cycles or 1))
    if num_cycles == 0:
        response.ClearField("cycles")
    if json:
        show.json_message(response)
        return
    show.say(
        f"tinkerpool {response.version} at {target.url}, up {show.duration(response.uptime_seconds)}, "
        f"start {response.epoch} on its data"
    )
    show.say(queue_line(response))
    show.say(tokens_line(response))
    for problem in problems_of(response):
        show.say(f"Problem: {problem.text}" + (f" ({problem.command})" if problem.command else ""))
    show.console.print()
    show_workers(response.workers)
    if response.tenants:
        show.console.print()
        _show_tenants(response.tenants)
    if response.running_adapters:
        show.console.print()
        _show_running(response)
    if response.probations:
        show.console.print()
        _show_probations(response.probations)
    if response.cycles:
        show.console.print()
        _show_cycles(response.cycles)
    elif num_cycles:
        show.say("No cycle has run yet.")


def problems_of(response: pool_pb2.GetPoolStatusResponse) -> list[pool_pb2.Problem]:
    """Return what is wrong with the pool. One of an older version says only why it refuses new work."""
    older = [pool_pb2.Problem(text=response.problem, is_severe=True)] if response.problem else []
    return list(response.problems) or older


def queue_line(response: pool_pb2.GetPoolStatusResponse) -> str:
    """Return in a sentence what waits and runs."""
    return (
        f"{_plural(response.num_queued, 'operation')} queued, {response.num_running} running, "
        f"{_plural(response.num_samples, 'sample request')} open, of {_plural(response.num_tenants, 'tenant')}"
    )


def tokens_line(response: pool_pb2.GetPoolStatusResponse) -> str:
    """Return in a sentence the tokens a second: those trained of all tenants, those sampled of tenants with a name."""
    trained = sum(each.trained_tokens_per_second for each in response.tenants)
    sampled = sum(each.sampled_tokens_per_second for each in response.tenants)
    own = " for you" if any(not each.tenant for each in response.tenants) else ""
    return f"{rate(trained)} tokens/s trained, {rate(sampled)} sampled{own}"


def rate(tokens_per_second: float) -> str:
    """Return tokens a second; small ones with a decimal."""
    return f"{tokens_per_second:.1f}" if 0 < tokens_per_second < 10 else show.count(tokens_per_second)


def tenant_cells(tenant: pool_pb2.TenantActivity) -> tuple[str | Text, ...]:
    """Return what a tenant does, as cells of a table: name, queue, running, adapters, age, tokens a second, reasons."""
    waiting = ", ".join(f"{reason_of(each.reason) or 'turn'} {each.num_operations:,}" for each in tenant.waiting)
    return (
        Text(tenant.tenant or OTHERS),
        show.count(tenant.num_queued),
        show.count(tenant.num_running),
        show.count(tenant.num_running_adapters),
        show.duration(tenant.oldest_seconds) if tenant.oldest_seconds else "",
        rate(tenant.trained_tokens_per_second),
        rate(tenant.sampled_tokens_per_second),
        Text(waiting),
    )


def _show_tenants(tenants: Iterable[pool_pb2.TenantActivity]) -> None:
    show.table(
        "Tenants",
        ("tenant", "queued", "running", "adapters", "oldest", "trained/s", "sampled/s", "waits for"),
        map(tenant_cells, tenants),
        right="queued running adapters oldest trained/s sampled/s",
    )


def _show_running(response: pool_pb2.GetPoolStatusResponse) -> None:
    shown = response.running_adapters[:RUNNING_ROWS]
    show.table(
        "Running adapters",
        ("adapter", "tenant", "worker", "runs"),
        (
            (
                each.adapter_id,
                each.tenant,
                each.worker_id,
                f"{kind_name(each.kind)} {each.operation.rpartition(':')[2]}",
            )
            for each in shown
        ),
        whole=("adapter", "runs"),
        spare=("worker", "tenant"),
    )
    if num_more := sum(each.num_running_adapters for each in response.tenants) - len(shown):
        show.say(f"... and {num_more:,} more")


def _show_probations(probations: Iterable[probation_pb2.Probation]) -> None:
    show.table(
        "On probation: run alone, because their operations ended workers",
        ("tenant", "kills", "last one by", "still for", "next operation"),
        (
            (
                each.tenant,
                str(each.num_kills),
                each.operation,
                show.duration(each.remaining_seconds),
                f"in {show.duration(each.backoff_seconds)}" if each.backoff_seconds else "in its turn",
            )
            for each in probations
        ),
        right="kills",
        whole=("last one by",),
    )


def _show_cycles(cycles: Iterable[pool_pb2.Cycle]) -> None:
    show.table(
        "Last cycles",
        ("cycle", "at", "base model", "pass", "step", "commit", "tokens", "tenants"),
        (
            (
                str(cycle.cycle_id),
                show.clock_time(cycle.start_time),
                cycle.base_model,
                show.duration(cycle.pass_seconds),
                show.duration(cycle.step_seconds),
                show.duration(cycle.commit_seconds),
                show.count(_num_tokens(cycle)),
                _tenants(cycle),
            )
            for cycle in cycles
        ),
        right="cycle pass step commit tokens",
    )


@calls_pool
def watch(
    target: Target,
    num_cycles: Annotated[int, typer.Option("--cycles", "-n", min=0, help="Stop after this many. 0: never.")] = 0,
    json: JsonOption = False,
) -> None:
    """Show each cycle when it has committed, with its tenants. Ctrl-C ends it."""

    async def look(transport: Transport) -> None:
        # A stream is silent until a cycle has run; this call fails at once if there is no pool.
        await transport.call(GET_POOL_STATUS, pool_pb2.GetPoolStatusRequest(num_cycles=1), timeout_s=TIMEOUT_S)
        if not json:
            show.note(f"Watching {target.url}; a line for each cycle. Ctrl-C ends it.")
        num_seen = 0
        async for response in transport.stream(WATCH_CYCLES, pool_pb2.WatchCyclesRequest()):
            if json:
                show.json_line(response.cycle)
            else:
                show.say(_line(response.cycle))
            num_seen += 1
            if num_seen == num_cycles:
                return

    follow(target, look)


def _line(cycle: pool_pb2.Cycle) -> str:
    seconds = cycle.pass_seconds + cycle.step_seconds + cycle.commit_seconds
    return (
        f"{show.clock_time(cycle.start_time)}  #{cycle.cycle_id:<6} {cycle.base_model}  {show.duration(seconds):>7}  "
        f"{show.count(_num_tokens(cycle)):>7} tokens  {_tenants(cycle)}"
    )


def _num_tokens(cycle: pool_pb2.Cycle) -> int:
    return sum(entry.num_tokens for entry in cycle.entries)


def _tenants(cycle: pool_pb2.Cycle) -> str:
    """Return `alice x2 +step, bob, (others) x3`: tenants with their number of adapters, others' number, and steps."""
    by_tenant: dict[str, list[pool_pb2.CycleEntry]] = defaultdict(list)
    for entry in cycle.entries:
        by_tenant[entry.tenant or OTHERS].append(entry)
    return ", ".join(_tenant(tenant, by_tenant[tenant]) for tenant in sorted(by_tenant, key=lambda t: (t == OTHERS, t)))


def _tenant(tenant: str, entries: Iterable[pool_pb2.CycleEntry]) -> str:
    entries = list(entries)
    adapters = {entry.adapter_id for entry in entries} if tenant != OTHERS else set(range(len(entries)))
    several = f" x{len(adapters)}" if len(adapters) > 1 else ""
    return f"{tenant}{several}{' +step' if any(entry.is_step for entry in entries) else ''}"


def _plural(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
