// The dashboard: the chat beside the state of the stack, which comes as events.

import { Charts } from "/static/charts.js";
import { Chat } from "/static/chat.js";
import { showFaults, showProcesses } from "/static/stack.js";

const AGAIN_MS = 3000;

let stages = 1;

const find = (id) => document.getElementById(id);
const [log, form, prompt, hint, send, stop, reset, health] =
  ["log", "form", "prompt", "hint", "send", "stop", "reset", "health"].map(find);
const charts = new Charts(find("charts"));
const chat = new Chat(log, () => {
  stop.hidden = !chat.answering;
  send.hidden = chat.answering;
});

form.addEventListener("submit", (event) => {
  event.preventDefault();
  const text = prompt.value.trim();
  if (!text || chat.answering || prompt.disabled) return;
  prompt.value = "";
  chat.ask(text);
});
prompt.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  form.requestSubmit();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") chat.stop();
});
stop.addEventListener("click", () => {
  chat.stop();
  prompt.focus();
});
reset.addEventListener("click", () => {
  chat.reset();
  prompt.focus();
});

function show(state) {
  stages = state.samples.at(-1)?.stages ?? stages;
  const pipeline = stages > 1 ? `, ${stages} pipeline stages` : "";
  find("model").textContent = `${state.model} at ${state.address}${pipeline}`;
  showHealth(state.serving ? "serving" : "not serving", state.serving ? "good" : "bad");
  charts.add(state.samples, state.now);
  showProcesses(find("processes"), state.processes);
  showFaults(find("faults"), state.faults, state.now);
  chat.tell(state.faults);
  if (state.chat_disabled) {
    prompt.disabled = send.disabled = reset.disabled = true;
    hint.textContent = state.chat_disabled;
    hint.className = "bad";
  }
}

function showHealth(text, className) {
  if (health.textContent === text) return;  // it would be read aloud again
  health.textContent = text;
  health.className = `pill ${className}`;
}

function listen() {
  const events = new EventSource("/events");
  events.onmessage = (event) => show(JSON.parse(event.data));
  events.onerror = () => {
    showHealth("no connection", "bad");
    if (events.readyState === EventSource.CLOSED) setTimeout(listen, AGAIN_MS);
  };
}

listen();
