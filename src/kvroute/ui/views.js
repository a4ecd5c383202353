// Draws the state. Names come from outside: they only ever become text nodes.

import * as words from "./words.js";

const { count, seconds, share } = words;

export const byId = (id) => document.getElementById(id);

export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "class") element.className = value;
    else if (name.startsWith("aria-") || name === "scope" || name === "colspan") element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children);
  return element;
}

export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// A table whose rows are kept by key. A column is {title, number, row, wide, of(row, key)}; `of` returns text,
// or a node that `same` says is unchanged.
export class Table {
  constructor(id, caption, columns) {
    this.columns = columns;
    this.rows = new Map();
    this.body = make("tbody");
    const titles = columns.map((column) =>
      make("th", { scope: "col", class: column.number ? "number" : "" }, column.title),
    );
    byId(id).replaceChildren(
      make("caption", { class: "visually-hidden" }, caption),
      make("thead", {}, make("tr", {}, ...titles)),
      this.body,
    );
  }

  // `entries` are [key, row] in the order to show.
  draw(entries) {
    const seen = new Set();
    let place = this.body.firstChild;
    for (const [key, row] of entries) {
      seen.add(key);
      let known = this.rows.get(key);
      if (!known) {
        const cells = this.columns.map((column) => {
          const cell = make(column.row ? "th" : "td", { class: column.number ? "number" : column.wide ? "wide" : "" });
          if (column.row) cell.setAttribute("scope", "row");
          return cell;
        });
        known = { element: make("tr", {}, ...cells), cells, row: undefined };
        this.rows.set(key, known);
      }
      if (known.row !== row) {
        this.columns.forEach((column, number) => {
          const cell = known.cells[number];
          const content = column.of(row, key, cell);
          if (content instanceof Node) cell.replaceChildren(content);
          else if (content !== undefined) setText(cell, content);
        });
        known.row = row;
      }
      if (place === known.element) place = place.nextSibling;
      else this.body.insertBefore(known.element, place);
    }
    for (const [key, known] of this.rows) {
      if (!seen.has(key)) {
        known.element.remove();
        this.rows.delete(key);
      }
    }
  }

  element(key) {
    return this.rows.get(key)?.element;
  }
}

function heldOf(state, worker) {
  let held = null;
  for (const stream of state.tables.streams.values()) {
    if (stream.worker !== worker) continue;
    held ??= { gpu: 0, l1: 0, l2: 0 };
    for (const tier of ["gpu", "l1", "l2"]) held[tier] += stream.held[tier] ?? 0;
  }
  return held;
}

const tierColumn = (state, tier) => (row, key) => {
  const held = heldOf(state, key);
  return held ? count(held[tier] * row.block_size) : "–";
};

