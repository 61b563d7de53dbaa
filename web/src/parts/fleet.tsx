import { useState } from "preact/hooks";
import { Bar, type Column, Empty, Pill, Table } from "./basics";
import { Ranks } from "./ranks";
import { compact, count, digits, duration, percent } from "../format";
import { isHealthy, isResting, stateOf } from "../health";
import type { Queue, Replica } from "../types";

const NAME: Column<Replica> = {
  name: "Replica",
  show: (one) => (
    <span class="two">
      <b>{one.name}</b>
      <small title={one.id}>{one.id === one.name ? one.kind : one.id.replace(/^https?:\/\//, "")}</small>
    </span>
  ),
};
const MODEL: Column<Replica> = {
  name: "Model",
  show: (one) => {
    const [model, version] = one.model.split("@");
    return (
      <span class="two">
        <span>{model}{version && <small> version {version}</small>}</span>
        <small>{one.role !== "both" && `${one.role}, `}{one.kind} {one.version}</small>
      </span>
    );
  },
};

function ranks(open: (id: string) => void): Column<Replica> {
  return {
    name: "Ranks",
    hint: "how its model is spread over devices",
    show: (one) => (one.parallelism ? <button class="link" onClick={() => open(one.id)}>{one.parallelism}</button> : "–"),
  };
}
const STATE: Column<Replica> = {
  name: "State",
  show: (one) => <Pill state={isHealthy(one) ? "healthy" : one.state === "ready" ? one.breaker : one.state}>{stateOf(one)}</Pill>,
};
const LOAD: Column<Replica> = {
  name: "Load",
  show: (one) => (
    <span class="meter">
      <Bar share={one.max_sequences ? one.running / one.max_sequences : null} label={`${one.name}: sequences`} />
      <span class="n">
        {one.state === "out" ? "–" : count(one.running)}
        {one.max_sequences != null && <small> / {count(one.max_sequences)}</small>}
      </span>
    </span>
  ),
};
const KV: Column<Replica> = {
  name: "KV cache in use",
  hint: "by requests that run; what is cached and not in use counts as free",
  show: (one) => {
    const share = one.kv_capacity ? one.kv_used / one.kv_capacity : null;
    return (
      <span class="meter" title={`${count(one.kv_used)} of ${count(one.kv_capacity)} tokens`}>
        <Bar share={share} label={`${one.name}: KV cache`} />
        <span class="n">{percent(share)}</span>
      </span>
    );
  },
};
const SPEED: Column<Replica> = {
  name: "Tokens/s",
  isNumber: true,
  show: (one) => (one.tokens_per_s == null ? "–" : compact(Math.round(one.tokens_per_s))),
};

const SHORT = [NAME, STATE, LOAD, KV, SPEED];
const LONG: Column<Replica>[] = [
  NAME,
  MODEL,
  { name: "State", show: (one) => <span class="two">{STATE.show(one)}<small>{details(one).join(", ")}</small></span> },
  LOAD,
  { name: "Waiting", isNumber: true, show: (one) => (one.state === "out" ? "–" : count(one.waiting)) },
  KV,
  SPEED,
  { name: "Step", isNumber: true, show: (one) => duration(one.step_s) },
  {
    name: "Cached", isNumber: true, show: (one) => percent(one.hit_rate),
    hint: "prompt tokens that came from its KV cache, as it reported with each answer since this server began",
  },
];

function details(one: Replica): string[] {
  const report = one.heard_s_ago != null ? `last report ${duration(one.heard_s_ago)} ago` : one.kind === "penstock" ? "this server" : "checked by probes";
  return [
    report,
    ...(one.is_draining && one.state !== "draining" && !isResting(one) ? ["drained"] : []),
    ...(one.share < 1 ? [`weight ${digits(one.share)}`] : []),
    ...(one.restarts ? [`${count(one.restarts)} ${one.restarts === 1 ? "restart" : "restarts"}`] : []),
  ];
}

export function Replicas({ rows, isShort, source }: { rows: Replica[]; isShort?: boolean; source?: Column<Replica> }) {
  const [opened, setOpened] = useState("");
  const shown = rows.find((one) => one.id === opened);
  const spread = rows.some((one) => one.parallelism) ? [ranks(setOpened)] : [];
  const columns = isShort ? SHORT : [...LONG.slice(0, 2), ...spread, LONG[2], ...(source ? [source] : []), ...LONG.slice(3)];
  return (
    <>
      <Table label="Replicas" columns={columns} rows={rows} id={(one) => one.id} tone={(one) => (one.state === "out" ? "out" : "")} />
      {shown && <Ranks replica={shown} onClose={() => setOpened("")} />}
    </>
  );
}

const CLASSES: Record<string, string> = { engine: "in the engine" };

export function Queues({ rows }: { rows: Queue[] }) {
  if (!rows.length) return <Empty title="No models" />;
  return (
    <div class="queues">
      {rows.map((queue) => (
        <dl key={queue.model}>
          {rows.length > 1 && <dt class="model">{queue.model}</dt>}
          {Object.entries(queue.waiting).map(([name, waiting]) => (
            <div key={name}>
              <dt>{CLASSES[name] ?? name}</dt>
              <dd>
                <Bar share={waiting / (queue.limits[name] || 1)} label={`${queue.model}, ${name}: waiting requests`} />
                <span class="n">
                  {count(waiting)} <small>/ {count(queue.limits[name])}</small>
                </span>
              </dd>
            </div>
          ))}
        </dl>
      ))}
    </div>
  );
}
