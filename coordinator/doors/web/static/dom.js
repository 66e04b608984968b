// Makes elements. Text is always text: nothing that a pool reports is ever parsed as HTML.

const SVG = "http://www.w3.org/2000/svg";

/** Return an HTML element with attributes, listeners (`onclick`) and children; null children are left out. */
export function h(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

/** Return an SVG element, likewise. */
export function s(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

/** Put other children into an element, unless it has left the page; return it. */
export function fill(element, ...children) {
  element.replaceChildren(...flat(children));
  return element;
}

/** Return a table. `columns`: {name, cell(row), isNumber}. On a narrow screen each row is a block. */
export function table(columns, rows, empty) {
  if (!rows.length) return h("p", { class: "faint" }, empty);
  return h(
    "div",
    { class: "table" },
    h(
      "table",
      { class: "cards" },
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          columns.map((each) => h("th", { class: each.isNumber ? "number" : null, scope: "col" }, each.name)),
        ),
      ),
      h(
        "tbody",
        {},
        rows.map((row) =>
          h(
            "tr",
            {},
            columns.map((each) =>
              h("td", { class: each.isNumber ? "number" : null, "data-name": each.name || null }, each.cell(row)),
            ),
          ),
        ),
      ),
    ),
  );
}

/** Return a list of terms and large figures. */
export function figures(pairs) {
  return h(
    "dl",
    { class: "figures" },
    pairs.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))),
  );
}

/** Say something at the foot of the page for some seconds. */
export function notify(text) {
  const notice = document.getElementById("notice");
  notice.textContent = text;
  clearTimeout(notify.timer);
  notify.timer = setTimeout(() => {
    notice.textContent = "";
  }, 6000);
}

/** Ask before something that cannot be undone; return whether the user agrees. */
export function confirmed(question, action) {
  return new Promise((resolve) => {
    const dialog = h(
      "dialog",
      { "aria-label": question },
      h("p", {}, question),
      h(
        "form",
        { method: "dialog", class: "row" },
        h("button", { value: "yes", class: "danger" }, action),
        h("button", { value: "", autofocus: true }, "Cancel"),
      ),
    );
    dialog.addEventListener("close", () => {
      dialog.remove();
      resolve(dialog.returnValue === "yes");
    });
    document.body.append(dialog);
    dialog.showModal();
  });
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value);
  }
  element.append(...flat(children));
  return element;
}

function flat(children) {
  return children.flat(Infinity).filter((each) => each !== null && each !== undefined && each !== "");
}