export class Views {
  // `actions` has drain(worker, isDraining) and open(requestId).
  constructor(state, actions) {
    this.state = state;
    this.actions = actions;
    this.opened = null;
    this.found = null; // rows of a search, instead of the newest requests
    this.workers = new Table("worker-table", "Workers with state, load and cache contents", [
      { title: "Worker", row: true, of: (row, key) => key },
      { title: "State", of: (row, key, cell) => { cell.className = row.state === "healthy" ? "good" : "bad"; return row.ramp < 1 ? `${row.state}, traffic share ${row.ramp}` : row.state; } },
      { title: "Action", of: (row, key, cell) => this.drainButton(row, key, cell) },
      { title: "Role", of: (row) => row.role },
      { title: "In flight", number: true, of: (row) => count(row.in_flight) },
      { title: "Queued prefill", number: true, of: (row) => (row.queued ? `${seconds(row.queued_prefill_s)} (${row.queued})` : "0") },
      { title: "From elsewhere", number: true, of: (row) => (row.foreign ? `${seconds(row.foreign.wait_s)} (${count(row.foreign.waiting)} wait, ${count(row.foreign.running)} run, ${seconds(row.foreign.age_s)} ago)` : "0") },
      { title: "Busy with prefill", of: (row, key, cell) => this.meter(cell, row.busy, `${key} is busy with prefill for ${share(row.busy, 1)} of the time`) },
      { title: "Active tokens", number: true, of: (row) => count(row.active_tokens) },
      { title: "GPU tokens", number: true, of: tierColumn(state, "gpu") },
      { title: "L1 tokens", number: true, of: tierColumn(state, "l1") },
      { title: "L2 tokens", number: true, of: tierColumn(state, "l2") },
      { title: "Tokens from other workers", number: true, of: (row) => count(row.fetched_tokens) },
      { title: "Sent blocks (history)", number: true, of: (row) => `${count(row.history)} of ${count(row.history_capacity)}` },
      { title: "Models", wide: true, of: (row) => row.models.join(", ") },
      { title: "Trouble", wide: true, of: (row) => row.trouble ?? "" },
    ]);
    this.requests = new Table("request-table", "Finished requests, newest first", [
      { title: "Request", row: true, of: (row) => this.openButton(row) },
      { title: "Time", of: (row) => words.clock(row.time) },
      { title: "Worker", wide: true, of: words.workersOf },
      { title: "Status", number: true, of: (row) => String(row.status || "–") },
      { title: "Reason", of: (row) => row.reason ?? "–" },
      { title: "Decided by", of: (row) => row.member || "–" },
      { title: "Tokens", number: true, of: (row) => count(row.tokens) },
      { title: "Predicted", number: true, of: (row) => count(row.matched) },
      { title: "Moved", number: true, of: (row) => count(row.moved) },
      { title: "Reported", number: true, of: (row) => count(row.cached) },
      { title: "First byte", number: true, of: (row) => seconds(row.ttfb_s) },
      { title: "Duration", number: true, of: (row) => seconds(row.duration_s) },
      { title: "Model", wide: true, of: (row) => row.model },
    ]);
    this.clients = new Table("client-table", "Clients by the name of their key", [
      { title: "Key", row: true, of: (row, key) => (key === "-" ? "no named key" : key) },
      { title: "Waiting now", number: true, of: (row) => count(row.waiting) },
      { title: "Mean wait", number: true, of: (row) => (row.started ? seconds(row.waited_s / row.started) : "–") },
      { title: "Refused by the queue", number: true, of: (row) => count(row.shed) },
      { title: "Admitted", number: true, of: (row, key) => (key === "-" ? "–" : count(row.requests)) },
      { title: "Charged tokens", number: true, of: (row) => count(row.tokens) },
      { title: "Refused by limits", number: true, of: (row) => count(row.limited) },
    ]);
    this.prefixes = new Table("prefix-table", "Prefixes that most requests share", [
      { title: "Prefix (hash)", row: true, of: (row) => row.prefix },
      { title: "Tokens", number: true, of: (row) => `${row.exact ? "" : "about "}${count(row.tokens)}` },
      { title: "Requests", number: true, of: (row) => count(row.requests) },
      { title: "Where it lies", wide: true, of: (row) => holders(row) },
      { title: "Model", wide: true, of: (row) => row.model },
    ]);
    this.accuracy = new Table("accuracy-table", "Predictions by worker and slowest tier", [
      { title: "Worker", row: true, of: (row) => row.worker },
      { title: "Strategy", of: (row) => row.strategy },
      { title: "Slowest tier", of: (row) => row.slowest_tier },
      { title: "Exact", number: true, of: (row) => count(row.exact) },
      { title: "Too many", number: true, of: (row) => count(row.over) },
      { title: "Too few", number: true, of: (row) => count(row.under) },
      { title: "Predicted tokens", number: true, of: (row) => count(row.predicted_tokens) },
      { title: "Reported tokens", number: true, of: (row) => count(row.reported_tokens) },
      { title: "Mean error", number: true, of: (row) => `${count(row.absolute_error_tokens / Math.max(1, row.exact + row.over + row.under))} tokens` },
    ]);
    this.streams = new Table("stream-table", "Event streams of the workers", [
      { title: "Worker", row: true, of: (row) => row.worker },
      { title: "Rank", number: true, of: (row) => String(row.rank) },
      { title: "Map", of: (row, key, cell) => { cell.className = row.map === "whole" ? "good" : "bad"; return row.why ? `${row.map}: ${row.why}` : row.map; } },
      { title: "Last batch", of: (row) => words.clock(row.last_batch) },
      { title: "Batches", number: true, of: (row) => count(row.batches) },
      { title: "Gaps", number: true, of: (row) => count(row.gaps) },
      { title: "Replays", number: true, of: (row) => count(row.replays) },
      { title: "Restarts", number: true, of: (row) => count(row.restarts) },
      { title: "Lost", number: true, of: (row) => count(row.losses) },
      { title: "Orphan blocks", number: true, of: (row) => count(row.orphans) },
    ]);
    this.members = new Table("member-table", "Processes of all gateways that share", [
      { title: "Member", row: true, of: (row) => `${row.name ?? row.member}/${row.process ?? "?"}${row.is_self ? " (this one)" : ""}` },
      { title: "State", of: (row, key, cell) => { cell.className = row.state === "alive" ? "good" : "bad"; return row.problem ? `${row.state}: ${row.problem}` : row.state; } },
      { title: "Lag", number: true, of: (row) => (row.lag_ms === null ? "–" : seconds(row.lag_ms / 1000)) },
      { title: "Silent for", number: true, of: (row) => seconds(row.silent_s) },
      { title: "Gaps", number: true, of: (row) => count(row.gaps) },
      { title: "Missed batches", number: true, of: (row) => count(row.missed_batches) },
      { title: "Release", of: (row) => row.release ?? "–" },
    ]);
    this.tokenizers = new Table("token-table", "Tokenizers by model", [
      { title: "Model", row: true, of: (row, key) => key },
      { title: "Tokens from", of: (row) => String(row.told_by ?? "–") },
      { title: "Through", wide: true, of: (row) => String(row.through ?? "–") },
      { title: "Why", wide: true, of: (row) => String(row.why ?? "") },
    ]);
    this.discovery = new Table("discovery-table", "Discovery of workers", [
      { title: "Discovery source", row: true, of: (row, key) => key },
      { title: "Errors", number: true, of: (row) => count(row.errors) },
      { title: "Workers kept although no longer named", number: true, of: (row) => count(row.kept) },
      { title: "Suspect lists", number: true, of: (row) => count(row.shrinks) },
    ]);
    this.whatIf = new Table("what-if-table", "Requests per worker", [
      { title: "Worker", row: true, of: (row, key) => key },
      { title: "Requests that it got", number: true, of: (row) => count(row[0]) },
      { title: "Requests that it would have got", number: true, of: (row) => count(row[1]) },
    ]);
    this.whatIfRows = new Table("what-if-rows", "Requests that would have gone elsewhere", [
      { title: "Request", row: true, of: (row) => row.request_id },
      { title: "Went to", wide: true, of: (row) => row.actual },
      { title: "Would have gone to", wide: true, of: (row) => row.would },
      { title: "Tokens held there", number: true, of: (row) => `${count(row.would_matched)} instead of ${count(row.actual_matched)}` },
      { title: "Cost", number: true, of: (row) => `${seconds(row.would_cost_s)} instead of ${seconds(row.actual_cost_s)}` },
    ]);
  }

