// Checkpoints of the tenant: download as a PEFT adapter, publish, delete.

import { rpc } from "./api.js";
import { confirmed, fill, h, notify, table } from "./dom.js";
import { ago, bytes, count, plain } from "./format.js";

const PAGE = 50;

export async function checkpoints(view, me) {
  const found = h("section", { class: "card" });
  const more = h("div", { class: "row" });
  view.element.append(h("h1", {}, "Checkpoints"), found);
  let skip = 0;
  const refresh = async () => {
    const { checkpoints: rows, totalSize } = await rpc("CheckpointService/ListCheckpoints", { pageSize: PAGE, skip });
    const turn = (by) => {
      skip = Math.max(0, skip + by);
      refresh();
    };
    fill(
      more,
      h("button", { disabled: skip === 0, onclick: () => turn(-PAGE) }, "Newer"),
      h("button", { disabled: skip + rows.length >= totalSize, onclick: () => turn(PAGE) }, "Older"),
      h("span", { class: "faint" }, rows.length ? `${skip + 1} to ${skip + rows.length} of ${count(totalSize)}` : ""),
    );
    fill(found, checkpointTable(rows, me, refresh), totalSize > PAGE ? more : null);
  };
  await view.every(10, refresh);
}

/** Return a table of checkpoints with what can be done with each; `changed` is called after a change. */
export function checkpointTable(rows, me, changed) {
  return table(
    [
      { name: "checkpoint", cell: (row) => h("span", { class: "mono" }, row.path.split("/").at(-1)) },
      {
        name: "run",
        cell: (row) =>
          h("a", { href: `#/runs/${encodeURIComponent(row.adapterId)}` }, row.adapterName || row.adapterId),
      },
      { name: "kind", cell: (row) => plain(row.kind, "CHECKPOINT_KIND_") },
      { name: "size", isNumber: true, cell: (row) => bytes(row.sizeBytes) },
      { name: "saved", cell: (row) => ago(row.createTime) },
      { name: "", cell: (row) => h("div", { class: "row" }, buttons(row, me, changed)) },
    ],
    rows,
    ["No checkpoint is saved yet: ", h("code", {}, 'client.save_state("name")'), " saves one."],
  );
}

function buttons(row, me, changed) {
  const parts = row.path.replace(/^[a-z]+:\/\//, "").split("/");
  const [run, ...checkpoint] = parts.map(encodeURIComponent);
  const archive = `/api/v1/training_runs/${run}/checkpoints/${checkpoint.join("/")}/archive?form=peft`;
  const act = (method, request, done) => async () => {
    try {
      await rpc(method, request);
      notify(done);
      await changed();
    } catch (error) {
      notify(error.message);
    }
  };
  const copy = async () => {
    await navigator.clipboard?.writeText(row.path);
    notify(navigator.clipboard ? "The path is in the clipboard." : row.path);
  };
  const publish = row.isPublic
    ? act("CheckpointService/SetCheckpointAccess", { path: row.path, isPublic: false }, "It is private again.")
    : act(
        "CheckpointService/SetCheckpointAccess",
        { path: row.path, isPublic: true },
        "Every tenant of this pool may read it now.",
      );
  const remove = async () => {
    if (await confirmed(`Delete ${row.path}? That cannot be undone.`, "Delete")) {
      await act("CheckpointService/DeleteCheckpoint", { path: row.path }, "The checkpoint is deleted.")();
    }
  };
  return [
    h("a", { class: "button", href: archive, download: `${parts.at(-1)}.tar` }, "Download"),
    h("button", { onclick: copy, title: row.path }, "Copy path"),
    me.mayChange ? h("button", { onclick: publish }, row.isPublic ? "Unpublish" : "Publish") : null,
    me.mayChange ? h("button", { class: "danger", onclick: remove }, "Delete") : null,
  ];
}
