// Reads /admin/live with the key from the fragment, and redraws at most once per line.

import { State } from "./state.js";
import { Views, byId, setText } from "./views.js";

// A proxy may publish the gateway below a path.
const ROOT = new URL("..", import.meta.url);
const STORED_KEY = `kvroute-admin-key ${ROOT.pathname}`;
const RETRY_MS = 2000;
const ANNOUNCE_MS = 15000;

const state = new State();
let key = "";
let paused = false;
let announced = 0;
let scheduled = false;

const views = new Views(state, { drain, open });

const range = () => (byId("range").value === "all" ? null : Number(byId("range").value));

function redraw() {
  if (scheduled) return;
  scheduled = true;
  requestAnimationFrame(() => {
    scheduled = false;
    performance.mark("kvroute-draw");
    views.draw(range());
    performance.measure("kvroute-update", "kvroute-draw");
  });
}

async function ask(path, options = {}) {
  const answer = await fetch(new URL(path, ROOT), { ...options, headers: { authorization: `Bearer ${key}` }, cache: "no-store" });
  if (answer.ok) return answer;
  let message = `${answer.status} ${answer.statusText}`;
  try {
    message = (await answer.json()).error.message;
  } catch {
    // no error body: the status says enough
  }
  const error = new Error(message);
  error.status = answer.status;
  throw error;
}

async function follow() {
  const answer = await ask("admin/live");
  setText(byId("connection"), "connected");
  byId("key-form").hidden = true;
  byId("figures").hidden = false;
  sessionStorage.setItem(STORED_KEY, key);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      performance.mark("kvroute-line");
      state.apply(JSON.parse(line));
      performance.measure("kvroute-update", "kvroute-line");
    }
    if (!paused) {
      redraw();
      announce();
    }
  }
}

async function run() {
  for (;;) {
    try {
      await follow();
      setText(byId("connection"), "the gateway closed the stream; connecting again");
    } catch (error) {
      if (error.status === 401 || error.status === 403) {
        sessionStorage.removeItem(STORED_KEY);
        askForKey(key ? "The gateway refuses this key." : "");
        return;
      }
      setText(byId("connection"), `not connected: ${error.message}`);
    }
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
    state.reconnected();
  }
}

// For screen readers: a summary now and then, not every second.
function announce() {
  const now = Date.now();
  if (now - announced < ANNOUNCE_MS) return;
  announced = now;
  const workers = [...state.tables.workers.values()];
  const healthy = workers.filter((worker) => worker.state === "healthy").length;
  const { requests, rate } = state.figures(range());
  setText(byId("status"), `${healthy} of ${workers.length} workers healthy, ${requests} requests, ${rate.toFixed(1)} per second.`);
}

function askForKey(problem) {
  byId("figures").hidden = true;
  byId("key-form").hidden = false;
  setText(byId("key-problem"), problem);
  setText(byId("connection"), "not connected");
  byId("key").focus();
}

async function drain(worker, isDraining) {
  const path = `admin/workers/${encodeURIComponent(worker)}/drain`;
  try {
    await ask(path, { method: isDraining ? "DELETE" : "POST" });
    setText(byId("worker-problem"), "");
  } catch (error) {
    setText(byId("worker-problem"), `${worker}: ${error.message}`);
  }
}

async function open(requestId, button) {
  views.opened = button ?? document.activeElement;
  try {
    const answer = await ask(`admin/decisions?limit=20&request_id=${encodeURIComponent(requestId)}`);
    const { decisions } = await answer.json();
    const entry = decisions.find((each) => each.request_id === requestId);
    if (entry) views.drawDecision(entry);
    else setText(byId("search-result"), `The gateway no longer keeps request ${requestId}.`);
  } catch (error) {
    setText(byId("search-result"), error.message);
  }
}

function rowOf(entry) {
  return {
    time: entry.time, id: entry.request_id, model: entry.model, worker: entry.worker, status: entry.status,
    strategy: entry.strategy, reason: entry.reason ?? entry.error, tokens: entry.prompt_tokens,
    matched: entry.ranking?.[0].matched_tokens, cached: entry.cached_tokens, ttfb_s: entry.time_to_first_byte_s,
    duration_s: entry.duration_s, prefill_worker: entry.prefill_worker, handover_fallback: entry.handover_fallback,
    moved: entry.handover_fallback ? null : entry.moved_tokens, member: entry.member,
  };
}

async function search(text) {
  const answer = await ask(`admin/decisions?limit=100&request_id=${encodeURIComponent(text)}`);
  const { decisions } = await answer.json();
  views.found = decisions.map(rowOf);
  const [last] = views.found;
  setText(
    byId("search-result"),
    last
      ? `${decisions.length} requests match ${text}. The last one went to ${last.worker}, which has most of it now unless it was evicted.`
      : `No kept request matches ${text}.`,
  );
  state.changed.add("found");
  redraw();
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = byId("key").value.trim();
  byId("key").value = "";
  run();
});
byId("search-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = byId("search").value.trim();
  if (text) search(text).catch((error) => setText(byId("search-result"), error.message));
});
byId("clear").addEventListener("click", () => {
  views.found = null;
  byId("search").value = "";
  setText(byId("search-result"), "");
  state.changed.add("found");
  redraw();
});
byId("what-if-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  const strategy = byId("strategy").value;
  setText(byId("what-if-result"), `${strategy} decides again …`);
  try {
    const answer = await ask(`admin/what-if?strategy=${encodeURIComponent(strategy)}`);
    state.whatIf = await answer.json();
    views.drawWhatIf();
  } catch (error) {
    setText(byId("what-if-result"), error.message);
  }
});
byId("pause").addEventListener("click", () => {
  paused = !paused;
  byId("pause").setAttribute("aria-pressed", String(paused));
  setText(byId("pause"), paused ? "Resume" : "Pause");
  setText(byId("connection"), paused ? "paused; figures are still collected" : "connected");
  if (!paused) redraw();
});
byId("range").addEventListener("change", () => {
  state.changed.add("range");
  redraw();
});

addEventListener("hashchange", () => {
  if (location.hash.startsWith("#key=")) location.reload();
});

const fragment = new URLSearchParams(location.hash.slice(1)).get("key");
key = fragment ?? sessionStorage.getItem(STORED_KEY) ?? "";
// The key must stay out of the history and of copied addresses.
if (fragment !== null) history.replaceState(null, "", location.pathname);
if (key) run();
else askForKey("");