  meter(cell, value, label) {
    let meter = cell.firstChild;
    if (!meter) cell.append((meter = make("meter", { min: 0, max: 1 })));
    if (meter.value !== Math.min(1, value)) {
      meter.value = Math.min(1, value);
      meter.setAttribute("aria-label", label);
    }
    return undefined;
  }

  drainButton(row, key, cell) {
    const draining = row.state === "draining";
    const text = draining ? "Undrain" : "Drain";
    let button = cell.firstChild;
    if (!button) {
      button = make("button", { type: "button" });
      button.addEventListener("click", () => this.actions.drain(key, button.dataset.draining === "yes"));
      cell.append(button);
    }
    setText(button, text);
    button.dataset.draining = draining ? "yes" : "no";
    button.setAttribute("aria-label", `${text} worker ${key}`);
    return undefined;
  }

  openButton(row) {
    const button = make("button", { type: "button", "aria-label": `Why request ${row.id} went to ${row.worker}` }, row.id);
    button.addEventListener("click", () => this.actions.open(row.id, button));
    return button;
  }

  // Draws the sections that have changed; `range` is in seconds, null for everything.
  draw(range) {
    const { state } = this;
    const { changed, sections, tables } = state;
    const has = (...names) => names.some((name) => changed.has(name));
    if (has("bucket", "range")) this.drawSummary(range);
    if (has("workers", "streams")) this.drawWorkers(changed.has("streams"));
    if (has("requests", "found", "range")) this.drawRequests(range);
    if (has("clients")) {
      const rows = Object.entries(sections.clients ?? {}).sort(([a], [b]) => (a < b ? -1 : 1));
      this.clients.draw(rows);
      setText(
        byId("client-note"),
        rows.length
          ? "Since the start of the gateway. Tokens are charged to keys with a limit on tokens only."
          : "No named keys (server.client_keys) and no queue (admission), or no request since the start.",
      );
    }
    if (has("prefixes", "strategy")) {
      const rows = sections.prefixes ?? [];
      this.prefixes.draw(rows.map((row) => [row.prefix, row]));
      setText(byId("prefix-note"), prefixNote(sections, rows));
    }
    if (has("accuracy")) {
      const rows = (sections.accuracy ?? []).filter((row) => row.exact + row.over + row.under && row.strategy !== "roundrobin" && row.strategy !== "session");
      rows.sort((a, b) => b.absolute_error_tokens - a.absolute_error_tokens);
      this.accuracy.draw(rows.map((row) => [`${row.strategy} ${row.worker} ${row.slowest_tier}`, row]));
      setText(byId("accuracy-note"), accuracyNote(sections, rows));
    }
    if (has("streams", "workers")) {
      this.streams.draw(sorted(tables.streams));
      setText(
        byId("stream-note"),
        tables.streams.size
          ? "The lag of a stream is not known exactly: the page shows when its last batch was read. A worker without new blocks sends none."
          : "No event streams: the strategy in force does not read the workers' caches.",
      );
    }
    if (has("members")) {
      const rows = sections.members ?? [];
      this.members.draw(rows.map((row) => [row.member, row]));
      setText(byId("member-note"), rows.length ? "Every five seconds. Lag is the way of a member's own messages through Redis." : "This gateway shares with no other one (sharing.url).");
    }
    if (has("tokenizers", "discovery", "notes", "processes", "recording", "map")) this.drawNotes();
    if (has("strategies")) {
      byId("strategy").replaceChildren(...sections.strategies.map((name) => make("option", { value: name }, name)));
    }
    changed.clear();
  }

