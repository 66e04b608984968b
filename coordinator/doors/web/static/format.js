// Numbers, times and names for people.

const UNITS = ["B", "kB", "MB", "GB", "TB"];
const REASONS = {
  WAIT_REASON_ORDER: "earlier operations of its adapter",
  WAIT_REASON_SEQUENCE: "an operation that has not arrived",
  WAIT_REASON_CYCLE: "the next cycle",
  WAIT_REASON_BUDGET: "room in a cycle",
  WAIT_REASON_SLOTS: "a slot on a worker",
  WAIT_REASON_MEMORY: "host memory on a worker",
  WAIT_REASON_MOVE: "the adapter's move",
  WAIT_REASON_FILE: "a file with weights",
  WAIT_REASON_QUARANTINE: "the quarantine after a lost worker",
  WAIT_REASON_PROBATION: "a turn alone",
  WAIT_REASON_HELD: "the end of a suspension",
  WAIT_REASON_WORKER: "a worker that is late or lost",
};

export const count = (number) => Number(number ?? 0).toLocaleString("en");

/** Return a number with three or four significant digits. */
export function figure(value) {
  const number = Number(value);
  if (!Number.isFinite(number)) return String(value);
  if (number === 0) return "0";
  const size = Math.abs(number);
  if (size >= 1e6 || size < 1e-3) return number.toExponential(2);
  return size >= 1000 ? Math.round(number).toLocaleString("en") : String(Number(number.toPrecision(4)));
}

export const rate = (perSecond) => `${figure(Number(perSecond ?? 0))}/s`;

export function bytes(number) {
  let size = Number(number ?? 0),
    unit = 0;
  while (size >= 1000 && unit < UNITS.length - 1) {
    size /= 1000;
    unit += 1;
  }
  return `${unit && size < 10 ? size.toFixed(1) : Math.round(size)} ${UNITS[unit]}`;
}

export function duration(seconds) {
  const total = Number(seconds ?? 0);
  if (total < 0.9995) return `${Math.round(total * 1000)} ms`;
  if (total < 60) return `${total < 10 ? total.toFixed(1) : Math.round(total)} s`;
  if (total < 3600) return `${Math.floor(total / 60)} min ${Math.round(total % 60)} s`;
  if (total < 86400) return `${Math.floor(total / 3600)} h ${Math.round((total % 3600) / 60)} min`;
  return `${Math.floor(total / 86400)} d ${Math.round((total % 86400) / 3600)} h`;
}

/** Return how long ago a time was; empty for none. */
export function ago(time) {
  return time ? `${duration(Math.max(0, (Date.now() - Date.parse(time)) / 1000))} ago` : "";
}

export function when(time) {
  return time ? new Date(time).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "medium" }) : "";
}

export const reason = (name) => REASONS[name] ?? "its turn";

/** Return a name of an enumeration for people: `OPERATION_KIND_OPTIM_STEP` and `OPERATION_KIND_` give `optim step`. */
export const plain = (name, prefix) => (name ?? "").replace(prefix, "").replaceAll("_", " ").toLowerCase();
