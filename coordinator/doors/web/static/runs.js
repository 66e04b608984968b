// Runs: the adapters of the tenant, and of one its curves, checkpoints and last operations.

import { all, get, rpc } from "./api.js";
import { chart } from "./chart.js";
import { confirmed, figures, fill, h, notify, table } from "./dom.js";
import { ago, count, duration, figure, plain, reason, when } from "./format.js";
import { checkpointTable } from "./checkpoints.js";

const ENTRIES_MAX = 20000;
const RECENT = 30;
const HIDDEN = new Set(["clock_cycle:unique", "tokens:sum", "num_datums:sum"]);

/** The list. */
export async function runs(view, me) {
  const found = h("section", { class: "card" });
  const search = h("input", { type: "search", placeholder: "name begins with ...", "aria-label": "Name begins with" });
  view.element.append(h("div", { class: "row spread" }, h("h1", {}, "Runs"), search), found);
  const refresh = async () => {
    const [{ adapters, totalSize }, status] = await Promise.all([
      rpc("AdapterService/ListAdapters", { pageSize: 100, namePrefix: search.value }),
      rpc("PoolService/GetPoolStatus", { numCycles: 1 }),
    ]);
    const running = new Map(status.runningAdapters.map((each) => [each.adapterId, each]));
    fill(
      found,
      table(
        [
          { name: "run", cell: (row) => h("a", { href: `#/runs/${encodeURIComponent(row.adapterId)}` }, title(row)) },
          {
            name: "state",
            cell: (row) => {
              const now = running.get(row.adapterId);
              return now
                ? h(
                    "span",
                    { class: "good" },
                    plain(now.kind, "OPERATION_KIND_"),
                    now.workerId ? ` on ${now.workerId}` : "",
                  )
                : "idle";
            },
          },
          { name: "base model", cell: (row) => row.baseModel },
          { name: "rank", isNumber: true, cell: (row) => row.rank },
          { name: "operations", isNumber: true, cell: (row) => count(row.appliedSeq) },
          { name: "labels", cell: (row) => labels(row.userMetadata) },
          { name: "last used", cell: (row) => ago(row.lastUseTime ?? row.createTime) },
        ],
        adapters,
        search.value ? "No run has a name that begins so." : emptyRuns(),
      ),
      totalSize > adapters.length
        ? h("p", { class: "faint" }, `${adapters.length} of ${count(totalSize)} are shown, the newest first.`)
        : null,
    );
  };
  search.addEventListener("input", refresh);
  await view.every(3, refresh);
}

function emptyRuns() {
  return [
    "You have no adapters yet. Train one: ",
    h("code", {}, "tinkerpool.ServiceClient().create_lora_training_client(rank=8)"),
  ];
}

/** One run. */
export async function run(view, me, id) {
  const { adapter } = await rpc("AdapterService/GetAdapter", { adapterId: id });
  const heading = h("h1", {}, title(adapter));
  const facts = h("div", {}),
    curves = h("div", { class: "grid" }),
    timeline = h("section", { class: "card" });
  const saved = h("section", { class: "card" });
  view.element.append(
    h("p", {}, h("a", { href: "#/runs" }, "All runs")),
    h(
      "div",
      { class: "row spread" },
      heading,
      h(
        "div",
        { class: "row" },
        h("button", { onclick: () => timelineFile(adapter) }, "Timeline"),
        me.mayChange ? actions(adapter, heading) : null,
      ),
    ),
    h(
      "p",
      { class: "faint small" },
      h("code", {}, adapter.adapterId),
      ` of ${adapter.baseModel}, rank ${adapter.rank}, `,
      `created ${when(adapter.createTime)} `,
      labels(adapter.userMetadata),
    ),
    facts,
    curves,
    timeline,
    saved,
  );
  const history = new History(id);
  await view.every(2, async () => {
    await history.read();
    if (view.isLeft) return;
    fill(facts, history.figures());
    curves.replaceChildren(...history.charts());
    fill(timeline, h("h2", {}, "Last operations"), operations(history.entries.slice(-RECENT).reverse()));
  });
  await view.every(10, async () => {
    const checkpoints = await all(
      "CheckpointService/ListCheckpoints",
      "checkpoints",
      { adapterId: id, pageSize: 100 },
      100,
    );
    fill(
      saved,
      h("h2", {}, "Checkpoints"),
      checkpointTable(checkpoints, me, () => {}),
    );
  });
}

function actions(adapter, heading) {
  const rename = async () => {
    const name = prompt("Name of this run", adapter.name ?? "");
    if (name === null) return;
    const renamed = await rpc("AdapterService/RenameAdapter", { adapterId: adapter.adapterId, name }).catch((error) =>
      notify(error.message),
    );
    if (renamed) {
      adapter.name = name;
      fill(heading, title(adapter));
    }
  };
  const remove = async () => {
    if (
      !(await confirmed(
        `Delete ${title(adapter)}? Its checkpoints stay; the adapter cannot be trained further.`,
        "Delete",
      ))
    )
      return;
    try {
      await rpc("AdapterService/DeleteAdapter", { adapterId: adapter.adapterId });
      location.hash = "#/runs";
    } catch (error) {
      notify(error.message);
    }
  };
  return [h("button", { onclick: rename }, "Rename"), h("button", { class: "danger", onclick: remove }, "Delete")];
}

