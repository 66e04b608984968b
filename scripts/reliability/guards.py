"""Remove the durability guards, one at a time, and show that a test fails for each.

    make guards                                   # all guards: some minutes
    python -m scripts.reliability.guards rename   # guards with this word in their name

Works on a copy of the project in a temporary folder. For each guard: its tests pass on the unchanged copy, the guard is
removed, the same tests fail, the guard is restored. If the tests pass without the guard, the exit code is 1.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 600
COPIED = ("coordinator", "protos", "scripts", "tests", "tinkerpool", "workers", "pyproject.toml", "README.md")


@dataclass(frozen=True, slots=True, kw_only=True)
class Guard:
    """A piece of code that a promise needs."""

    name: str
    file: str
    before: str
    """The guard's text, which occurs once in the file."""
    after: str
    """Its replacement without the guard."""
    tests: tuple[str, ...]
    """Arguments of pytest."""


GUARDS = (
    Guard(
        name="nobody waits for a worker that is late",
        file="coordinator/cycle/dispatch.py",
        before="if not part.reply.done() and not part.worker.is_late]",
        after="if not part.reply.done()]",
        tests=("tests/integration/cycles/test_late_workers.py", "-k", "others_go_on", "--timeout", "30"),
    ),
    Guard(
        name="the plan of a part that was split off stays in the log",
        file="coordinator/cycle/commit.py",
        before="open_ids=tuple(sorted(self._open))",
        after="open_ids=()",
        tests=("tests/integration/cycles/test_late_workers.py", "-k", "others_go_on"),
    ),
    Guard(
        name="a late step takes its pass along",
        file="coordinator/cycle/commit.py",
        before="        for operation in part.finished:\n            operation.move_to_cycle(cycle_id)\n",
        after="",
        tests=("tests/integration/cycles/test_late_workers.py", "-k", "takes_its_pass_along"),
    ),
    Guard(
        name="what a late worker's part decided is committed before anything behind it",
        file="coordinator/scheduling/ready_set.py",
        before="if log.home not in away and log.adapter_id not in held]",
        after="if log.home not in away]",
        tests=("tests/unit/scheduling/test_ready_set.py", "-k", "part_of_a_cycle_is_open"),
    ),
    Guard(
        name="nobody is charged for the wait for a late worker",
        file="coordinator/cycle/phases.py",
        before="        cycle.worked(now - cycle.started)  # the wait is charged to no tenant\n",
        after="",
        tests=("tests/integration/cycles/test_late_workers.py", "-k", "pay_for_no_wait"),
    ),
    Guard(
        name="a worker that is late gets nothing new",
        file="coordinator/fleet/fleet.py",
        before="return [w for w in self.live(base_model) if not w.is_away]",
        after="return self.live(base_model)",
        tests=("tests/integration/cycles/test_late_workers.py", "-k", "gets_nothing_new", "--timeout", "30"),
    ),
    Guard(
        name="a first silence suspects nothing",
        file="coordinator/scheduling/worker_losses.py",
        before="        if kind is LossKind.SILENT:\n",
        after="        if False:\n",
        tests=("tests/unit/scheduling/test_worker_losses.py", "-k", "first_silence"),
    ),
    Guard(
        name="what has lost two workers does not take the last one",
        file="coordinator/scheduling/quarantine.py",
        before="if not (group.has_killed and self._is_short) and",
        after="if",
        tests=("tests/integration/cycles/test_poison.py", "-k", "at_most_once", "--timeout", "60"),
    ),
    Guard(
        name="a worker that is drained is none that is left",
        file="coordinator/runtime/supervision.py",
        before="is_ending=True)\n            self._losses.drained(worker_id)\n",
        after="is_ending=True)\n",
        tests=("tests/integration/cycles/test_poison.py", "-k", "takes_no_last", "--timeout", "60"),
    ),
    Guard(
        name="operations of a lost worker do not wait for its replacement",
        file="coordinator/scheduling/quarantine.py",
        before="if not (group.has_killed and self._is_short) and",
        after="if not self._is_short and",
        tests=("tests/integration/cycles/test_poison.py", "-k", "go_on_at_once", "--timeout", "30"),
    ),
    Guard(
        name="operations of a lost worker run next on one that was asked since",
        file="coordinator/scheduling/worker_losses.py",
        before="            quarantine.begin_check()\n",
        after="            pass\n",
        tests=("tests/integration/cycles/test_poison.py", "-k", "lost_at_once", "--timeout", "30"),
    ),
    Guard(
        name="a solo turn in flight pays for the loss of its worker, whatever its adapter waits for",
        file="coordinator/scheduling/solo_turns.py",
        before="        if turn.is_running and turn.name in in_flight:\n            return True\n",
        after="",
        tests=("tests/unit/scheduling/test_solo_turns.py", "-k", "pays_for_its_loss"),
    ),
    Guard(
        name="a copy that a quarantine holds gives its room to what may run",
        file="coordinator/scheduling/worker_memory.py",
        before="if not (log.is_between_operations or is_held):",
        after="if not log.is_between_operations:",
        tests=("tests/unit/scheduling/test_worker_memory.py", "-k", "begun_operation"),
    ),
    Guard(
        name="a worker that is drained gets nothing new",
        file="coordinator/fleet/fleet.py",
        before="if w.is_live and not w.is_draining]",
        after="if w.is_live]",
        tests=("tests/integration/cycles/test_membership.py", "-k", "next_one_runs_elsewhere"),
    ),
    Guard(
        name="adapters leave a worker that is drained",
        file="coordinator/scheduling/worker_memory.py",
        before="        for worker in self._fleet.drained(self._base_model):\n",
        after="        for worker in []:\n",
        tests=("tests/integration/cycles/test_membership.py", "-k", "go_on_elsewhere", "--timeout", "60"),
    ),
    Guard(
        name="a copy is snapshotted before it leaves a drained worker",
        file="coordinator/scheduling/worker_memory.py",
        before="if can_wait and self._snapshots.can_take(log) and not",
        after="if False and not",
        tests=("tests/integration/cycles/test_drains.py", "-k", "without_a_replay"),
    ),
    Guard(
        name="nothing is suspected when a worker is ended because its host leaves",
        file="coordinator/scheduling/worker_losses.py",
        before="suspects = () if has_left else self._suspects(training, sent)",
        after="suspects = self._suspects(training, sent)",
        tests=("tests/integration/cycles/test_drains.py", "-k", "is_not_suspected"),
    ),
    Guard(
        name="a worker is ended before its host leaves, whatever it does",
        file="coordinator/runtime/supervision.py",
        before="        if self._time.monotonic() >= end_s:\n",
        after="        if False:\n",
        tests=("tests/integration/cycles/test_drains.py", "-k", "is_not_suspected", "--timeout", "30"),
    ),
    Guard(
        name="the only worker of a model works on until another one can stand in",
        file="coordinator/runtime/supervision.py",
        before="return is_near or worker.name in self._prepared or self._has_others(worker)",
        after="return True",
        tests=("tests/integration/cycles/test_drains.py", "-k", "only_worker", "--timeout", "30"),
    ),
    Guard(
        name="a drained worker is not started at the next start",
        file="coordinator/runtime/core.py",
        before="await self.pool.start(owner, drained)",
        after="await self.pool.start(owner)",
        tests=("tests/integration/cycles/test_drains.py", "-k", "not_started_at_the_next_start"),
    ),
    Guard(
        name="a worker that is drained is not replaced",
        file="coordinator/runtime/supervision.py",
        before="            if worker_id in self._ending:\n                break\n",
        after="",
        tests=("tests/integration/cycles/test_membership.py", "-k", "replacement_waits"),
    ),
    Guard(
        name="copies leave a worker whose memory is full",
        file="coordinator/cycle/loop.py",
        before="        while self.planning.memory.make_room():\n",
        after="        while False:\n",
        tests=("tests/integration/client/test_host_memory.py",),
    ),
    Guard(
        name="a copy that no snapshot covers is snapshotted before it leaves",
        file="coordinator/scheduling/worker_memory.py",
        before="elif log.copy.applied_seq <= log.snapshot_seq or is_held:",
        after="elif True:",
        tests=("tests/unit/scheduling/test_worker_memory.py", "-k", "snapshotted_first"),
    ),
    Guard(
        name="a copy whose state cannot be fetched is installed again",
        file="workers/training/copies.py",
        before="            return  # it is installed again\n",
        after="            pass\n",
        tests=("tests/numerics/training/test_engine.py", "-k", "by_a_reference"),
    ),
    Guard(
        name="what was planned and did not run is taken back",
        file="coordinator/cycle/commit.py",
        before="        self._planning.take_back(cycle.unused_tokens, cycle.floors)\n",
        after="",
        tests=("tests/integration/cycles/test_budgets.py", "-k", "taken_back"),
    ),
    Guard(
        name="no correction goes below the counter before its plan",
        file="coordinator/scheduling/virtual_counters.py",
        before="share.charged(-number).lifted(least)",
        after="share.charged(-number)",
        tests=("tests/unit/scheduling/test_virtual_counters.py", "-k", "no_correction"),
    ),
    Guard(
        name="the rest of a cycle is charged to its adapters",
        file="coordinator/cycle/commit.py",
        before="        self._charge_rest(cycle)\n",
        after="",
        tests=("tests/integration/cycles/test_budgets.py", "-k", "rest_of_a_cycle"),
    ),
    Guard(
        name="the wait for sent results behind a cycle is not charged to a snapshot",
        file="coordinator/cycle/phases.py",
        before="        messages_s = num_bytes * self._read_byte_s",
        after="        messages_s = rest_s",
        tests=("tests/integration/cycles/test_budgets.py", "-k", "sending_results"),
    ),
    Guard(
        name="a snapshot that costs much waits until the bound on a replay",
        file="coordinator/checkpoints/snapshots.py",
        before="            bound_s = EARLY_PART * self._replay_s_max if is_good_time else self._replay_s_max",
        after="            bound_s = EARLY_PART * self._replay_s_max",
        tests=("tests/unit/checkpoints/test_snapshots.py", "-k", "due_at_a_quarter or slow_writes"),
    ),
    Guard(
        name="the first snapshot of an adapter is taken to cost as much as another's",
        file="coordinator/checkpoints/snapshots.py",
        before="self._cost_s.get(adapter.adapter_id, self._last_cost_s)",
        after="self._cost_s.get(adapter.adapter_id, 0.0)",
        tests=("tests/unit/checkpoints/test_snapshots.py", "-k", "slow_writes"),
    ),
    Guard(
        name="rows for an expert are padded by their own number",
        file="workers/model/expert_shares.py",
        before="            batches[part].setdefault((occurrence, share_rows(length)), []).append(share)",
        after="            batches[part].setdefault((occurrence, share_rows(int(lengths.max()))), []).append(share)",
        tests=("tests/numerics/model/test_experts.py", "-k", "gradients_of_a_share"),
    ),
    Guard(
        name="two segments of an adapter add to an expert's gradient one after the other",
        file="workers/model/expert_shares.py",
        before="            batches[part].setdefault((occurrence, share_rows(length)), []).append(share)",
        after="            batches[part].setdefault((0, share_rows(length)), []).append(share)",
        tests=("tests/numerics/model/test_experts.py", "-k", "second_segment"),
    ),
    Guard(
        name="padding of an expert's rows adds nothing",
        file="workers/model/expert_shares.py",
        before="left.masked_fill(self.padding, 0).transpose(1, 2)",
        after="left.transpose(1, 2)",
        tests=("tests/numerics/model/test_experts.py", "-k", "rows_of_padding"),
    ),
    Guard(
        name="an expert's product has no fewer rows than keep a row's bits",
        file="workers/model/expert_products.py",
        before="np.maximum(-(-counts // ROWS_MULTIPLE) * ROWS_MULTIPLE, rows_min)",
        after="counts",
        tests=("tests/numerics/model/test_experts.py", "-k", "tenants"),
    ),
    Guard(
        name="the probe of a mixture in bf16 expects tokens to go to other experts",
        file="workers/model/experts.py",
        before="    shared.given = given = GivenChoices(choices)\n",
        after="    given = GivenChoices(choices)\n",
        tests=("tests/numerics/model/test_experts.py", "-k", "sends_a_token_of_the_probe_elsewhere"),
    ),
    Guard(
        name="the probe of a mixture in bf16 refuses routers that choose other experts",
        file="workers/model/experts.py",
        before="    if given.part_of_others > OTHER_CHOICES_MAX:",
        after="    if False:",
        tests=("tests/numerics/model/test_experts.py", "-k", "choose_other_experts"),
    ),
    Guard(
        name="PEFT adapts gates and ups of experts with the rank of both",
        file="coordinator/storage/joined_exports.py",
        before='"rank_pattern": {linear: count * config["r"] for',
        after='"rank_pattern": {linear: config["r"] for',
        tests=("tests/numerics/model/test_families.py", "-k", "exported_adapter and qwen3_moe"),
    ),
    Guard(
        name="PEFT takes no dense linear of a mixture for one of experts",
        file="coordinator/storage/joined_exports.py",
        before="    if parameters:\n        # PEFT",
        after="    if False:\n        # PEFT",
        tests=("tests/numerics/model/test_families.py", "-k", "exported_adapter and qwen3_moe"),
    ),
    Guard(
        name="queries and keys in bf16 stay so behind rotary positions in fp32",
        file="workers/model/fused_modules.py",
        before="    return y.to(x.dtype)\n",
        after="    return y\n",
        tests=("tests/numerics/model/test_families.py", "-k", "olmo2 and in_bf16"),
    ),
    Guard(
        name="gradients that are not neighbours are copied to be one tensor",
        file="workers/model/frozen_products.py",
        before="part.data_ptr() == place and part.stride() == (width, 1)",
        after="part.stride() == (width, 1)",
        tests=("tests/numerics/model/test_frozen_products.py", "-k", "neighbours"),
    ),
    Guard(
        name="padding of a chunk has no gradient",
        file="workers/model/packed_delta.py",
        before="return own if self.is_token is None else own.masked_fill(~self.is_token.unsqueeze(-1), 0.0)",
        after="return own",
        tests=("tests/numerics/model/test_gated_delta.py", "-x"),
    ),
    Guard(
        name="results of chunks go to the rows of their own tokens",
        file="workers/model/packed_delta.py",
        before="    positions = positions[np.argsort(of_tokens[positions])]\n",
        after="    of_tokens = np.sort(of_tokens)\n",
        tests=("tests/numerics/model/test_gated_delta.py", "-x"),
    ),
    Guard(
        name="routers compute rows in tiles of one size on a GPU",
        file="workers/model/base_model.py",
        before="self._exactly(numerics) if are_routers_apart and is_router(group.shape) else numerics",
        after="numerics",
        tests=("tests/fake_gpu/test_exact.py", "-k", "routers"),
    ),
    Guard(
        name="dense linears that PEFT adapts as parameters are imported",
        file="coordinator/payloads/peft_weights.py",
        before='            own_ends |= _ends(f"{name}.weight")',
        after="            pass",
        tests=("tests/numerics/export/test_imports.py", "-k", "every_architecture_is_imported and moe"),
    ),
    Guard(
        name="a pass leaves room for rows that are loaded while it runs",
        file="workers/training/passes.py",
        before="self.room.measure(self._bank.growth_bytes([*keys, *self.prefetch.expected]))",
        after="self.room.measure(0)",
        tests=("tests/numerics/bank/test_device_limit.py", "-k", "leave_room"),
    ),
    Guard(
        name="a sample that runs out of memory gets that of other adapters",
        file="workers/sampling/sampler.py",
        before="failure.code is ErrorCode.OUT_OF_MEMORY and self._bank.leave_only({active.key})",
        after="False",
        tests=("tests/numerics/sampling/test_sampler_memory.py", "-k", "runs_out_of_memory"),
    ),
    Guard(
        name="equally likely tokens are listed by their ids on a GPU",
        file="workers/sampling/device_drawing.py",
        before="    keys |= torch.arange(logprobs.shape[1], device=logprobs.device)\n",
        after="    keys |= torch.arange(logprobs.shape[1], device=logprobs.device).flip(0)\n",
        tests=("tests/unit/engine_sampling/test_device_drawing.py", "-k", "likeliest"),
    ),
    Guard(
        name="a pass has at most as many adapters as its worker has slots",
        file="coordinator/scheduling/planner.py",
        before="num_free[worker] >= is_new and",
        after="True and",
        tests=("tests/unit/scheduling/test_planner.py", "-k", "slots"),
    ),
    Guard(
        name="nobody gets far ahead of a chunk that does not fit",
        file="coordinator/scheduling/planner.py",
        before="        elif place <= limits[worker]:\n",
        after="        else:\n",
        tests=("tests/unit/scheduling/test_planner.py", "-k", "budget_ahead"),
    ),
    Guard(
        name="a tenant's hundreds of steps are spread over cycles",
        file="coordinator/scheduling/state_budget.py",
        before="_Room(0, max(steps_s_max, SECONDS_MAX))",
        after="_Room(0, 1e9)",
        tests=("tests/unit/scheduling/test_state_budget.py", "-k", "steps_take"),
    ),
    Guard(
        name="the samples of a deleted tenant end behind its sessions",
        file="coordinator/runtime/tenant_deletion.py",
        before="        self._samples.end_tenant(row.tenant_id)",
        after="        pass",
        tests=("tests/integration/cycles/test_tenant_deletion.py", "-k", "after_a_crash"),
    ),
    Guard(
        name="a repeat of a pass is recognized without the records that it used",
        file="coordinator/operations/admission.py",
        before="identity = payload if is_refused else request.identity or payload",
        after="identity = payload",
        tests=("tests/integration/sampling/test_sample_records.py",),
    ),
    Guard(
        name="a use renews the records of samples",
        file="coordinator/storage/operations.py",
        before="    if row.records:\n",
        after="    if False:\n",
        tests=("tests/integration/sampling/test_sample_records.py", "-k", "lives_a_day"),
    ),
    Guard(
        name="a session that has ended gets no record of a sample",
        file="coordinator/storage/records.py",
        before="    if live is None:\n",
        after="    if False:\n",
        tests=("tests/integration/sampling/test_sample_records.py", "-k", "leaves_no_record"),
    ),
    Guard(
        name="records of samples count as rows of their tenant",
        file="coordinator/storage/schema.py",
        before='    + _counting("sample_records", "R.num_bytes")\n',
        after="",
        tests=("tests/integration/sampling/test_sample_records.py", "-k", "records_count"),
    ),
    Guard(
        name="a failed sync is noted for the next start",
        file="coordinator/storage/database.py",
        before="            self._failed_sync.note()\n",
        after="            pass\n",
        tests=("tests/unit/storage/test_database.py", "-k", "after_a_failed_sync"),
    ),
    Guard(
        name="new work waits until the disk has room",
        file="coordinator/operations/admission.py",
        before="        if lack := self._store.database.lack_of_room():\n",
        after='        if lack := "":\n',
        tests=("tests/robustness/test_full_disk.py",),
    ),
    Guard(
        name="a page of a list ends at a number of bytes",
        file="coordinator/service/listings.py",
        before="                if num_bytes >= PAGE_BYTES_MAX:\n",
        after="                if False:\n",
        tests=("tests/integration/doors/test_listings.py", "-k", "bounded_by_bytes"),
    ),
    Guard(
        name="a page of a list begins behind the last row of the page before",
        file="coordinator/storage/rows.py",
        before="        if place.after is not None:\n",
        after="        if False:\n",
        tests=("tests/integration/doors/test_listings.py", "-k", "shift_no_other_row"),
    ),
    Guard(
        name="a call ends when its client leaves",
        file="coordinator/doors/http/connections.py",
        before="            self._call.cancel()\n",
        after="            pass\n",
        tests=("tests/integration/doors/test_listings.py", "-k", "clients_that_have_left"),
    ),
    Guard(
        name="after an append that failed, operations begin once they are durable",
        file="coordinator/scheduling/ready_set.py",
        before=" and not log.waits_for_append\n",
        after="\n",
        tests=("tests/integration/cycles/test_poison.py", "-k", "append_fails"),
    ),
    Guard(
        name="a worker that did not give up enough is asked what it holds",
        file="coordinator/cycle/loop.py",
        before="while self.planning.memory.make_room():",
        after="if self.planning.memory.make_room():",
        tests=("tests/simulation/test_simulation.py", "-k", "failed_once"),
    ),
    Guard(
        name="replies that are lost at several chunks of a replay are no verdict on its adapter",
        file="coordinator/cycle/results.py",
        before="log.copy.count_reinstall(result.op_id, entry.chunk)",
        after="log.copy.count_reinstall(result.op_id, 0)",
        tests=("tests/integration/cycles/test_recovery.py", "-k", "one_chunk_of_an_operation", "--timeout", "30"),
    ),
    Guard(
        name="what failed on a lost worker tells nothing of the next",
        file="coordinator/operations/adapter_log.py",
        before="        self.copy.reinstalls.clear()\n",
        after="",
        tests=("tests/unit/operations/test_adapter_log.py", "-k", "reinstalls"),
    ),
    Guard(
        name="a copy whose snapshot has failed leaves a drained worker",
        file="coordinator/scheduling/worker_memory.py",
        before=" and not self._snapshots.has_failed(log.adapter_id):",
        after=":",
        tests=("tests/unit/scheduling/test_worker_memory.py", "-k", "has_failed_leaves"),
    ),
    Guard(
        name="a sampler that is committed behind the end of its session leaves no folder",
        file="coordinator/checkpoints/saver.py",
        before="if row.folder and not is_live:",
        after="if False:",
        tests=("tests/simulation/test_simulation.py", "-k", "failed_once"),
    ),
    Guard(
        name="a sample that was logged before log-probabilities were scaled keeps its promise",
        file="coordinator/payloads/samples.py",
        before="scales_logprobs=request.logprobs_version == sampling_pb2.LOGPROBS_VERSION_SCALED",
        after="scales_logprobs=True",
        tests=("tests/integration/sampling/test_sample_upgrade.py",),
    ),
    Guard(
        name="fsync of the log",
        file="coordinator/storage/sqlite.py",
        before='db.execute("PRAGMA synchronous = FULL")',
        after='db.execute("PRAGMA synchronous = OFF")',
        tests=("tests/simulation/test_simulation.py", "-k", "no_history"),
    ),
    Guard(
        name="fsync of a file",
        file="coordinator/storage/folders.py",
        before="                disk.sync(temporary / file_name)\n",
        after="",
        tests=("tests/simulation/test_simulation.py", "-k", "no_history"),
    ),
    Guard(
        name="fsync of the folder after a rename",
        file="coordinator/storage/folders.py",
        before="            disk.sync(self._root)\n",
        after="",
        tests=("tests/simulation/test_simulation.py", "-k", "no_history"),
    ),
    Guard(
        name="atomic rename of a whole folder",
        file="coordinator/storage/folders.py",
        before="temporary, final = self._root / (_TEMPORARY + name), self._root / name",
        after="temporary, final = self._root / name, self._root / name",
        tests=("tests/unit/storage/test_folders.py",),
    ),
    Guard(
        name="checksum of a folder",
        file="coordinator/storage/folders.py",
        before="if digest != sha256:",
        after="if not files:",
        tests=("tests/unit/storage/test_folders.py",),
    ),
    Guard(
        name="quarantine of folders without a row",
        file="coordinator/storage/folders.py",
        before="            quarantine.take(self._root, name, service_s)\n",
        after="            self._disk.remove(self._root / name)\n",
        tests=("tests/simulation/test_simulation.py", "-k", "no_history"),
    ),
    Guard(
        name="a database of an older epoch is refused",
        file="coordinator/storage/identity.py",
        before="    if newest.epoch > database.epoch:\n",
        after="    if False:\n",
        tests=("tests/simulation/test_simulation.py", "-k", "no_history"),
    ),
    Guard(
        name="a missing database is refused",
        file="coordinator/storage/identity.py",
        before="        if found:\n",
        after="        if False:\n",
        tests=("tests/unit/storage/test_identity.py", "tests/unit/runtime/test_data_dir.py"),
    ),
    Guard(
        name="files of another pool are refused",
        file="coordinator/storage/identity.py",
        before="        if identity.pool_id != database.pool_id:\n",
        after="        if False:\n",
        tests=("tests/unit/storage/test_identity.py",),
    ),
    Guard(
        name="side file of each epoch",
        file="coordinator/runtime/data_dir.py",
        before="""self._disk)
        except OSError as error:
            if""",
        after="""self._disk) if not identity else None
        except OSError as error:
            if""",
        tests=("tests/unit/runtime/test_data_dir.py",),
    ),
    Guard(
        name="a data directory is closed to other users",
        file="coordinator/runtime/data_dir.py",
        before="            self._disk.restrict(path, OURS)\n",
        after="",
        tests=("tests/unit/runtime/test_data_dir.py",),
    ),
    Guard(
        name="no data directory on a network file system",
        file="coordinator/runtime/data_dir.py",
        before="        check_local(path, seams.mounts())\n",
        after="",
        tests=("tests/unit/runtime/test_data_dir.py",),
    ),
    Guard(
        name="checksum of a restored state",
        file="coordinator/runtime/restore.py",
        before="is_sound = copy_state(source / state.path, target, report.add) == state.sha256",
        after="is_sound = copy_state(source / state.path, target, report.add) != ''",
        tests=("tests/integration/data/test_restore.py", "-k", "damaged_states"),
    ),
    Guard(
        name="clients of before a restore are refused",
        file="coordinator/operations/admission.py",
        before="        if is_explicit and log.is_restored:\n",
        after="        if False:\n",
        tests=("tests/integration/data/test_restore.py", "-k", "of_before"),
    ),
    Guard(
        name="an adapter is lost with its snapshot",
        file="coordinator/storage/copies.py",
        before="    db.execute(deletion, (wall, adapter_id))\n",
        after="",
        tests=("tests/integration/data/test_restore.py", "-k", "snapshot_is_lost"),
    ),
    Guard(
        name="a later moment is read when a state was deleted",
        file="coordinator/runtime/backup.py",
        before="                if missing <= were_missing:\n",
        after="                if True:\n",
        tests=("tests/integration/data/test_backup.py", "-k", "later_moment"),
    ),
    Guard(
        name="hash of a payload",
        file="coordinator/operations/admission.py",
        before="    if operation.payload_hash != digest(_record_of(request), operation.kind.value):\n",
        after="    if False:\n",
        tests=("tests/unit/operations/test_admission.py",),
    ),
    Guard(
        name="acknowledgement after the append",
        file="coordinator/operations/admission.py",
        before="            await asyncio.shield(appended)\n",
        after="            pass\n",
        tests=("tests/unit/operations/test_admission.py",),
    ),
    Guard(
        name="check of the sequence number",
        file="workers/training/progress.py",
        before="if self.applied_seq != item.prev_seq or self.open_seq not in {None, item.seq} or not is_next:",
        after="if False:",
        tests=("tests/simulation/test_simulation.py", "-k", "no_history"),
    ),
    Guard(
        name="unique sequence number",
        file="coordinator/storage/schema.py",
        before="    PRIMARY KEY (target_id, seq),         -- exactly once: a seq exists once, whatever is sent\n",
        after="    PRIMARY KEY (target_id, seq, kind, payload_hash),\n",
        tests=("tests/unit/storage/test_store.py",),
    ),
    Guard(
        name="check of a batch's epoch",
        file="workers/engine.py",
        before="        if batch.epoch < self._epoch:\n",
        after="        if False:\n",
        tests=("tests/numerics/training/test_engine.py", "-k", "epoch"),
    ),
    Guard(
        name="adapter copies are dropped at a new epoch",
        file="workers/engine.py",
        before="        self._copies.clear()\n",
        after="",
        tests=("tests/numerics/training/test_engine.py", "-k", "epoch"),
    ),
    Guard(
        name="lock on the data directory",
        file="coordinator/runtime/data_dir.py",
        before="            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)\n",
        after="            pass\n",
        tests=("tests/robustness/test_processes.py", "-k", "paused"),
    ),
    Guard(
        name="no results of operations that the log lost",
        file="coordinator/storage/cycles.py",
        before="lost = lost_targets(db, commit.finished)",
        after="lost = frozenset()",
        tests=("tests/unit/storage/test_store.py", "tests/integration/cycles/test_recovery.py"),
    ),
    Guard(
        name="closed gradient window",
        file="coordinator/operations/copy.py",
        before="self.window = self.window.after(role, operation.seq, failure, operation.batch)",
        after="self.window = EMPTY",
        tests=("tests/integration/cycles/test_recovery.py", "tests/integration/cycles/test_cycles.py"),
    ),
    Guard(
        name="gradient of a batch that ran behind a failed one",
        file="coordinator/operations/copy.py",
        before="        self._progress_of(operation).is_running = False\n        self._added_gradient(operation)\n",
        after="        self._progress_of(operation).is_running = False\n",
        tests=("tests/unit/operations/test_adapter_log.py",),
    ),
    Guard(
        name="second run of a batch beside a failed one",
        file="workers/training/items.py",
        before="member.is_admitted and self._copies.must_run_again(member.item)",
        after="False",
        tests=("tests/numerics/training/test_isolation.py", "-k", "behind"),
    ),
    Guard(
        name="drop of a gradient that was discarded",
        file="workers/contract/gradient_windows.py",
        before="self is WindowRole.DISCARD or (has_failed",
        after="(has_failed",
        tests=("tests/integration/cycles/test_gradient_windows.py",),
    ),
    Guard(
        name="two solo losses before poison is decided",
        file="coordinator/scheduling/quarantine.py",
        before="        if not was_solo:\n",
        after="        if len(lost) > 1:\n",
        tests=("tests/unit/scheduling/test_quarantine.py",),
    ),
    Guard(
        name="a sample that was not sent is not suspected",
        file="coordinator/scheduling/worker_losses.py",
        before=" if flight.name not in worker.unsent)",
        after=")",
        tests=("tests/unit/scheduling/test_worker_losses.py", "-k", "being_read"),
    ),
    Guard(
        name="a run beside something that is not suspected is not solo",
        file="coordinator/scheduling/quarantine.py",
        before="        was_solo = len(lost) == 1 and is_group and not has_others\n",
        after="        was_solo = len(lost) == 1 and is_group\n",
        tests=("tests/unit/scheduling/test_worker_losses.py", "-k", "not_suspected"),
    ),
    Guard(
        name="solo turns of a tenant on probation",
        file="coordinator/scheduling/ready_set.py",
        before="        if not self._turns.are_idle and self._turns.is_held(log):\n            has_turn = ",
        after="        if False:\n            has_turn = ",
        tests=("tests/integration/cycles/test_probation.py", "-k", "repeat_poisoner"),
    ),
    Guard(
        name="others keep off the worker of a solo turn",
        file="coordinator/scheduling/solo_turns.py",
        before="            return log.home != self.reserved\n",
        after="            return True\n",
        tests=("tests/unit/scheduling/test_solo_turns.py",),
    ),
    Guard(
        name="solo turns of samples",
        file="coordinator/scheduling/solo_turns.py",
        before="        if not self._probation.has(tenant_id):\n            return True\n        if name not",
        after="        if True:\n            return True\n        if name not",
        tests=("tests/integration/cycles/test_probation.py", "-k", "samples"),
    ),
    Guard(
        name="pause after a loss in a solo turn",
        file="coordinator/scheduling/solo_turns.py",
        before="            self._probation.record_cost(turn.tenant_id, seconds)\n",
        after="",
        tests=("tests/unit/scheduling/test_solo_turns.py",),
    ),
    Guard(
        name="probation in the database",
        file="coordinator/scheduling/probation.py",
        before="        self._records.note(row)\n",
        after="",
        tests=("tests/integration/cycles/test_probation.py", "-k", "crash"),
    ),
    Guard(
        name="deadline of a batch",
        file="coordinator/cycle/dispatch.py",
        before="reply = await within(allowed_s, self._pool.run(worker.info.worker_id, batch))",
        after="reply = await self._pool.run(worker.info.worker_id, batch)",
        tests=("tests/integration/cycles/test_poison.py", "-k", "hangs"),
    ),
    Guard(
        name="snapshot waits for files of weights published before it",
        file="coordinator/checkpoints/states.py",
        before="        await self.publishing.until_written(log.adapter_id, state.applied_seq)\n",
        after="",
        tests=("tests/integration/checkpoints/test_publishing.py", "-k", "cuts_the_log"),
    ),
    Guard(
        name="log is kept while published weights have no file",
        file="coordinator/storage/schema.py",
        before="BEFORE INSERT ON snapshots\n",
        after="BEFORE INSERT ON plans\n",
        tests=("tests/unit/storage/test_store.py", "-k", "without_a_file"),
    ),
    Guard(
        name="load waits for files of weights published before it",
        file="coordinator/scheduling/ready_set.py",
        before="if not is_unsettled and not self._publishing.is_unwritten(log.adapter_id):",
        after="if not is_unsettled:",
        tests=("tests/integration/checkpoints/test_publishing.py", "-k", "load"),
    ),
    Guard(
        name="file matches its checkpoint by seq, not only by path",
        file="coordinator/storage/checkpoints.py",
        before="WHERE path = ? AND seq = ? AND folder = ''",
        after="WHERE path = ? AND ? AND folder = ''",
        tests=("tests/unit/storage/test_store.py", "-k", "without_a_file"),
    ),
    Guard(
        name="weights are released when their checkpoint is deleted",
        file="coordinator/checkpoints/states.py",
        before="        self.publishing.deleted(version_of(row))\n",
        after="",
        tests=("tests/integration/checkpoints/test_publishing_named.py", "-k", "deleted_before"),
    ),
    Guard(
        name="weights without a file are rematerialized after a crash",
        file="coordinator/operations/copy.py",
        before="(operation.kind.changes_state or operation.must_rematerialize)",
        after="operation.kind.changes_state",
        tests=("tests/simulation/test_simulation.py", "-k", "no_history"),
    ),
    Guard(
        name="snapshot is committed or failed before a load",
        file="coordinator/scheduling/ready_set.py",
        before="        is_unsettled = self._snapshots.is_unsettled(log.adapter_id)\n",
        after="        is_unsettled = False\n",
        tests=("tests/simulation/test_simulation.py", "-k", "no_history"),
    ),
    Guard(
        name="least role of a call",
        file="coordinator/tenants/keys.py",
        before="        if not role.covers(least):\n",
        after="        if False:\n",
        tests=("tests/unit/doors/test_roles.py",),
    ),
    Guard(
        name="the keys of a tenant that is gone stay refused",
        file="coordinator/tenants/accounts.py",
        before='        if row is None:\n            raise not_found("tenant", before.name)  # it stays held',
        after="        if row is None:\n            self._held.pop(before.tenant_id, None)\n"
        '            raise not_found("tenant", before.name)  # it stays held',
        tests=("tests/integration/cycles/test_tenant_deletion.py", "-k", "stay_refused"),
    ),
    Guard(
        name="expiry of a key",
        file="coordinator/tenants/keys.py",
        before="        if row.expires_at is not None and row.expires_at <= self._wall():\n",
        after="        if False:\n",
        tests=("tests/unit/tenants/test_keys.py",),
    ),
    Guard(
        name="an administrator remains",
        file="coordinator/storage/access/admins.py",
        before="    if had_admin and not _has_admin(db):\n",
        after="    if False:\n",
        tests=("tests/unit/tenants/test_keys.py", "-k", "administrator"),
    ),
    Guard(
        name="queued work of a suspended tenant waits",
        file="coordinator/scheduling/ready_set.py",
        before="return not self._is_stopping and not self._is_held(log.tenant_id)",
        after="return not self._is_stopping",
        tests=("tests/integration/cycles/test_suspension.py",),
    ),
    Guard(
        name="what has begun ends, and nothing behind it begins",
        file="coordinator/operations/copy.py",
        before="        if not self.may_begin:\n",
        after="        if False:\n",
        tests=("tests/unit/scheduling/test_ready_set.py", "-k", "behind"),
    ),
    Guard(
        name="replays of a suspended tenant wait",
        file="coordinator/scheduling/worker_memory.py",
        before="return not may_run and log.ahead",
        after="return False and log.ahead",
        tests=("tests/integration/cycles/test_suspension.py", "-k", "rebuilt"),
    ),
    Guard(
        name="values of an import are finite",
        file="coordinator/payloads/peft_weights.py",
        before="    if not np.isfinite(values).all():\n",
        after="    if False:\n",
        tests=("tests/integration/checkpoints/test_imports.py", "-k", "finite"),
    ),
    Guard(
        name="uploads of an earlier epoch are deleted",
        file="coordinator/storage/folders.py",
        before="            if name.startswith((_TEMPORARY, REMOVING)):\n",
        after="            if name.startswith(REMOVING):\n",
        tests=("tests/integration/checkpoints/test_imports.py", "-k", "crash"),
    ),
    Guard(
        name="usage of a tenant that is gone",
        file="coordinator/storage/usage.py",
        before='        f" SELECT ?, ?, 1, ?, ? WHERE {IS_TENANT} {_ADD}",\n',
        after='        f" SELECT ?, ?, 1, ?, ? WHERE ? != 0 {_ADD}",\n',
        tests=("tests/integration/cycles/test_tenant_deletion.py", "-k", "usage"),
    ),
    Guard(
        name="what silenced a worker is suspected although its host leaves",
        file="coordinator/runtime/supervision.py",
        before="LossKind.SILENT if worker.is_late else LossKind.LEFT",
        after="LossKind.LEFT",
        tests=("tests/integration/cycles/test_drains.py", "-k", "what_silenced"),
    ),
    Guard(
        name="adapters stay in the class of their worker",
        file="coordinator/scheduling/worker_memory.py",
        before="        return self._classes.others(log).union(full)\n",
        after="        return frozenset(full)\n",
        tests=("tests/integration/cycles/test_classes.py", "-k", "another_worker_of_its_class"),
    ),
    Guard(
        name="a cancelled sample ends with its worker",
        file="coordinator/sampling/scheduler.py",
        before="        if sample.is_cancelled:\n            self._end(",
        after="        if False:\n            self._end(",
        tests=("tests/integration/sampling/test_sampling_service.py", "-k", "loss_of_its_worker", "--timeout", "40"),
    ),
    Guard(
        name="an adopted worker drops what its last coordinator left",
        file="workers/pool/loop.py",
        before="        engine.begin(epoch, incarnation)\n",
        after="",
        tests=("tests/unit/pool/test_loop.py", "-k", "next_coordinator"),
    ),
    Guard(
        name="an adopted worker sends the events of old samples to nobody",
        file="workers/pool/loop.py",
        before="        self._events = events\n        self._owed_s = 0.0\n",
        after="        self._owed_s = 0.0\n",
        tests=("tests/unit/pool/test_loop.py", "-k", "next_coordinator", "--timeout", "60"),
    ),
    Guard(
        name="only workers of equal settings and code are adopted",
        file="workers/pool/actor.py",
        before="        if (terms, version) != (self._terms, self._version):\n            return False\n",
        after="",
        tests=("tests/integration/pool/test_ray_cluster.py", "-k", "equal_settings"),
    ),
    Guard(
        name="a worker without a coordinator ends",
        file="workers/pool/actor.py",
        before="        os._exit(1)",
        after="",
        tests=("tests/integration/pool/test_ray_cluster.py", "-k", "lease"),
    ),
    Guard(
        name="workers end with a stop that is final",
        file="workers/pool/ray_pool.py",
        before="        is_kept = self._config.keep_workers and not is_final\n",
        after="        is_kept = self._config.keep_workers\n",
        tests=("tests/integration/pool/test_ray_cluster.py", "-k", "stop_keeps"),
    ),
    Guard(
        name="a large state is a copy that later work does not change",
        file="workers/training/copies.py",
        before="        if not is_large(entry.layout):\n",
        after="        if True:\n",
        tests=("tests/numerics/bank/test_large_states.py",),
    ),
    Guard(
        name="a row whose copy is under way is not written",
        file="workers/bank/bank.py",
        before="        row.begin_transfer(transfer)\n        held =",
        after="        held =",
        tests=("tests/numerics/bank/test_large_states.py", "-k", "True-4"),
    ),
    Guard(
        name="a batch waits until its large states are read",
        file="workers/pool/loop.py",
        before="            entry = self._batches.popleft() if _is_ready(self._batches) else None\n",
        after="            entry = self._batches.popleft() if self._batches else None\n",
        tests=("tests/unit/pool/test_loop.py", "-k", "large_state_is_read"),
    ),
    Guard(
        name="a cancellation does not overtake the sample whose large state is read",
        file="workers/pool/loop.py",
        before="            while _is_ready(self._controls):\n",
        after="            self._controls = deque(sorted(self._controls, key=lambda each: each[0] is not None))\n"
        "            while _is_ready(self._controls):\n",
        tests=("tests/unit/pool/test_loop.py", "-k", "cancelled_by_a_call"),
    ),
    Guard(
        name="items are charged what cycles have shown",
        file="coordinator/scheduling/adapter_costs.py",
        before="            self._factor_used = self._factor.value\n",
        after="",
        tests=("tests/unit/scheduling/test_adapter_costs.py",),
    ),
    Guard(
        name="threads get one layout of a kind of rows",
        file="workers/bank/bank.py",
        before="        with self._laying_out:",
        after="        if True:",
        tests=("tests/unit/bank/test_arriving.py", "-k", "layout_at_once"),
    ),
    Guard(
        name="threads get different pinned buffers",
        file="workers/bank/pinned.py",
        before="        with self._taking:",
        after="        if True:",
        tests=("tests/unit/bank/test_pinned.py", "-k", "threads"),
    ),
    Guard(
        name="a large state is read when its copy is made",
        file="workers/bank/state_files.py",
        before="                self._filling.wait_on_host()\n",
        after="                pass\n",
        tests=("tests/unit/bank/test_state_files.py", "-k", "copy_of_its_vectors"),
    ),
)


