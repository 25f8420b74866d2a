// The tables of processes and faults.

export function showProcesses(body, processes) {
  body.replaceChildren(...processes.map((process) => {
    const { name, pid, restarts, trouble } = process;
    const health = process.state.split("/").at(-1).toLowerCase().replace("_", " ");
    const state = cell(health, ["serving", "running"].includes(health) ? "good" : "bad");
    if (trouble) state.appendChild(document.createElement("small")).textContent = trouble;
    return row(cell(name), state, cell(pid ?? "–", "number"), cell(restarts, "number"));
  }));
}

export function showFaults(body, faults, now) {
  const rows = faults.map(({ began, lost, pause_s }) => row(
    cell(lost.join(", ") || "engine"),
    cell(pause_s === null ? "lasts" : pause_s ? duration(pause_s) : "none", "number"),
    cell(ago(now - began), "number"),
  ));
  if (!rows.length) rows.push(row(cell("none since the dashboard's process started")));
  body.replaceChildren(...rows);
}

export function duration(seconds) {
  return `${seconds.toFixed(seconds < 1 ? 2 : 1)} s`;
}

function ago(seconds) {
  if (seconds < 60) return `${Math.round(seconds)} s ago`;
  if (seconds < 3600) return `${Math.round(seconds / 60)} min ago`;
  return `${Math.round(seconds / 3600)} h ago`;
}

function row(...cells) {
  const made = document.createElement("tr");
  made.append(...cells);
  return made;
}

function cell(text, className = "") {
  return Object.assign(document.createElement("td"), { textContent: text, className });
}
