// Calls of the pool: the contract's RPCs in JSON, and the cycles as they commit, one stream for all tabs of a browser.

const CYCLES = "/tinkerpool.v1.PoolService/WatchCycles";
const RETRY_MS = 1000;
const RETRY_MS_MAX = 15000;

/** A call that the pool has refused. */
export class Refusal extends Error {
  constructor(status, body) {
    super(body.message ?? body.error?.message ?? body.detail ?? `the pool answered with status ${status}`);
    this.status = status;
    this.reason = body.reason ?? "";
  }
}

/** Call an RPC by `Service/Method`; return its response. Throws Refusal, and TypeError without a connection. */
export async function rpc(method, request = {}) {
  const response = await fetch(`/tinkerpool.v1.${method}`, {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify(request),
  });
  return read(response);
}

/** Return all items of a list in pages, at most `most`. */
export async function all(method, field, request = {}, most = 1000) {
  const items = [];
  let pageToken = "";
  do {
    const page = await rpc(method, { ...request, pageToken });
    items.push(...(page[field] ?? []));
    pageToken = page.nextPageToken ?? "";
  } while (pageToken && items.length < most);
  return items;
}

/** Return the JSON of another GET. */
export async function get(path) {
  return read(await fetch(path));
}

/** Exchange a key for this browser's sign-in. */
export async function signIn(key) {
  const headers = { authorization: `Bearer ${key.trim()}` };
  await read(await fetch("/ui/sign-in", { method: "POST", headers }), false);
  renewSignIn();
}

export async function signOut() {
  await fetch("/ui/sign-out", { method: "POST" });
  renewSignIn();
}

/** Return the pieces of text that OpenAI's API streams for a prompt. Throws Refusal. */
export async function* complete(path, body, signal) {
  const response = await fetch(path, {
    method: "POST",
    signal,
    headers: { "content-type": "application/json" },
    body: JSON.stringify({ ...body, stream: true }),
  });
  if (!response.ok) await read(response);
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const event = JSON.parse(data);
    if (event.error) throw new Refusal(response.status, event);
    const choice = event.choices?.[0];
    if (choice) yield { text: choice.text ?? choice.delta?.content ?? "", end: choice.finish_reason };
  }
}

/** Return the JSON of a response. Throws Refusal; tells the frame if that `ends` the sign-in. */
async function read(response, ends = true) {
  const body = response.headers.get("content-type")?.includes("json") ? await response.json() : {};
  if (response.ok) return body;
  const refusal = new Refusal(response.status, body);
  if (ends && response.status === 401) dispatchEvent(new CustomEvent("signed-out", { detail: refusal.message }));
  throw refusal;
}

async function* events(stream) {
  let rest = "";
  for await (const chunk of stream.pipeThrough(new TextDecoderStream())) {
    const lines = (rest + chunk).split("\n");
    rest = lines.pop();
    for (const line of lines) if (line.startsWith("data: ")) yield line.slice(6);
  }
}

const listeners = new Set();
const tabs = new BroadcastChannel("tinkerpool cycles");
tabs.onmessage = ({ data }) => (data.isRenewed ? location.reload() : tell(data.cycle));
let isBegun = false;
let source = null;
let retry = null;
let pauseMs = RETRY_MS;

/** Call `listener` with each cycle that commits from now on; return a function that ends that. */
export function watchCycles(listener) {
  listeners.add(listener);
  if (!isBegun) begin();
  return () => listeners.delete(listener);
}

/** One tab, which holds a lock, reads the stream and tells the others. Without locks (no HTTPS) each tab reads. */
function begin() {
  isBegun = true;
  if (navigator.locks) navigator.locks.request("tinkerpool cycles", () => new Promise(open));
  else open();
}

/** Somebody else has signed in, or nobody is: read the stream anew, and let other tabs begin anew. */
function renewSignIn() {
  tabs.postMessage({ isRenewed: true });
  pauseMs = RETRY_MS;
  if (source) open();
}

function open() {
  source?.close();
  clearTimeout(retry);
  source = new EventSource(CYCLES);
  source.onmessage = ({ data }) => {
    pauseMs = RETRY_MS;
    const { cycle } = JSON.parse(data);
    tell(cycle);
    if (navigator.locks) tabs.postMessage({ cycle });
  };
  source.onerror = openLater;
  source.addEventListener("refusal", openLater);
}

function openLater() {
  source.close();
  clearTimeout(retry);
  retry = setTimeout(open, pauseMs);
  pauseMs = Math.min(RETRY_MS_MAX, 2 * pauseMs);
}

function tell(cycle) {
  for (const listener of listeners) listener(cycle);
}
