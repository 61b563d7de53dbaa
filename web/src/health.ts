// How models and replicas do, in sentences, by the objectives and the states that the page shows.

import { count, digits, duration, percent, share, words } from "./format";
import type { ModelSlo, Objective, Replica } from "./types";

export const OBJECTIVES: Record<string, string> = {
  ttft: "Time to first token", tpot: "Time per output token", latency: "End-to-end latency", errors: "Errors", availability: "Availability",
};

export interface Finding {
  text: string;
  tone: "bad" | "warn";
  page: string; // that says more
}

export function isHealthy(replica: Replica): boolean {
  return replica.state === "ready" && replica.breaker === "closed";
}

/** A controller keeps it without traffic. */
export function isResting(replica: Replica): boolean {
  return replica.is_draining && ["parked", "waking", "standby", "parking", "stopping"].includes(replica.state);
}

/** The state of a replica in a word or two. One that gets no work because of its circuit breaker is not healthy. */
export function stateOf(replica: Replica): string {
  if (isHealthy(replica)) return "healthy";
  return words(replica.state === "ready" ? `breaker ${replica.breaker}` : replica.state);
}

/** A value of an objective as people say it. The bad share of availability is told; people name the good one. */
export function valueOf(objective: Objective, value: number | null): string {
  if (objective.unit === "s") return duration(value);
  return percent(value != null && objective.objective === "availability" ? 1 - value : value);
}

export function observed(one: Objective): string {
  return one.objective === "errors" && one.events ? share(one.bad, one.events) : valueOf(one, one.observed);
}

export function target(one: Objective): string {
  const quantile = one.quantile == null ? "" : ` at p${digits(one.quantile * 100)}`;
  return `${valueOf(one, one.target)}${quantile}`;
}

/** Objectives that are missed or nearly, and replicas that are neither healthy nor without traffic on purpose. */
export function findings(slos: ModelSlo[], replicas: Replica[]): Finding[] {
  const missed = slos.flatMap((slo) =>
    slo.objectives
      .filter((one) => one.state === "critical" || one.state === "warning")
      .map((one): Finding => ({
        text: `${slo.model}: ${OBJECTIVES[one.objective] ?? one.objective} is ${one.state}: ${observed(one)}, target ${target(one)}`,
        tone: one.state === "critical" ? "bad" : "warn",
        page: "alerts",
      })),
  );
  const unwell = replicas.filter((one) => !isHealthy(one) && !isResting(one)).map((one): Finding => ({
    text: one.state === "ready" ? `${one.name}: circuit ${stateOf(one)}` : `${one.name} is ${stateOf(one)}`,
    tone: ["starting", "restarting", "draining", "degraded"].includes(one.state) ? "warn" : "bad",
    page: "replicas",
  }));
  return [...missed, ...unwell];
}

/** What there is to say where nothing was found. */
export function summary(slos: ModelSlo[], replicas: Replica[]): string {
  const objectives = slos.flatMap((slo) => slo.objectives).filter((one) => one.target != null);
  const met = objectives.filter((one) => one.state === "ok").length;
  const open = objectives.length - met;
  const said = !objectives.length
    ? ""
    : open === 0
      ? `${met === 1 ? "The objective is" : `All ${count(met)} objectives are`} met. `
      : `${count(met)} of ${count(objectives.length)} objectives are met; there were too few requests to tell of the others. `;
  if (!replicas.length) return `${said}There are no replicas.`;
  const resting = replicas.filter(isResting).length;
  const used = replicas.length - resting;
  const aside = resting ? ` ${count(resting)} ${resting === 1 ? "is" : "are"} kept without traffic.` : "";
  return `${said}${used === 1 ? "The replica is healthy." : `${count(used)} of ${count(used)} replicas are healthy.`}${aside}`;
}
