import { useState } from "preact/hooks";
import { clock, count, digits, duration, percent, words } from "../format";
import type { FleetAction, FleetDecision } from "../types";

const NEAR = 0.02; // of the width: marks that are nearer are one

/** A decision, and how many replicas the pool wanted before it. */
export interface Step {
  decision: FleetDecision;
  before: number | null;
}

/** Of one pool's decisions, the newest first. */
export function steps(decisions: FleetDecision[]): Step[] {
  return decisions.map((decision, at) => ({ decision, before: decisions[at + 1]?.wanted ?? null }));
}

function direction({ decision, before }: Step): "up" | "down" | "same" {
  if (before == null || before === decision.wanted) return "same";
  return decision.wanted > before ? "up" : "down";
}

function change({ decision, before }: Step): string {
  return before == null || before === decision.wanted ? `${count(decision.wanted)} wanted` : `${count(before)} → ${count(decision.wanted)} wanted`;
}

const SIGNS = { up: "▲", down: "▼", same: "●" };

/** Decisions over a plot, at their times; the reason and the numbers of one are shown at it, and a click opens it below. */
export function Marks({ steps, range, onPick }: { steps: Step[]; range: [number, number]; onPick: (at: number) => void }) {
  const [shown, show] = useState<number | null>(null);
  const [from, to] = range;
  const groups: { x: number; steps: Step[] }[] = [];
  for (const step of steps.filter(({ decision }) => decision.at >= from && decision.at <= to).reverse()) {
    const x = (step.decision.at - from) / (to - from);
    const last = groups.at(-1);
    if (last && x - last.x < NEAR) last.steps.push(step);
    else groups.push({ x, steps: [step] });
  }
  return (
    <div class="marks">
      {groups.map(({ x, steps }) => {
        const step = steps.findLast((one) => direction(one) !== "same") ?? steps.at(-1)!;
        const { at } = step.decision;
        return (
          <span key={steps[0]!.decision.at} style={{ left: `${100 * x}%` }}>
            <button
              class={`mark-of ${direction(step)}`}
              aria-label={`Decision at ${clock(at)}: ${change(step)}. ${step.decision.reason ?? ""}`}
              onMouseEnter={() => show(at)} onMouseLeave={() => show(null)} onFocus={() => show(at)} onBlur={() => show(null)}
              onClick={() => onPick(at)}
            >
              {SIGNS[direction(step)]}
            </button>
            {shown === at && (
              <div class={`tip ${x > 0.6 ? "left" : ""}`} role="tooltip">
                <b>{clock(at)} · {change(step)}</b>
                {step.decision.reason && <p>{step.decision.reason}</p>}
                <Numbers decision={step.decision} />
                {steps.length > 1 && <small>and {steps.length - 1} more at about this time</small>}
              </div>
            )}
          </span>
        );
      })}
    </div>
  );
}

const FIRST = 12;

export function DecisionList({ steps, opened, onOpen }: { steps: Step[]; opened: number | null; onOpen: (at: number | null) => void }) {
  const [isAll, setAll] = useState(false);
  const listed = isAll ? steps : steps.slice(0, FIRST);
  const far = steps.find(({ decision }) => decision.at === opened);
  const rows = far && !listed.includes(far) ? [...listed, far] : listed;
  return (
    <>
      {rows.map((step) => {
        const { decision } = step;
        const isOpen = decision.at === opened;
        return (
          <article key={decision.at} class={`decision ${isOpen ? "open" : ""}`} ref={isOpen ? (at) => at?.scrollIntoView({ block: "nearest" }) : undefined}>
            <button class="plain head" aria-expanded={isOpen} onClick={() => onOpen(isOpen ? null : decision.at)}>
              <time>{clock(decision.at)}</time>
              <b class={`size ${direction(step)}`}>{SIGNS[direction(step)]} {change(step)}</b>
              <span class="why">{decision.reason || "no change of the size"}</span>
              <small>{(decision.actions ?? []).map(({ kind }) => kind).join(", ") || "no action"}</small>
            </button>
            {isOpen && (
              <div class="scores">
                {decision.bound && <p class="hint">Bound by {decision.bound}: the demand alone asks for another number.</p>}
                <Numbers decision={decision} />
                {(decision.actions ?? []).map((action, at) => <p key={at}>{said(action)}</p>)}
              </div>
            )}
          </article>
        );
      })}
      {!isAll && steps.length > FIRST && <button class="link" onClick={() => setAll(true)}>All {count(steps.length)}</button>}
    </>
  );
}

function said(action: FleetAction): string {
  const kind = action.capacity_type && action.capacity_type !== "on_demand" ? ` on ${action.capacity_type} capacity` : "";
  const where = action.zone ? ` in zone ${action.zone}` : "";
  return `${action.kind} ${action.replica || "a new replica"}${action.to && action.kind !== "park" && action.to !== "active" ? ` to ${action.to}` : ""}${where}${kind}: ${action.reason}`;
}

const perSecond = (value: number) => `${digits(value)}/s`;
const NAMES: Record<string, [name: string, format: (value: number) => string]> = {
  rate: ["demand", perSecond], planned_rate: ["planned for", perSecond], max_rate: ["per replica within the SLO", perSecond],
  needed: ["replicas needed", digits], held: ["held by cooldown and forecast", digits], backlog: ["requests in queues", digits],
  slowdown: ["slower than profiled, times", digits], predicted_ttft_s: ["TTFT predicted", duration],
  predicted_tpot_s: ["TPOT predicted", duration], predicted_kv_usage: ["KV use predicted", percent],
};

function Numbers({ decision }: { decision: FleetDecision }) {
  const entries = Object.entries(decision.numbers ?? {}).map(([name, value]): [string, string] => {
    const known = NAMES[name];
    if (known) return [known[0], known[1](value)];
    const forecast = /^forecast_p(\d+)_(\d+)s$/.exec(name);
    return forecast ? [`expected in ${forecast[2]} s, p${forecast[1]}`, perSecond(value)] : [words(name), digits(value)];
  });
  if (!entries.length) return null;
  return (
    <dl class="facts">
      {entries.map(([name, value]) => <div key={name}><dt>{name}</dt><dd>{value}</dd></div>)}
    </dl>
  );
}
