// A conversation: sends it, shows the answer as it comes, stops it.

import { duration } from "/static/stack.js";

export class Chat {
  #turns = [];
  #known = new Set();  // faults
  #log; #onChange; #stopping = null; #answer = null; #pause = null; #receivedAt;
  #unshown = ""; #frame = 0;

  // `onChange` is called when an answer begins or ends.
  constructor(log, onChange) {
    this.#log = log;
    this.#onChange = onChange;
  }

  get answering() { return this.#stopping !== null; }

  stop() { this.#stopping?.abort(); }

  reset() {
    this.stop();
    this.#turns = [];
    this.#log.replaceChildren();
  }

  // Says in the open answer's place what the stack's faults do to it.
  tell(faults) {
    for (const fault of faults) {
      const isNews = !this.#known.has(fault.began) || fault.pause_s === null;
      this.#known.add(fault.began);
      if (this.#pause?.fault.began === fault.began) this.#pause.fault = fault;
      else if (this.answering && isNews) {
        this.#pause = { fault, wait_s: 0, isOver: false, notice: this.#notice() };
      } else continue;
      this.#pause.isOver &&= fault.pause_s !== null;
      this.#showPause();
    }
  }

  #notice() {
    const notice = element("span", "notice");
    notice.setAttribute("role", "status");
    this.#show();
    this.#keepAtEnd(() => this.#answer.append(notice));
    return notice;
  }

  #showPause() {
    const { fault, wait_s, isOver, notice } = this.#pause;
    const what = fault.lost.length ? `${fault.lost.join(" and ")} died` : "the engine is away";
    const waited = `the answer went on after ${duration(Math.max(wait_s, fault.pause_s))}`;
    const then = fault.pause_s === 0 ? "the answer goes on" : isOver ? waited : "the answer waits";
    notice.textContent = `${what}, ${then}`;
  }

  // An answer goes on a little later than the stack: what counts is how long nothing came.
  #received() {
    const now = performance.now();
    const wait_s = (now - this.#receivedAt) / 1000;
    this.#receivedAt = now;
    if (!this.#pause || this.#pause.isOver) return;
    this.#pause.wait_s = Math.max(this.#pause.wait_s, wait_s);
    this.#pause.isOver = this.#pause.fault.pause_s !== null;
    this.#showPause();
  }

  async ask(text) {
    this.#log.querySelector(".empty")?.remove();
    this.#stopping = new AbortController();
    this.#pause = null;
    this.#receivedAt = performance.now();
    this.#onChange();
    const turns = [...this.#turns, { role: "user", content: text }];
    this.#log.append(element("div", "turn user", text));
    this.#answer = this.#log.appendChild(element("div", "turn"));
    this.#answer.setAttribute("aria-busy", "true");  // to be read aloud once it is whole
    this.#log.scrollTop = this.#log.scrollHeight;
    const answer = this.#answer;
    let said = "";
    try {
      for await (const piece of this.#pieces(turns)) {
        if (piece.error) throw new Error(piece.error);
        said += piece.text;
        this.#received();
        this.#unshown += piece.text;
        this.#frame ||= requestAnimationFrame(() => this.#show());
        if (piece.timings) this.#show(element("span", "facts", describe(piece)));
      }
    } catch (error) {
      const stopped = error.name === "AbortError";
      const [className, reason] = stopped ? ["facts", "stopped"] : ["facts bad", error.message];
      this.#show(element("span", className, reason));
    }
    this.#show();
    if (said && answer.isConnected) this.#turns = [...turns, { role: "assistant", content: said }];
    answer.removeAttribute("aria-busy");
    this.#stopping = this.#answer = null;
    this.#onChange();
  }

  async *#pieces(messages) {
    const response = await fetch("/chat", {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify({ messages }),
      signal: this.#stopping.signal,
    });
    if (!response.ok) throw new Error(await response.text());
    let rest = "";
    for await (const text of response.body.pipeThrough(new TextDecoderStream())) {
      const events = (rest + text).split("\n\n");
      rest = events.pop();
      for (const event of events) yield JSON.parse(event.slice("data: ".length));
    }
  }

  // Appends what has come since the last frame, and then `end`. To do it for each token would lay
  // the whole answer out for each.
  #show(end = "") {
    cancelAnimationFrame(this.#frame);
    const afterNotice = this.#answer.lastChild?.className === "notice";
    const text = afterNotice ? this.#unshown.trimStart() : this.#unshown;
    this.#unshown = "";
    this.#frame = 0;
    this.#keepAtEnd(() => this.#answer.append(...[text, end].filter(Boolean)));
  }

  // Stays at the end of the conversation, unless the user has scrolled away from it.
  #keepAtEnd(change) {
    const { scrollTop, clientHeight, scrollHeight } = this.#log;
    change();
    if (scrollHeight - scrollTop - clientHeight < 40) this.#log.scrollTop = this.#log.scrollHeight;
  }
}

function describe({ usage, timings, finish_reason }) {
  const tokens = usage.completion_tokens;
  const rest = timings.total_s - timings.first_token_s;
  const rate = tokens > 1 && rest > 0 ? ` · ${((tokens - 1) / rest).toFixed(0)} tokens/s` : "";
  const cut = finish_reason === "length" ? " · no room for more" : "";
  return `${tokens} tokens · first after ${duration(timings.first_token_s)}${rate}${cut}`;
}

function element(name, className, text = "") {
  return Object.assign(document.createElement(name), { className, textContent: text });
}
