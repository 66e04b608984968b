// A curve over steps: SVG with axes, and the value at the pointer.

import { fill, h, s } from "./dom.js";
import { figure } from "./format.js";

const WIDTH = 420,
  HEIGHT = 190,
  LEFT = 54,
  BOTTOM = 24,
  TOP = 10,
  RIGHT = 10;
const POINTS_MAX = 400;

/** Return a card with a curve. `points`: [step, value], steps ascending; values that are not finite are left out. */
export function chart(name, points) {
  const finite = points.filter(([, value]) => Number.isFinite(value));
  const last = points.at(-1);
  const shown = thinned(finite);
  const [left, right] = extent(shown.map(([x]) => x));
  const [low, high] = padded(extent(shown.map(([, y]) => y)));
  const x = (value) => LEFT + ((value - left) / (right - left || 1)) * (WIDTH - LEFT - RIGHT);
  const y = (value) => HEIGHT - BOTTOM - ((value - low) / (high - low || 1)) * (HEIGHT - BOTTOM - TOP);
  const readout = h("span", { class: "faint small" }, `${figure(last?.[1])} at step ${last?.[0]}`);
  const mark = s("circle", { class: "point", r: 3.5, visibility: "hidden" });
  const point = (event) => {
    const box = svg.getBoundingClientRect();
    const at = ((event.clientX - box.left) / box.width) * WIDTH;
    const near = shown.reduce(
      (best, each) => (Math.abs(x(each[0]) - at) < Math.abs(x(best[0]) - at) ? each : best),
      shown[0],
    );
    if (!near) return;
    mark.setAttribute("cx", x(near[0]));
    mark.setAttribute("cy", y(near[1]));
    mark.setAttribute("visibility", "visible");
    fill(readout, `${figure(near[1])} at step ${near[0]}`);
  };
  const svg = s(
    "svg",
    {
      class: "chart",
      viewBox: `0 0 ${WIDTH} ${HEIGHT}`,
      role: "img",
      onpointermove: point,
      "aria-label": `${name}: ${shown.length} points, the last is ${figure(last?.[1])} at step ${last?.[0]}`,
    },
    s("line", { class: "axis", x1: LEFT, x2: LEFT, y1: TOP, y2: HEIGHT - BOTTOM }),
    s("line", { class: "axis", x1: LEFT, x2: WIDTH - RIGHT, y1: HEIGHT - BOTTOM, y2: HEIGHT - BOTTOM }),
    [low, (low + high) / 2, high].map((value) =>
      s("text", { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, figure(value)),
    ),
    [...new Set([left, right])].map((value, index) =>
      s("text", { x: x(value), y: HEIGHT - 7, "text-anchor": index ? "end" : "start" }, String(value)),
    ),
    shown.length > 1
      ? s("polyline", { class: "curve", points: shown.map((each) => `${x(each[0])},${y(each[1])}`).join(" ") })
      : shown.map((each) => s("circle", { class: "point", cx: x(each[0]), cy: y(each[1]), r: 3 })),
    mark,
  );
  return h(
    "section",
    { class: "card", "data-metric": name, "data-points": points.length },
    h("div", { class: "row spread" }, h("h2", {}, name), readout),
    svg,
  );
}

/** Return at most `POINTS_MAX` points: of each group the extremes, so that no spike is lost. */
function thinned(points) {
  if (points.length <= POINTS_MAX) return points;
  const size = Math.ceil(points.length / (POINTS_MAX / 2));
  const kept = [];
  for (let start = 0; start < points.length; start += size) {
    const group = points.slice(start, start + size);
    const least = group.reduce((best, each) => (each[1] < best[1] ? each : best));
    const most = group.reduce((best, each) => (each[1] > best[1] ? each : best));
    kept.push(...new Set([least, most].sort((a, b) => a[0] - b[0])));
  }
  return kept;
}

function extent(values) {
  return values.length ? [values.reduce((a, b) => Math.min(a, b)), values.reduce((a, b) => Math.max(a, b))] : [0, 1];
}

/** Return a range with room above and below, but none below zero for what is never negative. */
function padded([low, high]) {
  const room = (high - low) * 0.06 || Math.abs(high) * 0.06 || 1;
  return [low >= 0 ? Math.max(0, low - room) : low - room, high + room];
}