  drawSummary(range) {
    const figures = this.state.figures(range);
    const tiers = figures.gpu + figures.l1 + figures.l2;
    const rows = [
      ["Requests", count(figures.requests), `${figures.rate.toFixed(1)} per second now, ${count(figures.failed)} without a good answer`],
      ["First token", `${seconds(figures.quantile(0.5))}`, `of streamed answers; 95%: ${seconds(figures.quantile(0.95))}, 99%: ${seconds(figures.quantile(0.99))}`],
      ["Predicted hit rate", share(figures.predicted_tokens, figures.prompt_tokens), tiers ? `GPU ${share(figures.gpu, figures.prompt_tokens)}, L1 ${share(figures.l1, figures.prompt_tokens)}, L2 ${share(figures.l2, figures.prompt_tokens)}, by history ${share(figures.history, figures.prompt_tokens)}` : "tiers are not known: by what was sent"],
      ["Reported hit rate", share(figures.reported_cached_tokens, figures.reported_prompt_tokens), `${count(figures.reported)} answers reported cached tokens`],
      ["Tokens saved", count(figures.saved_tokens), "not computed again"],
      ["Prefill saved", seconds(figures.saved_s), "estimated by the cost model"],
    ];
    const list = byId("summary");
    if (list.childElementCount !== rows.length) {
      list.replaceChildren(...rows.map(([name]) => make("div", {}, make("dt", {}, name), make("dd", {}, make("span"), make("small")))));
    }
    rows.forEach(([, value, detail], number) => {
      const [main, small] = list.children[number].lastChild.children;
      setText(main, value);
      setText(small, detail);
    });
  }

