import { Bar, type Column, Empty, Pill, Table } from "./basics";
import { compact, count, digits, duration, percent } from "../format";
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
        <span>{model}</span>
        {version && <small>version {version}</small>}
      </span>
    );
  },
};
const STATE: Column<Replica> = { name: "State", show: (one) => <Pill state={one.state} /> };
const LOAD: Column<Replica> = {
  name: "Load",
  show: (one) => (
    <span class="meter">
      <Bar share={one.max_sequences ? one.running / one.max_sequences : null} label={`${one.name}: sequences`} />
      <span class="n">
        {count(one.running)}
        {one.max_sequences != null && <small> / {count(one.max_sequences)}</small>}
      </span>
    </span>
  ),
};
const KV: Column<Replica> = {
  name: "KV cache",
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
  STATE,
  LOAD,
  { name: "Waiting", isNumber: true, show: (one) => count(one.waiting) },
  KV,
  SPEED,
  { name: "Step", isNumber: true, show: (one) => duration(one.step_s) },
  { name: "Prefix hits", isNumber: true, show: (one) => percent(one.hit_rate) },
  {
    name: "Health",
    show: (one) => (
      <span class="two">
        <span>{one.breaker === "closed" ? "breaker closed" : <Pill state={one.breaker}>breaker {one.breaker.replace("_", " ")}</Pill>}</span>
        <small>
          {one.heard_s_ago == null ? (one.kind === "penstock" ? "itself" : "by probes") : `heard ${duration(one.heard_s_ago)} ago`}
          {one.share < 1 && `, share ${digits(one.share)}`}
        </small>
      </span>
    ),
  },
  { name: "Restarts", isNumber: true, show: (one) => count(one.restarts) },
  { name: "Software", show: (one) => `${one.kind} ${one.version}` },
];

export function Replicas({ rows, isShort }: { rows: Replica[]; isShort?: boolean }) {
  return <Table label="Replicas" columns={isShort ? SHORT : LONG} rows={rows} id={(one) => one.id} />;
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
                <Bar share={waiting / (queue.limits[name] || 1)} label={`${queue.model}, ${name}: requests that wait`} />
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
