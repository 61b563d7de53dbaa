import { useState } from "preact/hooks";
import { Bar, Card, Empty } from "../parts/basics";
import { DecisionCard } from "../parts/decision";
import { count, percent, share } from "../format";
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
  const estimated = decisions.filter((one) => one.matched_tokens != null);
  const expected = estimated.reduce((sum, one) => sum + one.matched_tokens!, 0);
  const routed = estimated.reduce((sum, one) => sum + one.prompt_tokens, 0);
  const [cached, prompt] = [store.total("cached_tokens"), store.total("input_tokens")];
  return (
    <>
      <div class="halves">
        <Card title="Requests by replica" aside={`the last ${count(decisions.length)}`}>
          <div class="queues">
            <dl>
              {[...picked].sort((a, b) => b[1] - a[1]).slice(0, 8).map(([replica, times]) => (
                <div key={replica}>
                  <dt>{replica || "none eligible"}</dt>
                  <dd>
                    <Bar share={times / decisions.length} label={`share of ${replica}`} isNeutral />
                    <span class="n">{share(times, decisions.length)}</span>
                  </dd>
                </div>
              ))}
            </dl>
          </div>
        </Card>
        <Card title="Prompt tokens from cache" aside="last 15 min, as replicas reported">
          <div class="figure large">
            <b>{prompt ? percent(cached / prompt) : "–"}</b>
            <span class="unit">
              {count(cached)} of {count(prompt)} prompt tokens
            </span>
            <small>
              {routed
                ? `The router's estimate for the last ${count(estimated.length)}: ${percent(expected / routed)}, in whole blocks of ${count(estimated[0]!.block_tokens)} tokens.`
                : "The router made no estimate: prompts are short, there is one replica to choose from, or the policy needs none."}
            </small>
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
