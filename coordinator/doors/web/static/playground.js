// The playground: prompt a base model, an adapter's newest saved weights, or a checkpoint; tokens as they are drawn.

import { all, complete, get } from "./api.js";
import { h } from "./dom.js";

export async function playground(view, me) {
  const [{ data }, adapters] = await Promise.all([
    get("/v1/models"),
    all("AdapterService/ListAdapters", "adapters", { pageSize: 100 }, 200),
  ]);
  const names = new Map(adapters.map((each) => [each.adapterId, each.name]));
  const wanted = decodeURIComponent(location.hash.split("/")[2] ?? "");
  const model = h(
    "select",
    {},
    data.map((each) => h("option", { value: each.id, selected: each.id === wanted }, label(each.id, names))),
  );
  const way = h(
    "select",
    {},
    h("option", { value: "completion" }, "continue the text"),
    h("option", { value: "chat" }, "answer as in a chat"),
  );
  const number = (value, attributes) => h("input", { type: "number", value, ...attributes });
  const tokens = number(100, { min: 1, max: 4096 }),
    temperature = number(0.8, { min: 0, max: 2, step: 0.1 });
  const seed = h("input", { type: "number", min: 0, placeholder: "any" });
  const prompt = h("textarea", { required: true, "aria-label": "Prompt" }, "In the beginning");
  const send = h("button", { class: "main", type: "submit" }, "Draw"),
    stop = h("button", { type: "button", hidden: true }, "Stop");
  const answer = h(
    "section",
    { class: "card answer", "aria-live": "polite", "aria-label": "Answer" },
    h("span", { class: "faint" }, "The tokens appear here as they are drawn."),
  );
  let running = null;
  stop.addEventListener("click", () => running?.abort());
  view.onLeave(() => running?.abort());
  const submit = async (event) => {
    event.preventDefault();
    running = new AbortController();
    send.disabled = true;
    stop.hidden = false;
    const drawn = h("span", { class: "drawn" }),
      note = h("p", { class: "faint small" });
    const isChat = way.value === "chat";
    answer.replaceChildren(...(isChat ? [] : [h("span", { class: "prompt" }, prompt.value)]), drawn, note);
    const body = {
      model: model.value,
      temperature: Number(temperature.value),
      max_tokens: Number(tokens.value),
      ...(seed.value ? { seed: Number(seed.value) } : {}),
      ...(isChat ? { messages: [{ role: "user", content: prompt.value }] } : { prompt: prompt.value }),
    };
    try {
      for await (const { text, end } of complete(
        isChat ? "/v1/chat/completions" : "/v1/completions",
        body,
        running.signal,
      )) {
        drawn.append(text);
        if (end)
          note.textContent = end === "length" ? "The limit of tokens is reached." : "The model has ended its text.";
      }
    } catch (error) {
      note.className = running.signal.aborted ? "faint small" : "bad";
      note.textContent = running.signal.aborted ? "Stopped." : error.message;
    }
    send.disabled = false;
    stop.hidden = true;
  };
  view.element.append(
    h("h1", {}, "Playground"),
    me.mayChange
      ? h(
          "form",
          { class: "card", onsubmit: submit },
          h("label", {}, "Weights", model),
          h(
            "div",
            { class: "fields" },
            h("label", {}, "Way", way),
            h("label", {}, "Tokens at most", tokens),
            h("label", {}, "Temperature", temperature),
            h("label", {}, "Seed", seed),
          ),
          prompt,
          h("p", { class: "row" }, send, stop),
        )
      : h("p", { class: "card" }, "This key may only read: sign in with a member's key to sample."),
    answer,
  );
}

function label(id, names) {
  const adapter = id.replace(/^[a-z]+:\/\//, "").split("/")[0];
  const name = names.get(adapter);
  return name ? id.replace(/^[a-z]+:\/\//, "").replace(adapter, name) : id;
}