  drawWorkers(all) {
    const { tables } = this.state;
    if (all) for (const known of this.workers.rows.values()) known.row = undefined; // tiers come from the streams
    this.workers.draw(sorted(tables.workers));
    const partial = [...tables.streams.values()].filter((stream) => stream.map !== "whole");
    setText(
      byId("worker-note"),
      tables.streams.size
        ? partial.length
          ? `The map is not whole for ${partial.map((stream) => stream.worker).join(", ")}: what these workers hold is not fully known.`
          : "Tiers as the workers' events tell them."
        : "What each tier holds is not known: the strategy in force reads no cache events. The history counts what was sent.",
    );
  }

  drawRequests(range) {
    const { requests, sections } = this.state;
    let rows = this.found;
    if (rows === null) {
      const since = range === null ? 0 : (sections.time ?? 0) - range;
      rows = requests.filter((row) => row.time >= since).slice(-100).reverse();
    }
    this.requests.draw(rows.map((row) => [`${row.time} ${row.id}`, row]));
    setText(
      byId("request-note"),
      rows.length ? "At high load not every request is listed; the figures above count all. A search looks through all that the gateway keeps." : "No requests yet.",
    );
  }

  drawNotes() {
    const { sections } = this.state;
    this.tokenizers.draw(Object.entries(sections.tokenizers ?? {}));
    const { errors = {}, kept = {}, shrinks = {} } = sections.discovery ?? {};
    this.discovery.draw(
      Object.keys(errors).map((name) => [name, { errors: errors[name], kept: kept[name] ?? 0, shrinks: shrinks[name] ?? 0 }]),
    );
    const { all = 1, missing = 0 } = sections.processes ?? {};
    const notes = [...(sections.notes ?? [])];
    if (all > 1) notes.push(`${all} gateway processes are shown as one.`);
    if (missing) notes.push(`${missing} of ${all} gateway processes did not answer: their requests are missing here.`);
    if (sections.strategy === "roundrobin" || sections.strategy === "session") {
      notes.push(`No predictions under ${sections.strategy}: the gateway does not read prompts.`);
    }
    if (!Object.keys(sections.tokenizers ?? {}).length) notes.push("No token ids are read: lengths in tokens are estimates from bytes.");
    const { recorded = 0, skipped = 0 } = sections.recording ?? {};
    notes.push(`${count(recorded)} decisions are recorded with their inputs, while a page is open and for a minute after${skipped ? `; ${count(skipped)} were not, because more came in a second than are recorded` : ""}.`);
    if (sections.map) notes.push(`The cache map has ${count(sections.map.blocks)} different blocks, held ${count(sections.map.held_blocks)} times${sections.map.dropped_blocks ? `; ${count(sections.map.dropped_blocks)} found no room` : ""}.`);
    notes.push("How long a worker's own queue is, and what it caches for requests that bypass the gateway, is not known without its events.");
    const list = byId("notes");
    while (list.childElementCount > notes.length) list.lastChild.remove();
    notes.forEach((note, number) => {
      if (!list.children[number]) list.append(make("li"));
      setText(list.children[number], note);
    });
  }