def without(guard: Guard, source: str) -> str:
    """Return the file's text without the guard. Raises ValueError unless the guard occurs exactly once."""
    if source.count(guard.before) != 1:
        raise ValueError(f"{guard.name}: {guard.file} has {source.count(guard.before)} of {guard.before!r}, not 1")
    return source.replace(guard.before, guard.after)


def passes(copy: Path, tests: Sequence[str]) -> bool:
    """Return whether these tests pass on the copy."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    environment = os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, check=False, timeout=TIMEOUT_S)
    if done.returncode not in (0, 1):
        raise RuntimeError(f"pytest did not run:\n{done.stdout.decode()[-2000:]}{done.stderr.decode()[-2000:]}")
    return done.returncode == 0


def main() -> int:
    """Read the command line, remove the guards one by one. Return 1 if a guard is not tested."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="only guards with one of these words in their name; default: all")
    words = parser.parse_args().words
    guards = [guard for guard in GUARDS if not words or any(word in guard.name for word in words)]
    untested = []
    with tempfile.TemporaryDirectory(prefix="guards-") as folder:
        copy = Path(folder)
        for name in COPIED:
            source = ROOT / name
            (shutil.copytree if source.is_dir() else shutil.copy)(source, copy / name)
        passing: set[tuple[str, ...]] = set()
        for guard in guards:
            if guard.tests not in passing and not passes(copy, guard.tests):
                print(f"{guard.name}: its tests fail with the guard in place: {' '.join(guard.tests)}")
                return 1
            passing.add(guard.tests)
            file = copy / guard.file
            text = file.read_text()
            file.write_text(without(guard, text))
            is_tested = not passes(copy, guard.tests)
            file.write_text(text)
            print(f"{'tested' if is_tested else 'NOT TESTED':<12} {guard.name:<60} {guard.tests[0]}", flush=True)
            if not is_tested:
                untested.append(guard.name)
    print(f"{len(guards) - len(untested)} of {len(guards)} guards are tested")
    return 1 if untested else 0


if __name__ == "__main__":
    sys.exit(main())
