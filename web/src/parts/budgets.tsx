import { Bar, Card, Pill } from "./basics";
import { digits, duration, percent } from "../format";
import { OBJECTIVES, observed, target } from "../health";
import type { ModelSlo, Objective } from "../types";

/** How each objective stands, and how much of its error budget is used. */
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
  const used = one.budget_left == null ? null : 1 - one.budget_left;
  const burn = one.burn["1h"] ?? one.burn["5m"];
  return (
    <div class="objective">
      <div>
        <span>{OBJECTIVES[one.objective] ?? one.objective}</span>
        <Pill state={one.state} />
      </div>
      <b>{observed(one)}</b>
      <small>target {target(one)}, last hour</small>
      <Bar share={used} label={`${one.objective}: error budget used`} />
      <small>
        {used == null ? "nothing measured yet" : used < 10 ? `${percent(used)} of the error budget used` : `${digits(used)} times the error budget used`}
        {burn ? `, burn rate ${digits(burn)}×` : ""}
      </small>
    </div>
  );
}
