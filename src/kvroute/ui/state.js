// What the gateway has sent: applies the lines of /admin/live, and computes figures over a time range.

const FIRST_S = 0.001;
const GROWTH = 1.25;
const MOST_BUCKETS = 3600;
const MOST_REQUESTS = 200;

const SUMS = [
  "requests", "failed", "prompt_tokens", "predicted_tokens", "gpu", "l1", "l2", "history", "reported",
  "reported_prompt_tokens", "reported_cached_tokens", "reported_predicted_tokens", "saved_tokens", "saved_s",
];

export class State {
  constructor() {
    this.tables = { workers: new Map(), streams: new Map() };
    this.sections = {};
    this.buckets = [];
    this.requests = [];
    this.changed = new Set();
    this.whatIf = null; // the answer of /admin/what-if
    this.skipsBucket = false;
  }

  // A new stream begins with everything. Its first bucket has requests that are counted already.
  reconnected() {
    for (const table of Object.values(this.tables)) table.clear();
    this.skipsBucket = this.buckets.length > 0;
  }

  // Adds one line; its sections are in `changed` afterwards.
  apply(line) {
    for (const [name, value] of Object.entries(line)) {
      this.changed.add(name);
      const table = this.tables[name];
      if (table) {
        for (const [key, row] of Object.entries(value)) {
          if (row === null) table.delete(key);
          else table.set(key, row);
        }
      } else if (name === "bucket" && this.skipsBucket) {
        this.skipsBucket = false;
      } else if (name === "bucket") {
        // The first bucket has the requests that the gateway had kept: their times lie before the page.
        this.buckets.push({ time: this.buckets.length ? line.time : 0, ...value });
        if (this.buckets.length > MOST_BUCKETS) this.buckets.splice(1, 1);
      } else if (name === "requests") {
        const known = new Set(this.requests.map((row) => `${row.time} ${row.id}`));
        this.requests.push(...value.filter((row) => !known.has(`${row.time} ${row.id}`)));
        this.requests.sort((a, b) => a.time - b.time);
        this.requests.splice(0, this.requests.length - MOST_REQUESTS);
      } else {
        this.sections[name] = value;
      }
    }
  }

  // Sums over the last `seconds`; null: over everything.
  figures(seconds) {
    const since = seconds === null ? -1 : (this.sections.time ?? 0) - seconds;
    const sums = Object.fromEntries(SUMS.map((name) => [name, 0]));
    const times = new Map();
    let first = Infinity;
    for (const bucket of this.buckets) {
      if (bucket.time < since || (since >= 0 && bucket.time === 0)) continue;
      first = Math.min(first, bucket.time || Infinity);
      for (const name of SUMS) sums[name] += bucket[name];
      for (const [place, count] of Object.entries(bucket.first_byte)) {
        times.set(Number(place), (times.get(Number(place)) ?? 0) + count);
      }
    }
    const last = this.buckets.slice(-10).filter((bucket) => bucket.time);
    const rate = last.reduce((sum, bucket) => sum + bucket.requests, 0) / Math.max(1, last.length);
    return { ...sums, rate, quantile: (share) => quantile(times, share) };
  }
}

function quantile(times, share) {
  const places = [...times.keys()].sort((a, b) => a - b);
  const all = places.reduce((sum, place) => sum + times.get(place), 0);
  if (!all) return null;
  let seen = 0;
  for (const place of places) {
    seen += times.get(place);
    if (seen >= share * all) return FIRST_S * GROWTH ** place;
  }
  return null;
}
