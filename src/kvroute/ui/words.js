// Numbers and decisions in words.

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 0) return `-${seconds(-value)}`;
  if (value === 0) return "0";
  if (value < 0.01) return `${(value * 1000).toFixed(2)} ms`;
  if (value < 1) return `${(value * 1000).toFixed(0)} ms`;
  return `${value.toFixed(value < 100 ? 2 : 0)} s`;
}

export const count = (value) => (value === null || value === undefined ? "–" : Math.round(value).toLocaleString("en"));

export const share = (part, whole) => (whole ? `${((100 * part) / whole).toFixed(1)}%` : "–");

export const clock = (time) => (time ? new Date(time * 1000).toLocaleTimeString("en-GB") : "–");

export const REASONS = {
  round_robin: "it was this worker's turn",
  session: "the session stays on this worker",
  session_spill: "the session's worker had too many requests in flight, and this one is next on the ring",
  no_session_key: "the request has no session key, so the least cost decided",
  prefix_hit: "no other worker was sent more of this prompt, and its cost is the least",
  prefix_spill: "another worker was sent more of this prompt, but waiting for it would cost more",
  prefix_miss: "no worker was sent the beginning of this prompt, so the least cost decided",
  kv_hit: "no other worker's caches hold more of this prompt, and its cost is the least",
  kv_spill: "another worker's caches hold more of this prompt, but using them would cost more",
  kv_miss: "no worker's caches hold the beginning of this prompt, so the least cost decided",
  kv_approximate: "the token ids were not known in time, so the history of sent prompts decided",
  no_prompt: "no prompt that a KV cache could hold was found, so the least cost decided",
  not_cached: "no cached block can be a hit for this request, so the least cost decided",
  response_owner: "only this worker has the stored response that the request continues",
  only_worker: "it was the only routable worker of the model",
  at_limit: "the workers that rank higher have as many requests as they may have",
  handed_over: "another worker computes the prompt, which costs less",
  over_threshold: "another worker computes the prompt, which has more uncached tokens than the threshold",
  no_prefill_worker: "no prefill worker serves, so this worker computes the prompt, too",
  no_decode_worker: "no decode worker serves, so a prefill worker does the whole request",
  decode_side_full: "the decode workers lack KV memory, so a prefill worker does the whole request",
};

export const TERMS = {
  wait: "prefill queued before it",
  load: "loading blocks from slower tiers",
  prefill: "its own missing tokens",
  memory: "waiting for KV memory",
  eviction: "blocks that it would evict",
  marginal: "delay of later requests",
  decode: "running answers",
  ramp: "smaller traffic share",
};

const NOT_BY_COST = new Set(["round_robin", "session", "session_spill", "response_owner", "only_worker"]);

// Sentences about an entry of /admin/decisions.
export function sentences(entry) {
  if (!entry.ranking) {
    return [`The request was refused before a worker was chosen: ${entry.error ?? `status ${entry.status}`}.`];
  }
  const [first, second] = entry.ranking;
  const said = [
    `Request ${entry.request_id} went to ${first.worker}, because ${REASONS[entry.reason] ?? entry.reason} (${entry.reason}).`,
  ];
  if (entry.member) said.push(`${entry.member} decided.`);
  if (entry.parent_worker) said.push(`The session that began this new one was last at ${entry.parent_worker}.`);
  if (first.worker !== entry.worker) {
    said.push(`After ${entry.attempts} attempts it was answered by ${entry.worker}.`);
  }
  said.push(
    `The gateway expected ${first.worker} to hold ${count(first.matched_tokens)} of its ${count(entry.prompt_tokens)} prompt tokens${tiers(first)}.`,
  );
  if (first.counted_tokens < first.matched_tokens) {
    said.push(
      `Only ${count(first.counted_tokens)} of them count, because ${first.worker} found less than was expected of its latest prompts.`,
    );
  }
  if (entry.prefill_worker) said.push(...legs(entry));
  said.push(arithmetic(first));
  if (second) said.push(difference(first, second, entry));
  said.push(outcome(entry, first));
  return said;
}

