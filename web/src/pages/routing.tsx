import { useState } from "preact/hooks";
import { Bar, Card, Empty } from "../parts/basics";
import { DecisionCard } from "../parts/decision";
import { count, percent } from "../format";
import { useStore } from "../store";
import type { Decision } from "../types";

export function Routing() {
  const store = useStore();
  const [still, hold] = useState<Decision[] | null>(null); // while the pointer is on them: none moves away under a click
  const decisions = store.decisions.filter((one) => !store.model || one.model === store.model);
  if (!decisions.length) {
    return (
      <Card title="Routing">
        {store.session?.kind === "replica" ? (
          <Empty title="One replica, nothing to choose">
            Start with <code>--replicas 2</code> and every choice is shown here, with its scores and its reason.
          </Empty>
        ) : (
          <Empty title="No decisions yet">Each request's choice of a replica is shown here, with its scores and its reason.</Empty>
        )}
      </Card>
    );
  }
  const picked = new Map<string, number>();
  for (const one of decisions) picked.set(one.picked, (picked.get(one.picked) ?? 0) + 1);
  const held = decisions.reduce((sum, one) => sum + one.matched_tokens, 0);
  const prompt = decisions.reduce((sum, one) => sum + one.prompt_tokens, 0);
  return (
    <>
      <div class="halves">
        <Card title="Where requests went" aside={`the last ${count(decisions.length)}`}>
          <div class="queues">
            <dl>
              {[...picked].sort((a, b) => b[1] - a[1]).slice(0, 8).map(([replica, times]) => (
                <div key={replica}>
                  <dt>{replica || "nobody"}</dt>
                  <dd>
                    <Bar share={times / decisions.length} label={`share of ${replica}`} isNeutral />
                    <span class="n">{percent(times / decisions.length)}</span>
                  </dd>
                </div>
              ))}
            </dl>
          </div>
        </Card>
        <Card title="Prompts already there" aside="at the replica that was picked">
          <div class="figure large">
            <b>{prompt ? percent(held / prompt) : "–"}</b>
            <span class="unit">
              {count(held)} of {count(prompt)} prompt tokens were in its cache
            </span>
          </div>
        </Card>
      </div>
      <Card title="Decisions" aside={still ? "held while the pointer is here" : "the newest first"}>
        <div class="decisions" onPointerEnter={() => hold(decisions)} onPointerLeave={() => hold(null)}>
          {(still ?? decisions).slice(0, 60).map((one) => <DecisionCard key={`${one.id}${one.at_s}`} decision={one} />)}
        </div>
      </Card>
    </>
  );
}
