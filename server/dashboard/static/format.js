// Writes numbers for people: short, and of the same width for as long as they are of the same size.

const NONE = "–";

/** 0, 7.3, 48, 1,234, 12.3 k, 4.5 M. */
export function count(value) {
  if (value == null || Number.isNaN(value)) return NONE;
  if (value >= 1e6) return `${(value / 1e6).toFixed(value < 1e7 ? 1 : 0)} M`;
  if (value >= 1e4) return `${(value / 1e3).toFixed(value < 1e5 ? 1 : 0)} k`;
  if (value >= 10 || Number.isInteger(value)) return Math.round(value).toLocaleString("en");
  return value.toFixed(value < 0.1 && value > 0 ? 2 : 1);
}

/** Seconds as µs, ms, s or longer. */
export function duration(seconds) {
  if (seconds == null || Number.isNaN(seconds)) return NONE;
  if (seconds === 0) return "0 ms";
  if (seconds < 0.001) return `${Math.round(seconds * 1e6)} µs`;
  if (seconds < 0.01) return `${(seconds * 1e3).toFixed(1)} ms`;
  if (seconds < 1) return `${Math.round(seconds * 1e3)} ms`;
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 120) return `${Math.round(seconds)} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  if (seconds < 172800) return `${Math.round(seconds / 3600)} h`;
  return `${Math.round(seconds / 86400)} days`;
}

/** A part of one as per cent. */
export function percent(part) {
  if (part == null || Number.isNaN(part)) return NONE;
  return `${(100 * part).toFixed(part > 0 && part < 0.1 ? 1 : 0)} %`;
}

/** Bytes as KiB, MiB, GiB. */
export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${value.toFixed(unit && value < 10 ? 1 : 0)} ${units[unit]}`;
}

/** The time of day of seconds since the epoch. */
export function clock(seconds) {
  return new Date(seconds * 1000).toLocaleTimeString();
}

/** A long id by its beginning and its end. */
export function shortId(id) {
  return id.length <= 18 ? id : `${id.slice(0, 11)}…${id.slice(-5)}`;
}