/** Download the timeline of the run's session, for Perfetto. */
async function timelineFile(adapter) {
  try {
    const { url } = await get(`/api/v1/sessions/${encodeURIComponent(adapter.sessionId)}/trace_export`);
    h("a", { href: url, download: "session.pftrace" }).click();
    notify("Open the file at ui.perfetto.dev: it is read in your browser alone.");
  } catch (error) {
    notify(error.message);
  }
}

/** The history of one adapter, read once and then continued. */
class History {
  constructor(id) {
    this.id = id;
    this.entries = [];
    this.pageToken = "";
    this.series = new Map();
    this.step = 1;
    this.sums = {};
    this.steps = [];
  }

  async read() {
    let page;
    do {
      page = await rpc("HistoryService/ListHistory", { targetId: this.id, pageToken: this.pageToken });
      page.entries.forEach((each) => this.take(each));
      this.pageToken = page.nextPageToken;
    } while (page.hasMore && this.entries.length < ENTRIES_MAX);
  }

  take(entry) {
    this.entries.push(entry);
    const isStep = entry.kind === "OPERATION_KIND_OPTIM_STEP";
    for (const [name, value] of Object.entries(entry.metrics)) {
      if (entry.operation && name.endsWith(":sum")) this.sums[name] = (this.sums[name] ?? 0) + value;
      else if (!HIDDEN.has(name))
        this.point(name.replace(/:last$/, ""), entry.operation ? this.step : Number(entry.step), value);
    }
    if (!isStep || entry.state !== "OPERATION_STATE_SUCCEEDED") return;
    const tokens = this.sums["tokens:sum"];
    for (const [name, value] of Object.entries(this.sums)) {
      if (HIDDEN.has(name)) continue;
      this.point(tokens ? name.replace(":sum", " per token") : name, this.step, tokens ? value / tokens : value);
    }
    this.sums = {};
    this.steps.push(Date.parse(entry.endTime) / 1000);
    this.step += 1;
  }

  point(name, step, value) {
    if (!this.series.has(name)) this.series.set(name, []);
    this.series.get(name).push([step, Number(value)]);
  }

  figures() {
    const recent = this.steps.slice(-50);
    const pace = recent.length > 1 ? (recent.length - 1) / (recent.at(-1) - recent[0]) : 0;
    const loss = this.series.get("loss per token")?.at(-1);
    const tokens = this.entries.reduce((sum, each) => sum + Number(each.numTokens), 0);
    const failed = this.entries.filter((each) => each.errorReason).length;
    return figures([
      ["steps", count(this.steps.length)],
      ["steps a second", pace ? figure(Number(pace.toPrecision(3))) : "-"],
      ["loss per token", loss ? figure(loss[1]) : "-"],
      ["tokens", count(tokens)],
      ...(failed ? [["failed operations", h("span", { class: "bad" }, count(failed))]] : []),
    ]);
  }

  charts() {
    const first = (name) => (name.startsWith("loss") ? 0 : 1);
    const names = [...this.series.keys()].sort((a, b) => first(a) - first(b) || a.localeCompare(b));
    if (!names.length) return [h("p", { class: "faint" }, "No step has ended yet: curves appear with the first.")];
    return names.map((name) => chart(name, this.series.get(name)));
  }
}

function operations(entries) {
  return table(
    [
      {
        name: "operation",
        cell: (row) =>
          row.operation
            ? `${plain(row.kind, "OPERATION_KIND_")} ${row.operation.split(":").at(-1)}`
            : `metrics of step ${row.step}`,
      },
      { name: "ended", cell: (row) => ago(row.endTime ?? row.arriveTime) },
      {
        name: "waited",
        cell: (row) =>
          row.waits
            .filter((each) => each.seconds >= 0.0005)
            .slice(0, 2)
            .map((each) => `${duration(each.seconds)} for ${reason(each.reason)}`)
            .join(", "),
      },
      {
        name: "ran",
        cell: (row) =>
          row.beginTime && row.endTime ? duration((Date.parse(row.endTime) - Date.parse(row.beginTime)) / 1000) : "",
      },
      { name: "worker", cell: (row) => row.workerId },
      { name: "cycle", isNumber: true, cell: (row) => (Number(row.cycleId) ? row.cycleId : "") },
      { name: "tokens", isNumber: true, cell: (row) => (Number(row.numTokens) ? count(row.numTokens) : "") },
      { name: "outcome", cell: (row) => (row.errorReason ? h("span", { class: "bad" }, row.errorReason) : "") },
    ],
    entries,
    "Nothing has ended yet.",
  );
}

const title = (adapter) => adapter.name || adapter.adapterId;

function labels(metadata) {
  return Object.entries(metadata ?? {})
    .slice(0, 4)
    .map(([name, value]) => [h("code", {}, `${name}=${value}`), " "]);
}