  drawDecision(entry) {
    const place = byId("decision");
    place.hidden = false;
    const children = [make("h3", { id: "decision-title" }, `Request ${entry.request_id}`)];
    for (const sentence of words.sentences(entry)) children.push(make("p", {}, sentence));
    const again = this.state.whatIf?.decisions.find((row) => row.request_id === entry.request_id);
    if (again) {
      const strategy = this.state.whatIf.strategy;
      children.push(
        make("p", {}, again.would === again.actual
          ? `${strategy} would have chosen ${again.would}, too.`
          : `${strategy} would have chosen ${again.would}: ${count(again.would_matched)} tokens held there, cost ${seconds(again.would_cost_s)}.`),
      );
    }
    if (entry.ranking) {
      const titles = ["Worker", "Held tokens", ...Object.keys(words.TERMS), "Cost"];
      const head = make("tr", {}, ...titles.map((title, number) => make("th", { scope: "col", class: number ? "number" : "" }, title)));
      const shown = entry.ranking.slice(0, 12);
      const rows = shown.map((candidate) =>
        make("tr", {},
          make("th", { scope: "row" }, candidate.worker),
          make("td", { class: "number" }, candidate.counted_tokens < candidate.matched_tokens
            ? `${count(candidate.counted_tokens)} of ${count(candidate.matched_tokens)}` : count(candidate.matched_tokens)),
          ...Object.keys(words.TERMS).map((name) => make("td", { class: "number" }, seconds(candidate.terms_s[name]))),
          make("td", { class: "number" }, seconds(candidate.score_s)),
        ));
      const table = make("table", {}, make("caption", { class: "visually-hidden" }, "Arithmetic of each worker"), make("thead", {}, head), make("tbody", {}, ...rows));
      const region = make("div", { class: "scroll", tabIndex: 0, role: "group", "aria-label": "Arithmetic of each worker" }, table);
      children.push(region);
      if (entry.ranking.length > shown.length) children.push(make("p", { class: "quiet" }, `${entry.ranking.length - shown.length} more workers cost more.`));
      children.push(make("p", { class: "quiet" }, `cost = max(wait, load) + ${Object.keys(words.TERMS).slice(2).join(" + ")}. ` + Object.entries(words.TERMS).map(([name, text]) => `${name}: ${text}`).join("; ") + "."));
    }
    const close = make("button", { type: "button" }, "Close");
    close.addEventListener("click", () => {
      place.hidden = true;
      this.opened?.focus();
    });
    children.push(close);
    place.replaceChildren(...children);
    place.focus();
  }

  drawWhatIf() {
    const answer = this.state.whatIf;
    const { sums } = answer;
    setText(
      byId("what-if-result"),
      answer.made_again
        ? `${answer.strategy} would have sent ${count(answer.same)} of ${count(answer.made_again)} requests to the same worker. ` +
            `Held tokens at the chosen workers: ${count(sums.would_matched)} instead of ${count(sums.actual_matched)}; prefill: ${seconds(sums.would_prefill_s)} instead of ${seconds(sums.actual_prefill_s)}.`
        : `None of the last ${count(answer.requests)} requests can be decided again by ${answer.strategy}.`,
    );
    this.whatIf.draw(Object.entries(answer.workers).sort(([a], [b]) => (a < b ? -1 : 1)));
    const elsewhere = answer.decisions.filter((row) => row.would !== row.actual).slice(0, 50);
    this.whatIfRows.draw(elsewhere.map((row) => [row.request_id, row]));
    const notes = Object.entries(answer.reasons).map(([why, times]) => `${count(times)} not decided again: ${why}`);
    if (answer.without_decision) notes.push(`${count(answer.without_decision)} had no decision: they were refused before.`);
    if (answer.made_again) {
      notes.push("Each decision is made on the loads and caches as they were. Had the other strategy been in force, they would have been different.");
      notes.push("Tokens and costs are in the arithmetic of the strategy that decided.");
    }
    byId("what-if-notes").replaceChildren(...notes.map((note) => make("li", {}, note)));
  }
}

const sorted = (table) => [...table].sort(([a], [b]) => (a < b ? -1 : a > b ? 1 : 0));

function holders(row) {
  const rows = Object.entries(row.holders);
  if (!rows.length) return "on no worker now";
  return rows
    .map(([worker, { gpu, l1, l2 }]) => {
      const slower = [l1 ? `L1 ${count(l1)}` : "", l2 ? `L2 ${count(l2)}` : ""].filter(Boolean).join(", ");
      return `${worker}: ${count(gpu)}${slower ? ` (+ ${slower})` : ""}`;
    })
    .join("; ");
}

function prefixNote(sections, rows) {
  if (sections.strategy === "roundrobin" || sections.strategy === "session") {
    return `Not known: ${sections.strategy} does not read prompts.`;
  }
  return rows.length ? "Counted since the page was opened." : "No prefix was shared by two requests since the page was opened.";
}

function accuracyNote(sections, rows) {
  if (sections.strategy === "roundrobin" || sections.strategy === "session") return `No predictions under ${sections.strategy}.`;
  return rows.length ? "Since the gateway started; most wrong first." : "No worker has reported cached tokens yet (vLLM: --enable-prompt-tokens-details).";
}
