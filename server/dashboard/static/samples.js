// Keeps what the server said in the last minutes, and makes rates and percentiles of the differences.
// Pure: knows neither the page nor how the samples came.

const KEPT_SECONDS = 330;

/** The last samples of `dashboard/data/live`, the newest last. */
export class Samples {
  constructor() {
    this.list = [];
    this.numSteps = 0; // of the engine, when it last said
  }

  get newest() {
    return this.list[this.list.length - 1] ?? null;
  }

  /**
   * Takes a sample, of which only what changes into numbers is kept. Forgets all before it where the server or its
   * engine was restarted, and the oldest ones.
   */
  add({ time, uptime, stats, latencies }) {
    const last = this.newest;
    const sample = { time, uptime, stats, latencies };
    if (last !== null && time <= last.time && uptime >= last.uptime) return;
    if (last !== null && (uptime < last.uptime || (stats && stats.num_steps < this.numSteps))) this.list = [];
    this.numSteps = stats ? stats.num_steps : this.numSteps;
    this.list.push(sample);
    while (this.list[0].time < sample.time - KEPT_SECONDS) this.list.shift();
  }

  /** The newest sample that is at least `seconds` older than the newest of all, or else the oldest. */
  before(seconds) {
    const until = this.newest.time - seconds;
    let found = this.list[0];
    for (const sample of this.list) {
      if (sample.time > until) break;
      found = sample;
    }
    return found;
  }

  /** How much a counter of the engine grew in the last `seconds`, each second; null before there are two samples. */
  rate(name, seconds) {
    return this.#slope((stats) => stats[name], seconds);
  }

  /** The share of the last `seconds` that the engine spent on each of `parts` of its steps; null likewise. */
  sharesOfTime(parts, seconds) {
    const shares = parts.map((part) => this.#slope((stats) => stats.step_seconds[part] ?? 0, seconds));
    const sum = shares.reduce((total, share) => total + share, 0);
    return shares.map((share) => (share === null ? null : share / Math.max(1, sum))); // what came late is of before
  }

  /** How much it grew in all of the last `seconds`; null likewise. */
  growth(name, seconds) {
    const [from, to] = [this.list.length ? this.before(seconds) : null, this.newest];
    if (from === null || !from.stats || !to.stats) return null;
    return to.stats[name] - from.stats[name];
  }

  #slope(value, seconds) {
    const [from, to] = [this.list.length ? this.before(seconds) : null, this.newest];
    if (from === null || from === to || !from.stats || !to.stats) return null;
    return (value(to.stats) - value(from.stats)) / (to.time - from.time);
  }

  /** Percentiles of a latency in the last `seconds`; null where there were no values. */
  percentiles(name, fractions, seconds) {
    if (!this.list.length) return fractions.map(() => null);
    const { bounds, counts } = this.newest.latencies[name];
    const from = this.before(seconds).latencies[name].counts;
    return percentilesOf(bounds, counts.map((value, i) => value - from[i]), fractions);
  }
}

/**
 * Percentiles of a histogram, by straight lines within buckets, as Prometheus estimates them. What is beyond the last
 * bound counts as that bound.
 */
export function percentilesOf(bounds, counts, fractions) {
  const total = counts.reduce((sum, value) => sum + value, 0);
  if (total <= 0) return fractions.map(() => null);
  return fractions.map((fraction) => {
    let below = 0;
    for (let i = 0; i < bounds.length; i += 1) {
      if (counts[i] > 0 && below + counts[i] >= fraction * total) {
        const lower = i === 0 ? 0 : bounds[i - 1];
        return lower + ((bounds[i] - lower) * (fraction * total - below)) / counts[i];
      }
      below += counts[i];
    }
    return bounds[bounds.length - 1];
  });
}