// The worker that answered a request of the list, and the one that computed its prompt or was to.
export function workersOf({ worker, prefill_worker: other, handover_fallback: why }) {
  if (!other) return worker;
  return why ? `${worker}, without ${other} (${why})` : `${other}, then ${worker}`;
}

// What happened to the parts of a request whose prompt another worker was to compute.
function legs(entry) {
  const { prefill_worker: other, prefill_cached_tokens: cached, handover_fallback: why } = entry;
  const expected = `${other} was to compute the prompt; it was expected to hold ${count(entry.prefill_matched_tokens)} tokens`;
  const reported = cached === null ? "." : `, and reported ${count(cached)}.`;
  const said = [expected + reported];
  if (why) said.push(`Handing over failed (${why}).`);
  if (entry.prefill_s !== null) {
    const then = entry.transfer_s === null ? "" : `; the answer began ${seconds(entry.transfer_s)} later`;
    said.push(`${other} needed ${seconds(entry.prefill_s)}, and ${count(entry.moved_tokens)} tokens were to move to ${entry.worker}${then}.`);
  }
  return said;
}

function tiers(candidate) {
  if (!candidate.tiers) return "";
  const { gpu, l1, l2 } = candidate.tiers;
  const source = candidate.map === "whole" ? "by its cache events" : `by ${candidate.believed_from}; its map is not whole: ${candidate.map}`;
  return ` (GPU ${count(gpu)}, L1 ${count(l1)}, L2 ${count(l2)}; ${source})`;
}

function arithmetic(candidate) {
  const terms = candidate.terms_s;
  const parts = [`max(wait ${seconds(terms.wait)}, load ${seconds(terms.load)})`];
  for (const name of Object.keys(TERMS).slice(2)) {
    if (terms[name]) parts.push(`${name} ${seconds(terms[name])}`);
  }
  return `Cost on ${candidate.worker}: ${parts.join(" + ")} = ${seconds(candidate.score_s)}.`;
}

function difference(first, second, entry) {
  const more = second.score_s - first.score_s;
  if (NOT_BY_COST.has(entry.reason)) {
    const cheapest = entry.ranking.reduce((best, each) => (each.score_s < best.score_s ? each : best));
    return cheapest.worker === first.worker
      ? "Cost did not decide; this worker was also the cheapest."
      : `Cost did not decide: ${cheapest.worker} would have cost ${seconds(first.score_s - cheapest.score_s)} less.`;
  }
  let largest = "prefill";
  for (const name of Object.keys(TERMS)) {
    if (second.terms_s[name] - first.terms_s[name] > second.terms_s[largest] - first.terms_s[largest]) largest = name;
  }
  if (more <= 0.002) {
    return `${second.worker} would have cost about the same (${seconds(Math.abs(more))} difference): such ties go to the worker with fewer active tokens, then less recent prefill, then by a hash of prompt and worker.`;
  }
  return `${second.worker} would have cost ${seconds(more)} more, mostly ${largest}: ${TERMS[largest]} (${seconds(second.terms_s[largest])} against ${seconds(first.terms_s[largest])}); it was expected to hold ${count(second.matched_tokens)} tokens.`;
}

function outcome(entry, first) {
  if (entry.prefill_worker && !entry.handover_fallback) {
    return "No answer says what a decode worker held; its metrics have the sum of the tokens that it got.";
  }
  if (entry.cached_tokens === undefined || entry.cached_tokens === null) {
    return "The worker did not report how many tokens were cached, so the prediction cannot be checked.";
  }
  const error = first.matched_tokens - entry.cached_tokens;
  const reported = `The worker reported ${count(entry.cached_tokens)} cached tokens`;
  if (entry.strategy === "roundrobin" || entry.strategy === "session") {
    return `${reported}; ${entry.strategy} makes no predictions.`;
  }
  return error === 0
    ? `${reported}: exactly as predicted.`
    : `${reported}: ${count(Math.abs(error))} ${error > 0 ? "fewer" : "more"} than predicted.`;
}
