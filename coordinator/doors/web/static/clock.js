// The clock: cycles as they commit, a lane for each worker, a colour for each tenant; below it who waits for what.

import { rpc, watchCycles } from "./api.js";
import { colourOf } from "./colours.js";
import { figures, fill, h, s, table } from "./dom.js";
import { count, duration, figure, rate, reason, when } from "./format.js";

const LANE = 44,
  GAP = 12,
  LEFT = 62,
  AXIS = 22;
const SPANS = [30, 10, 3];
const SHOWN_MAX = 240;
const KEPT = 2000;
const OTHER_LANE = "others";

export async function clock(view, me) {
  const face = new Face(view, me);
  const now = h("section", { class: "card", "aria-label": "Queue" });
  view.element.append(h("h1", {}, "Clock"), face.element, now);
  const status = await rpc("PoolService/GetPoolStatus", { numCycles: 300 });
  face.setWorkers(status.workers);
  status.cycles.forEach((each) => face.add(each));
  view.onLeave(watchCycles((cycle) => face.add(cycle, true)));
  const redraw = setInterval(() => {
    if (!document.hidden) face.draw();
  }, 200);
  view.onLeave(() => clearInterval(redraw));
  await view.every(2, async () => {
    const present = await rpc("PoolService/GetPoolStatus", { numCycles: 1 });
    face.setWorkers(present.workers);
    fill(now, queue(present));
  });
}

/** Return the queue of a status: totals, and each tenant with what its operations wait for. */
export function queue(status) {
  const sum = (name) => status.tenants.reduce((total, each) => total + Number(each[name]), 0);
  return [
    h("h2", {}, "Queue"),
    figures([
      ["queued", count(status.numQueued)],
      ["running", count(status.numRunning)],
      ["samples", count(status.numSamples)],
      ["trained", `${figure(sum("trainedTokensPerSecond"))} tokens/s`],
      ["sampled", `${figure(sum("sampledTokensPerSecond"))} tokens/s`],
    ]),
    table(
      [
        { name: "tenant", cell: (row) => [dot(row.tenant), row.tenant || "others"] },
        { name: "queued", isNumber: true, cell: (row) => count(row.numQueued) },
        { name: "running", isNumber: true, cell: (row) => count(row.numRunning) },
        { name: "oldest", isNumber: true, cell: (row) => (row.oldestSeconds ? duration(row.oldestSeconds) : "") },
        { name: "trained", isNumber: true, cell: (row) => rate(row.trainedTokensPerSecond) },
        { name: "sampled", isNumber: true, cell: (row) => rate(row.sampledTokensPerSecond) },
        {
          name: "waits for",
          cell: (row) => row.waiting.map((each) => `${reason(each.reason)} (${count(each.numOperations)})`).join(", "),
        },
      ],
      status.tenants,
      "Nobody has work in the queue.",
    ),
  ];
}

function dot(tenant) {
  const element = h("span", { class: "dot", "aria-hidden": "true" });
  element.style.background = colourOf(tenant);
  return element;
}

/** The picture of the last seconds. */
class Face {
  constructor(view, me) {
    this.cycles = [];
    this.workers = [];
    this.chosen = null;
    this.skew = null;
    this.svg = s("svg", {
      class: "clock",
      tabindex: 0,
      role: "img",
      "aria-label": "Cycles of the last seconds, a lane for each worker. Left and right arrows choose one.",
      onpointermove: (event) => this.point(event),
      onpointerleave: () => this.choose(null),
      onkeydown: (event) => this.key(event),
      onblur: () => this.choose(null),
    });
    this.detail = h("div", { class: "detail small", "aria-live": "polite" });
    this.legend = h("p", { class: "legend" });
    this.element = h("section", { class: "card", "aria-label": "Cycles" }, this.svg, this.legend, this.detail);
    const resized = new ResizeObserver(() => this.draw());
    resized.observe(this.element);
    view.onLeave(() => resized.disconnect());
  }

  setWorkers(workers) {
    this.workers = workers.map((each) => each.workerId).sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
  }

  add(cycle, isLive) {
    const start = Date.parse(cycle.startTime) / 1000;
    const end = start + cycle.passSeconds + cycle.stepSeconds + cycle.commitSeconds;
    if (this.cycles.some((each) => each.id === Number(cycle.cycleId))) return; // from the status, and the stream
    if (isLive) {
      const skew = end - Date.now() / 1000; // the pool's clock is not this one's
      this.skew = Math.max(skew, (this.skew ?? skew) - 0.001);
    }
    this.cycles.push({ id: Number(cycle.cycleId), start, end, cycle });
    if (this.cycles.length > KEPT) this.cycles.splice(0, this.cycles.length - KEPT);
  }

