// The pool: what is wrong, in words; workers, queue, usage, limits; for administrators tenants, keys and the audit log.

import { all, rpc } from "./api.js";
import { queue } from "./clock.js";
import { confirmed, figures, fill, h, notify, table } from "./dom.js";
import { ago, bytes, count, duration, plain, rate, when } from "./format.js";

const USAGE_DAYS = 7;
const AUDIT_ROWS = 50;
const STATES = { READY: "good", LATE: "warn", DRAINING: "warn", DRAINED: "faint", LOST: "bad" };

export async function pool(view, me) {
  const section = (name) => h("section", { class: "card", "aria-label": name });
  const problems = h("div", {}),
    head = h("div", {}),
    workers = section("Workers"),
    waiting = section("Queue");
  const usage = section("Usage"),
    limits = section("Limits");
  const tenants = section("Tenants"),
    keys = section("Keys"),
    keyRows = h("div", {}),
    audit = section("Audit log");
  keys.append(h("h2", {}, "Keys"), keyRows, ...keyForm(() => showKeys(keyRows)));
  view.element.append(
    h("h1", {}, "Pool"),
    problems,
    head,
    workers,
    waiting,
    usage,
    limits,
    ...(me.isAdmin ? [tenants, keys, audit] : []),
  );
  const now = async () => {
    const status = await rpc("PoolService/GetPoolStatus", { numCycles: 1 });
    fill(
      problems,
      status.problems.length ? status.problems.map(problem) : h("p", { class: "good" }, "Nothing is wrong."),
    );
    fill(
      head,
      figures([
        ["version", status.version],
        ["up", duration(status.uptimeSeconds)],
        ["start on its data", status.epoch],
        ["workers", count(status.workers.length)],
        ["tenants with work", count(status.numTenants)],
      ]),
    );
    fill(workers, h("h2", {}, "Workers"), workerTable(status.workers, me, now));
    fill(waiting, queue(status));
  };
  const slow = async () => {
    await Promise.all([
      showUsage(usage),
      showLimits(limits, me),
      ...(me.isAdmin ? [showTenants(tenants), showKeys(keyRows), showAudit(audit)] : []),
    ]);
  };
  await view.every(2, now);
  await view.every(30, slow);
}

function problem(each) {
  return h(
    "div",
    { class: each.isSevere ? "problem severe" : "problem", role: each.isSevere ? "alert" : null },
    h("p", {}, each.text),
    each.command ? h("p", {}, h("code", {}, each.command)) : null,
  );
}

function workerTable(rows, me, changed) {
  return table(
    [
      { name: "worker", cell: (row) => row.workerId },
      {
        name: "state",
        cell: (row) => {
          const state = plain(row.state, "WORKER_STATE_");
          return h("span", { class: STATES[state.toUpperCase()] }, state);
        },
      },
      { name: "base model", cell: (row) => row.baseModel },
      { name: "host", cell: (row) => [row.node, row.device ? ` ${row.device}` : ""] },
      {
        name: me.isAdmin ? "adapters" : "your adapters",
        isNumber: true,
        cell: (row) => `${count(row.numAdapters)} / ${count(row.numSlots)} slots`,
      },
      { name: "trained", isNumber: true, cell: (row) => rate(row.trainedTokensPerSecond) },
      { name: "sampled", isNumber: true, cell: (row) => rate(row.sampledTokensPerSecond) },
      { name: "memory", isNumber: true, cell: (row) => (Number(row.residentBytes) ? bytes(row.residentBytes) : "") },
      { name: "losses", cell: (row) => (row.numLosses ? `${row.numLosses}, last ${ago(row.lastLossTime)}` : "") },
      { name: "life", cell: (row) => h("span", { class: "mono faint" }, row.incarnation ?? "") },
      { name: "", cell: (row) => (me.isAdmin ? drainButton(row, changed) : "") },
    ],
    rows,
    "There is no worker.",
  );
}

function drainButton(row, changed) {
  const isDrained = /DRAIN/.test(row.state);
  const method = isDrained ? "PoolService/UndrainWorker" : "PoolService/DrainWorker";
  return h(
    "button",
    {
      onclick: async () => {
        const isSure =
          isDrained || (await confirmed(`Drain ${row.workerId}? Its adapters go on on other workers.`, "Drain"));
        if (isSure) await did(rpc(method, { workerId: row.workerId }), changed);
      },
    },
    isDrained ? "Undrain" : "Drain",
  );
}

async function showUsage(element) {
  const since = new Date(Date.now() - (USAGE_DAYS - 1) * 86400e3).toISOString().slice(0, 10);
  const { rows } = await rpc("PoolService/GetUsage", { since, groupBy: ["USAGE_GROUP_TENANT", "USAGE_GROUP_DAY"] });
  fill(
    element,
    h("h2", {}, `Usage of ${USAGE_DAYS} days`),
    table(
      [
        { name: "tenant", cell: (row) => row.tenant },
        { name: "day", cell: (row) => row.day || "before days were counted" },
        { name: "operations", isNumber: true, cell: (row) => count(row.numOperations) },
        { name: "tokens", isNumber: true, cell: (row) => count(row.numTokens) },
        { name: "engine time", isNumber: true, cell: (row) => duration(row.engineSeconds) },
      ],
      rows,
      "Nothing has been counted yet.",
    ),
  );
}

