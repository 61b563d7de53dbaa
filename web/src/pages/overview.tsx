import { Bar, Card, Empty, Figure } from "../parts/basics";
import { Chart } from "../parts/chart";
import { Queues, Replicas } from "../parts/fleet";
import { Status } from "../parts/alerts";
import { Budgets } from "../parts/budgets";
import { compact, count, digits, duration, percent, share } from "../format";
import { useStore } from "../store";
import type { Value } from "../types";

const OUTCOMES = ["ok", "refused", "failed", "gone"];

export function Overview() {
  const store = useStore();
  const failed = store.total("failed");
  const all = OUTCOMES.reduce((sum, name) => sum + store.total(name), 0);
  const requests = OUTCOMES.reduce((sum, name) => sum + (store.rate(name, 15) ?? 0), 0);
  const kv = store.last("kv");
  const perSecond = (value: Value | undefined) => (value == null ? "–" : `${compact(value)}/s`);
  return (
    <>
      <Status />
      <section class="figures" aria-label="Now">
        <Figure name="Output" value={compact(store.rate("output_tokens", 5))} unit="tokens/s" />
        <Figure name="Requests" value={digits(requests)} unit="per second" />
        <Figure name="TTFT p95" value={duration(store.last("ttft_p95"))} unit={goal(store.target("ttft"))} tone={tone(store.last("ttft_p95"), store.target("ttft"))} />
        <Figure name="TPOT p95" value={duration(store.last("tpot_p95"))} unit={goal(store.target("tpot"))} tone={tone(store.last("tpot_p95"), store.target("tpot"))} />
        <Figure name="In flight" value={count(store.last("running"))} unit={`${count(store.last("waiting"))} waiting`} />
        <Figure name="KV cache in use" value={percent(kv)} unit={<Bar share={kv} label="KV cache in use" />} />
        <Figure name="Failed" value={share(failed, all)} unit="last 15 min" tone={failed ? "bad" : ""} />
      </section>
      <div class="charts">
        <Chart
          title="Throughput" hint="tokens/s, over 5 s" rate_s={5} format={(value) => compact(value)}
          lines={[
            { label: "output", column: "output_tokens", color: "series-1", isArea: true },
            { label: "prompt", column: "input_tokens", color: "series-2", isOff: true },
          ]}
        />
        <Chart
          title="Requests" hint="per second, over 5 s" rate_s={5} format={perSecond}
          lines={[
            { label: "ok", column: "ok", color: "series-1", isArea: true },
            { label: "refused", column: "refused", color: "series-3" },
            { label: "failed", column: "failed", color: "bad" },
          ]}
        />
        <Chart
          title="Time to first token" hint="streams, over 15 s" format={duration} target={store.target("ttft")} targetLabel="SLO"
          lines={[
            { label: "p50", column: "ttft_p50", color: "series-1" },
            { label: "p95", column: "ttft_p95", color: "series-3" },
          ]}
        />
        <Chart
          title="Time per output token" hint="streams, over 15 s" format={duration} target={store.target("tpot")} targetLabel="SLO"
          lines={[
            { label: "p50", column: "tpot_p50", color: "series-1" },
            { label: "p95", column: "tpot_p95", color: "series-3" },
          ]}
        />
      </div>
      <Budgets slos={store.slos} />
      <div class="halves">
        <Card title="Replicas" aside={<a href="#/replicas">All</a>}>
          {store.state.replicas.length ? <Replicas rows={store.state.replicas} isShort /> : <Empty title="No replicas" />}
        </Card>
        <Card title="Queues" aside="requests waiting, by priority class">
          <Queues rows={store.state.queues} />
        </Card>
      </div>
    </>
  );
}

function goal(target: Value): string {
  return target == null ? "no target" : `target ${duration(target)}`;
}

function tone(value: Value, target: Value): string {
  if (value == null || target == null) return "";
  return value > target ? "bad" : value > 0.8 * target ? "warn" : "";
}