  draw() {
    const width = Math.max(280, this.element.clientWidth - 36);
    const lanes = [...this.workers];
    const now = Date.now() / 1000 + (this.skew ?? 0);
    const span =
      SPANS.find((each) => this.cycles.filter((c) => c.end > now - each).length <= SHOWN_MAX) ?? SPANS.at(-1);
    const shown = this.cycles.filter((each) => each.end > now - span);
    if (shown.some((each) => each.cycle.entries.some((entry) => !entry.workerId))) lanes.push(OTHER_LANE);
    const height = lanes.length * (LANE + GAP) + AXIS;
    const x = (time) => LEFT + (width - LEFT) * (1 - (now - time) / span);
    this.x = x;
    this.shown = shown;
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.svg.setAttribute("height", height);
    const parts = lanes.flatMap((lane, row) => [
      s("rect", { class: "lane", x: LEFT, y: row * (LANE + GAP), width: width - LEFT, height: LANE, rx: 4 }),
      s("text", { x: 0, y: row * (LANE + GAP) + LANE / 2 + 4 }, lane),
    ]);
    for (let back = 0; back <= span; back += span / 5) {
      parts.push(
        s(
          "text",
          { x: x(now - back), y: height - 5, "text-anchor": back ? "middle" : "end" },
          back ? `-${Number(back.toFixed(1))} s` : "now",
        ),
      );
    }
    for (const each of shown) parts.push(...this.bars(each, lanes, x));
    this.svg.replaceChildren(...parts);
    const tenants = [...new Set(shown.flatMap((each) => each.cycle.entries.map((entry) => entry.tenant)))].sort();
    fill(
      this.legend,
      shown.length ? tenants.map((each) => h("span", {}, dot(each), each || "others")) : idle(this.cycles.at(-1)),
    );
    if (!this.chosen)
      fill(
        this.detail,
        shown.length
          ? h(
              "span",
              { class: "faint" },
              `${shown.length} cycles in ${span} s. Full height: the pass, by tokens; paler: the step; the line at the bottom: the commit.`,
            )
          : "",
      );
  }

  /** Return the bars of one cycle: the pass of each worker split by tenants, its step, its commit. */
  bars({ id, start, end, cycle }, lanes, x) {
    const parts = [];
    const passEnd = start + cycle.passSeconds,
      stepEnd = passEnd + cycle.stepSeconds;
    lanes.forEach((lane, row) => {
      const entries = cycle.entries.filter((each) => (each.workerId || OTHER_LANE) === lane);
      if (!entries.length) return;
      const top = row * (LANE + GAP);
      const total = entries.reduce((sum, each) => sum + Number(each.numTokens), 0) || entries.length;
      let y = top + 3;
      for (const entry of entries) {
        const size = (LANE - 8) * ((Number(entry.numTokens) || (total === entries.length ? 1 : 0)) / total);
        if (size > 0) parts.push(bar(x(start), x(passEnd), y, size, colourOf(entry.tenant), 1));
        y += size;
      }
      const steps = entries.filter((each) => each.isStep);
      steps.forEach((entry, index) =>
        parts.push(
          bar(
            x(passEnd),
            x(stepEnd),
            top + 3 + (index * (LANE - 8)) / steps.length,
            (LANE - 8) / steps.length,
            colourOf(entry.tenant),
            0.55,
          ),
        ),
      );
      parts.push(
        s("rect", {
          class: "commit",
          x: x(stepEnd),
          y: top + LANE - 4,
          width: Math.max(1, x(end) - x(stepEnd)),
          height: 2,
        }),
      );
    });
    if (this.chosen === id) {
      parts.push(
        s("rect", {
          class: "chosen",
          x: x(start) - 1.5,
          y: 0.5,
          rx: 3,
          width: Math.max(3, x(end) - x(start)) + 3,
          height: lanes.length * (LANE + GAP) - GAP,
        }),
      );
    }
    return parts;
  }

  point(event) {
    const box = this.svg.getBoundingClientRect();
    const at = (event.clientX - box.left) * (this.svg.viewBox.baseVal.width / box.width);
    const near = this.shown
      ?.map((each) => [Math.max(this.x(each.start) - at, at - this.x(each.end), 0), each])
      .reduce((best, each) => (each[0] < best[0] ? each : best), [12, null])[1];
    this.choose(near ?? null);
  }

  key(event) {
    if (event.key === "Escape") return this.choose(null);
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step || !this.shown?.length) return;
    event.preventDefault();
    const index = this.shown.findIndex((each) => each.id === this.chosen);
    const next = index < 0 ? this.shown.length - 1 : Math.min(this.shown.length - 1, Math.max(0, index + step));
    this.choose(this.shown[next]);
  }

  choose(each) {
    const id = each?.id ?? null;
    if (id === this.chosen) return;
    this.chosen = id;
    if (each) fill(this.detail, described(each.cycle));
    this.draw();
  }
}

function bar(from, to, y, height, colour, opacity) {
  return s("rect", {
    x: from,
    y,
    width: Math.max(1.5, to - from),
    height: Math.max(0.8, height),
    fill: colour,
    opacity,
  });
}

function described(cycle) {
  const own = cycle.entries.filter((each) => each.adapterId);
  const others = cycle.entries.filter((each) => !each.adapterId);
  return [
    h(
      "p",
      {},
      h("strong", {}, `Cycle ${cycle.cycleId}`),
      ` at ${when(cycle.startTime)}: pass ${duration(cycle.passSeconds)}, `,
      `step ${duration(cycle.stepSeconds)}, commit ${duration(cycle.commitSeconds)}`,
    ),
    h(
      "ul",
      {},
      own.map((each) =>
        h(
          "li",
          {},
          dot(each.tenant),
          `${each.tenant} on ${each.workerId}: `,
          `${count(each.numTokens)} tokens, ${count(each.numOperations)} operations${each.isStep ? ", a step" : ""}`,
        ),
      ),
      others.length ? h("li", {}, dot(""), `others (${others.length}): ${count(others[0].numTokens)} tokens`) : null,
    ),
  ];
}

function idle(last) {
  if (last)
    return h("span", { class: "faint" }, `The pool is idle. The last cycle began at ${when(last.cycle.startTime)}.`);
  return h(
    "span",
    {},
    "Nothing has run yet. Train something: ",
    h("code", {}, "make demo"),
    " in a checkout, or from Python ",
    h("code", {}, "tinkerpool.ServiceClient().create_lora_training_client()"),
    ".",
  );
}
