// Numbers as people read them. An absent one is a dash.

import type { Value } from "./types";

const DASH = "–";
const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

export function count(value: Value | undefined): string {
  return value == null ? DASH : whole.format(value);
}

export function compact(value: Value | undefined): string {
  if (value == null) return DASH;
  const size = Math.abs(value);
  if (size >= 1e9) return `${digits(value / 1e9)}G`;
  if (size >= 1e6) return `${digits(value / 1e6)}M`;
  if (size >= 1e4) return `${digits(value / 1e3)}k`;
  return size >= 100 || Number.isInteger(value) ? whole.format(value) : digits(value);
}

/** Three digits that matter. */
export function digits(value: number): string {
  const size = Math.abs(value);
  if (size === 0) return "0";
  return value.toFixed(size >= 100 ? 0 : size >= 10 ? 1 : 2).replace(/\.0+$/, "");
}

export function duration(seconds: Value | undefined): string {
  if (seconds == null) return DASH;
  if (seconds >= 86400) return `${digits(seconds / 86400)} d`;
  if (seconds >= 3600) return `${digits(seconds / 3600)} h`;
  if (seconds >= 120) return `${digits(seconds / 60)} min`;
  if (seconds >= 1) return `${digits(seconds)} s`;
  return `${digits(seconds * 1e3)} ms`;
}

export function percent(share: Value | undefined): string {
  if (share == null) return DASH;
  const value = share * 100;
  const size = Math.abs(value);
  const places = size >= 100 ? 0 : size > 99.5 || size < 0.1 ? 2 : 1;
  return `${value.toFixed(places).replace(/(\.\d*?)0+$/, "$1").replace(/\.$/, "")} %`;
}

const FEW = 100; // of fewer, one more or less is over a percent

/** A part of a whole that is counted: of few, the counts themselves. */
export function share(part: number, whole: number): string {
  if (!whole) return DASH;
  return whole < FEW ? `${count(part)} of ${count(whole)}` : percent(part / whole);
}

export function money(value: Value | undefined): string {
  if (value == null) return DASH;
  if (value === 0) return "0";
  if (value < 0.01) return value.toPrecision(2);
  return value.toLocaleString("en", { minimumFractionDigits: 2, maximumFractionDigits: 2 });
}

export function score(value: number): string {
  return value.toFixed(3);
}

/** Of something that lasts: no more digits than a person would say. */
export function age(seconds: number): string {
  return ago(seconds).replace(" ago", "");
}

export function clock(at_s: number): string {
  return new Date(at_s * 1e3).toLocaleTimeString("en-GB");
}

export function ago(seconds: number): string {
  if (seconds < 60) return `${Math.max(0, Math.round(seconds))} s ago`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min ago`;
  if (seconds < 172800) return `${Math.round(seconds / 3600)} h ago`;
  return `${Math.round(seconds / 86400)} d ago`;
}

export function words(name: string): string {
  return name.replaceAll("_", " ");
}
