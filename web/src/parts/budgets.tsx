import { Bar, Card, Pill } from "./basics";
import { digits, duration, percent } from "../format";
import type { ModelSlo, Objective } from "../types";

const NAMES: Record<string, string> = {
  ttft: "First token", tpot: "Per output token", latency: "Whole answer", errors: "Errors", availability: "Availability",
};

/** How each objective stands, and what is left of its error budget. */
export function Budgets({ slos }: { slos: ModelSlo[] | null }) {
  if (!slos?.length) return null;
  return (
    <>
      {slos.map((slo) => (
        <Card
          key={slo.model} title={`Objectives of ${slo.model}`}
          aside={
            <>
              {duration(slo.window_s)} window, {duration(slo.covered_s)} seen <Pill state={slo.state} />
            </>
          }
        >
          <div class="objectives">
            {slo.objectives.filter((one) => one.target != null).map((one) => <Goal key={one.objective} one={one} />)}
          </div>
        </Card>
      ))}
    </>
  );
}

function Goal({ one }: { one: Objective }) {
  // Of availability the bad share is told; people name the good one.
  const turned = (share: number | null) => percent(share == null ? null : 1 - share);
  const show = one.unit === "s" ? duration : one.objective === "availability" ? turned : percent;
  const left = one.budget_left;
  const spent = left == null ? null : 1 - left;
  const burn = one.burn["1h"] ?? one.burn["5m"];
  return (
    <div class="objective">
      <div>
        <span>{NAMES[one.objective] ?? one.objective}</span>
        <Pill state={one.state} />
      </div>
      <b>{show(one.observed)}</b>
      <small>
        target {show(one.target)}
        {one.quantile != null && ` at p${digits(one.quantile * 100).replace(/\.0+$/, "")}`}, last hour
      </small>
      <Bar share={spent} label={`${one.objective}: error budget used`} />
      <small>
        {left == null ? "nothing measured yet" : left >= 0 ? `${percent(left)} of the budget left` : `${percent(-left)} beyond the budget`}
        {burn ? `, burning ${digits(burn)}×` : ""}
      </small>
    </div>
  );
}