async function showLimits(element, me) {
  const { limits, tenant } = await rpc("LimitService/GetTenantLimits");
  const bar = (row) => {
    const most = Number(row.value);
    if (row.usage === undefined || !(most > 0)) return "";
    const part = Number(row.usage) / most;
    return h("span", { class: part >= 0.9 ? "bad" : null }, `${(100 * part).toFixed(part < 0.1 ? 1 : 0)} %`);
  };
  fill(
    element,
    h("h2", {}, `Limits of ${tenant}`),
    table(
      [
        { name: "limit", cell: (row) => row.name },
        { name: "in use", isNumber: true, cell: (row) => (row.usage === undefined ? "" : count(row.usage)) },
        { name: "at most", isNumber: true, cell: (row) => (/^\d+$/.test(row.value) ? count(row.value) : row.value) },
        { name: "", isNumber: true, cell: bar },
        { name: "set by", cell: (row) => (row.isSet ? "an administrator" : "default") },
      ],
      limits,
      "There are no limits.",
    ),
    me.isAdmin
      ? h("p", { class: "faint small" }, "Change one: ", h("code", {}, `tinkerpool tenant limit ${tenant} --help`))
      : null,
  );
}

async function showTenants(element) {
  const tenants = await all("AdminService/ListTenants", "tenants", { pageSize: 100 }, 500);
  const refresh = () => showTenants(element);
  fill(
    element,
    h("h2", {}, "Tenants"),
    table(
      [
        { name: "tenant", cell: (row) => row.name },
        {
          name: "state",
          cell: (row) => [plain(row.state, "TENANT_STATE_"), row.suspensionReason ? `: ${row.suspensionReason}` : ""],
        },
        { name: "since", cell: (row) => when(row.createTime) },
        { name: "", cell: (row) => tenantButton(row, refresh) },
      ],
      tenants,
      "There is no tenant.",
    ),
  );
}

function tenantButton(row, changed) {
  if (row.state === "TENANT_STATE_DELETING") return "";
  if (row.state === "TENANT_STATE_SUSPENDED") {
    return h(
      "button",
      { onclick: () => did(rpc("AdminService/ResumeTenant", { tenant: row.name }), changed) },
      "Resume",
    );
  }
  return h(
    "button",
    {
      class: "danger",
      onclick: async () => {
        const isSure = await confirmed(
          `Suspend ${row.name}? Its calls are refused and its work waits; nothing is lost.`,
          "Suspend",
        );
        if (isSure)
          await did(rpc("AdminService/SuspendTenant", { tenant: row.name, reason: "suspended on the page" }), changed);
      },
    },
    "Suspend",
  );
}

/** Return a form that creates a key, and the place of the new key, which no refresh clears. */
function keyForm(refresh) {
  const made = h("div", { class: "made", "aria-live": "polite" });
  const tenant = h("input", { required: true, placeholder: "tenant", "aria-label": "Tenant" });
  const role = h(
    "select",
    { "aria-label": "Role" },
    ["member", "read only", "admin"].map((each) =>
      h("option", { value: `ROLE_${each.replace(" ", "_").toUpperCase()}` }, each),
    ),
  );
  const create = async (event) => {
    event.preventDefault();
    const form = event.currentTarget;
    try {
      const { key } = await rpc("AdminService/CreateApiKey", { tenant: tenant.value, role: role.value });
      fill(made, h("p", {}, "The new key is shown only now: ", h("code", {}, key)));
      form.reset();
      await refresh();
    } catch (error) {
      notify(error.message);
    }
  };
  return [h("form", { class: "row", onsubmit: create }, tenant, role, h("button", {}, "Create a key")), made];
}

async function showKeys(element) {
  const keys = await all("AdminService/ListApiKeys", "apiKeys", { pageSize: 100 }, 500);
  const refresh = () => showKeys(element);
  fill(
    element,
    table(
      [
        { name: "key", cell: (row) => h("span", { class: "mono" }, row.keyId) },
        { name: "tenant", cell: (row) => row.tenant },
        { name: "role", cell: (row) => [plain(row.role, "ROLE_"), row.isLocal ? " on the pool's machine" : ""] },
        { name: "last used", cell: (row) => ago(row.lastUseTime) },
        {
          name: "expires",
          cell: (row) => (row.isExpired ? h("span", { class: "bad" }, "expired") : when(row.expireTime)),
        },
        {
          name: "",
          cell: (row) =>
            h(
              "button",
              {
                class: "danger",
                onclick: async () => {
                  const successor = row.successor ? ` Its successor ${row.successor} is not revoked with it.` : "";
                  const question = `Revoke key ${row.keyId} of ${row.tenant}? Its calls end at once.${successor}`;
                  if (await confirmed(question, "Revoke")) {
                    await did(rpc("AdminService/RevokeApiKey", { keyId: row.keyId }), refresh);
                  }
                },
              },
              "Revoke",
            ),
        },
      ],
      keys.filter((each) => !each.isRevoked),
      "There is no key.",
    ),
  );
}

async function showAudit(element) {
  const { entries } = await rpc("AdminService/ListAuditEntries", { pageSize: AUDIT_ROWS });
  fill(
    element,
    h("h2", {}, "Audit log"),
    table(
      [
        { name: "when", cell: (row) => when(row.time) },
        { name: "by", cell: (row) => (row.tenant ? `${row.tenant} (${row.keyId})` : "the pool's operator") },
        { name: "act", cell: (row) => row.act },
        { name: "of", cell: (row) => row.subject },
        {
          name: "details",
          cell: (row) =>
            Object.entries(row.details)
              .map(([name, value]) => `${name} ${value}`)
              .join(", "),
        },
      ],
      entries,
      "Nothing is in the log.",
    ),
  );
}

/** Wait for a change, then show the new state; say why if it is refused. */
async function did(change, changed) {
  try {
    await change;
    await changed();
  } catch (error) {
    notify(error.message);
  }
}
