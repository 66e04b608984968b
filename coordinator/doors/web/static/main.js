// The frame of the page: who is signed in, the parts, and which one is shown.

import { Refusal, rpc, signIn, signOut } from "./api.js";
import { checkpoints } from "./checkpoints.js";
import { clock } from "./clock.js";
import { fill, h } from "./dom.js";
import { playground } from "./playground.js";
import { pool } from "./pool.js";
import { run, runs } from "./runs.js";

const PARTS = [
  { path: "clock", name: "Clock", show: clock },
  { path: "runs", name: "Runs", show: (view, me, [id]) => (id ? run(view, me, id) : runs(view, me)) },
  { path: "checkpoints", name: "Checkpoints", show: checkpoints },
  { path: "playground", name: "Playground", show: playground },
  { path: "pool", name: "Pool", show: pool },
];

const RETRY_MS = 3000;

const header = document.querySelector("header");
const main = document.querySelector("main");
let me = null;
let leave = [];

/** What a part may use: `add` content, `every` few seconds, and what is to end when the user leaves it. */
class View {
  constructor(element) {
    this.element = element;
    this.isLeft = false;
    leave.push(() => {
      this.isLeft = true;
    });
  }

  /** Do something when the user leaves this part. */
  onLeave(end) {
    leave.push(end);
  }

  /** Run now, and again every so many seconds while the page is visible, never twice at once; return after the first. */
  async every(seconds, work) {
    let isRunning = false;
    const once = async () => {
      if (isRunning) return;
      isRunning = true;
      try {
        if (!this.isLeft && !document.hidden) await work();
        this.warning?.remove();
      } catch (error) {
        if (!this.isLeft) this.warn(error);
      } finally {
        isRunning = false;
      }
    };
    const timer = setInterval(once, seconds * 1000);
    this.onLeave(() => clearInterval(timer));
    await once();
  }

  /** Say at the top that what is shown is not up to date, and why. */
  warn(error) {
    if (error instanceof Refusal && error.status === 401) return;
    const text = error instanceof Refusal ? error.message : "The pool does not answer. Trying again ...";
    this.warning ??= h("p", { class: "problem severe", role: "alert" });
    this.warning.textContent = text;
    this.element.prepend(this.warning);
  }
}

async function show() {
  leave.forEach((end) => end());
  leave = [];
  if (me === null && !(await identify())) return;
  const [path, ...rest] = place();
  const part = PARTS.find((each) => each.path === path) ?? PARTS[0];
  document.title = `${part.name} - tinkerpool`;
  fill(
    header.querySelector("nav"),
    PARTS.map((each) => h("a", { href: `#/${each.path}`, "aria-current": each === part ? "page" : null }, each.name)),
  );
  const view = new View(fill(main));
  try {
    await part.show(view, me, rest);
  } catch (error) {
    if (view.isLeft) return;
    view.warn(error);
    const again = setTimeout(show, RETRY_MS);
    view.onLeave(() => clearTimeout(again));
  }
}

/** Return the parts of the address behind `#/`; none if it is malformed. */
function place() {
  try {
    return location.hash.replace(/^#\//, "").split("/").map(decodeURIComponent);
  } catch {
    return [];
  }
}

/** Ask who is signed in; show the form if nobody is. */
async function identify() {
  try {
    const { tenant, role } = await rpc("SessionService/GetCapabilities");
    me = { tenant, isAdmin: role === "admin", mayChange: role !== "read-only", role };
  } catch (error) {
    const isUnknown = error instanceof Refusal && error.status === 401; // the form is shown already
    if (!isUnknown) askForKey(error instanceof Refusal ? error.message : "The pool does not answer. Is it running?");
    return false;
  }
  fill(
    header.querySelector(".who"),
    `${me.tenant} (${me.role})`,
    h(
      "button",
      {
        class: "plain",
        onclick: async () => {
          await signOut();
          me = null;
          askForKey("");
        },
      },
      "Sign out",
    ),
  );
  header.hidden = false;
  return true;
}

function askForKey(message) {
  leave.forEach((end) => end());
  leave = [];
  header.hidden = true;
  document.title = "Sign in - tinkerpool";
  const key = h("input", {
    type: "password",
    name: "key",
    autocomplete: "current-password",
    required: true,
    autofocus: true,
    spellcheck: "false",
  });
  const problem = h("p", { class: "bad", role: "alert" }, message);
  const submit = async (event) => {
    event.preventDefault();
    try {
      await signIn(key.value);
      await show();
    } catch (error) {
      problem.textContent = error instanceof Refusal ? error.message : "The pool does not answer. Is it running?";
      key.select();
    }
  };
  fill(
    main,
    h(
      "div",
      { class: "card sign-in" },
      h("h1", {}, "tinkerpool"),
      h(
        "form",
        { onsubmit: submit },
        h("label", {}, "API key", key),
        h("button", { class: "main" }, "Sign in"),
        problem,
      ),
      h(
        "p",
        { class: "faint small" },
        "The key of this pool is in the file that ",
        h("code", {}, "tinkerpool serve"),
        " names at its start. The browser keeps a sign-in for 12 hours, never the key.",
      ),
    ),
  );
  key.focus();
}

addEventListener("hashchange", () => {
  main.focus({ preventScroll: true });
  scrollTo(0, 0);
  show();
});
addEventListener("signed-out", ({ detail }) => {
  const was = me;
  me = null;
  askForKey(was ? detail : "");
});
show();
