import { Card, type Column, Pill, Table } from "./basics";
import { compact, count, duration, money, words } from "../format";
import type { Step, StepCount } from "../types";

/** The attempts at a pipeline's steps, in the order in which they began, over the time of the whole. */
export function Steps({ steps, total_s }: { steps: Step[]; total_s: number | null }) {
  const whole_s = Math.max(total_s ?? 0, ...steps.map((one) => one.to_s), 1e-6);
  return (
    <ol class="waterfall steps" aria-label="Steps">
      {steps.map((one, at) => (
        <li key={at}>
          <span class="two">
            <code>{one.name}</code>
            <small>
              {one.request ? <a href={`#/requests/${one.request}`}>{one.model}</a> : words(one.kind)}
              {one.number > 1 && `, attempt ${one.number}`}
              {one.outcome !== "ok" && `, ${words(one.reason || one.outcome)}`}
              {one.input_tokens + one.output_tokens > 0 && `, ${count(one.input_tokens)} + ${count(one.output_tokens)} tokens`}
              {one.cost > 0 && `, ${money(one.cost)}`}
            </small>
          </span>
          <span class="lane">
            <i
              class={one.outcome === "ok" ? (one.kind === "model" ? "decode" : "work") : "wait"}
              style={{ left: `${(one.from_s / whole_s) * 100}%`, width: `${Math.max(0.3, ((one.to_s - one.from_s) / whole_s) * 100)}%` }}
            />
          </span>
          <b>{duration(one.to_s - one.from_s)}</b>
        </li>
      ))}
    </ol>
  );
}

const COLUMNS: Column<StepCount>[] = [
  { name: "Pipeline", show: (one) => one.pipeline },
  { name: "Step", show: (one) => <span class="two"><code>{one.step}</code><small>{one.model || words(one.kind)}</small></span> },
  { name: "Ok", isNumber: true, show: (one) => count(one.ok) },
  {
    name: "Not ok", isNumber: true,
    show: (one) => Object.entries(one.others).map(([outcome, times]) => <Pill key={outcome} state={outcome}>{count(times)} {words(outcome)}</Pill>),
  },
  { name: "Time", isNumber: true, hint: "of an attempt that was ok, on average", show: (one) => duration(one.mean_s) },
  { name: "Tokens", isNumber: true, show: (one) => compact(one.tokens) },
  { name: "Cost", isNumber: true, show: (one) => (one.cost ? money(one.cost) : "–") },
];

/** What was counted of each step of each pipeline that was asked. */
export function PipelineSteps({ steps }: { steps: StepCount[] }) {
  return (
    <Card title="Steps of pipelines" aside="since this server began">
      <Table label="Steps of pipelines" columns={COLUMNS} rows={steps} id={(one) => `${one.pipeline} ${one.step}`} />
    </Card>
  );
}
