// Numbers as text. An unknown value is a dash.

export const UNKNOWN = "–";

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const one = new Intl.NumberFormat("en", { minimumFractionDigits: 1, maximumFractionDigits: 1 });

export const count = value => (value == null ? UNKNOWN : whole.format(value));

/** A rate or mean, with one decimal below 100. */
export function rate(value) {
  if (value == null) return UNKNOWN;
  return value >= 100 || value === 0 ? whole.format(value) : one.format(value);
}

export function seconds(value) {
  if (value == null) return UNKNOWN;
  if (value < 0.01) return `${one.format(value * 1000)} ms`;
  if (value < 1) return `${whole.format(value * 1000)} ms`;
  return value < 100 ? `${one.format(value)} s` : `${whole.format(value)} s`;
}

export const percent = value => (value == null ? UNKNOWN : `${whole.format(value * 100)} %`);

export function bytes(value) {
  if (value == null) return UNKNOWN;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  for (; value >= 1024 && unit < units.length - 1; unit += 1) value /= 1024;
  return `${unit === 0 || value >= 100 ? whole.format(value) : one.format(value)} ${units[unit]}`;
}

/** A duration in its two largest units. */
export function duration(total) {
  const parts = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];
  const first = parts.findIndex(([size]) => total >= size);
  if (first < 0) return "0 s";
  const words = [];
  for (const [size, unit] of parts.slice(first, first + 2)) {
    const number = Math.floor(total / size);
    total -= number * size;
    if (number) words.push(`${number} ${unit}`);
  }
  return words.join(" ");
}

export function clock(epoch) {
  return new Date(epoch * 1000).toLocaleTimeString("en-GB");
}
