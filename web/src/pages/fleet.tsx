import { useMemo, useState } from "preact/hooks";
import { Card, type Column, Empty, Figure, Pill, Problem, Table } from "../parts/basics";
import { FleetChart, type Series } from "../parts/fleet_chart";
import { DecisionList, Marks, steps } from "../parts/fleet_decisions";
import { age, count, digits, duration, money, percent, words } from "../format";
import { type Fleet as Told, useFleet } from "../fleet";
import { useStore } from "../store";
import type { FleetReplica, FleetSample, Pool, Value } from "../types";

const STALE_S = 30; // a pool that no controller has looked at for so long has none
const GAP_S = 150; // samples further apart have nothing between them
const GROUPS: [label: string, color: string, states: string[]][] = [
  ["active", "series-1", ["active"]], ["standby", "series-2", ["standby"]], ["parked", "muted", ["parked"]],
  ["starting", "series-3", ["starting", "waking"]], ["leaving", "bad", ["draining", "parking", "stopping"]],
];
const HOURS = [0.25, 1, 6, 24];
const span = (hours: number) => (hours < 1 ? `${60 * hours} min` : `${hours} h`);
const requests = (value: Value | undefined) => (value == null ? "–" : `${digits(value)}/s`);

export function Fleet() {
  const store = useStore();
  const [hours, setHours] = useState(1);
  const [name, setName] = useState("");
  const fleet = useFleet(hours);
  const pools = fleet.status?.pools ?? [];
  const pool = pools.find((one) => one.pool === name) ?? pools[0];
  if (store.session?.kind !== "gateway") return <NoFleet>A fleet is seen at its gateway; this is one replica.</NoFleet>;
  if (fleet.problem && !fleet.status) return <Problem title="The fleet cannot be read.">{fleet.problem}</Problem>;
  if (!fleet.status) return <p class="hint">Reading the store …</p>;
  if (!pool) return <NoFleet>Nobody manages a pool in this gateway's store.</NoFleet>;
  return (
    <>
      <div class="filters">
        {pools.length > 1 && (
          <select aria-label="Pool" value={pool.pool} onChange={(event) => setName(event.currentTarget.value)}>
            {pools.map((one) => <option key={one.pool}>{one.pool}</option>)}
          </select>
        )}
        <div class="choice" role="group" aria-label="Time shown">
          {HOURS.map((each) => (
            <button key={each} aria-pressed={hours === each} onClick={() => setHours(each)}>{span(each)}</button>
          ))}
        </div>
      </div>
      {fleet.problem && <Problem title="The fleet cannot be read; what is shown is old.">{fleet.problem}</Problem>}
      <Troubles pool={pool} now={fleet.status.at} />
      <PoolView key={pool.pool} pool={pool} fleet={fleet} hours={hours} now={fleet.status.at} />
    </>
  );
}

function NoFleet({ children }: { children: string }) {
  return (
    <Card title="Fleet">
      <Empty title="No fleet">{children}</Empty>
      <p class="start hint">
        <code>penstock serve smollm2 --replicas 1..4</code> starts one of a single pool;{" "}
        <code>penstock fleet --config fleet.yaml</code> one with pools of its own, over the store that this gateway has.
      </p>
    </Card>
  );
}

function Troubles({ pool, now }: { pool: Pool; now: number }) {
  if (now - pool.at > STALE_S) {
    return <Problem title="No controller.">Nobody has looked at this pool for {age(now - pool.at)}; its replicas go on as they are. penstock fleet --config FILE starts a controller.</Problem>;
  }
  return (
    <>
      {pool.start_failures > 0 && <Problem title={`${count(pool.start_failures)} ${pool.start_failures === 1 ? "start has" : "starts in a row have"} failed.`}>{pool.failure}</Problem>}
      {["max", "spend", "quota"].includes(pool.bound) && <Problem title={`Bound by ${pool.bound}.`}>The demand needs more replicas than this pool may have.</Problem>}
    </>
  );
}

function PoolView({ pool, fleet, hours, now }: { pool: Pool; fleet: Told; hours: number; now: number }) {
  const [opened, open] = useState<number | null>(null);
  const range: [number, number] = [now - hours * 3600, now];
  const history = useMemo(() => columns(pool, fleet.samples), [pool, fleet.samples]);
  const decided = useMemo(() => steps(fleet.decisions.filter((one) => one.pool === pool.pool)), [pool.pool, fleet.decisions]);
  const cost = fleet.costs.find((one) => one.pool === pool.pool);
  const active = pool.states["active"] ?? 0;
  return (
    <>
      <section class="figures" aria-label="Now">
        <Figure name="Active replicas" value={count(active)} unit={`${count(Object.values(pool.states).reduce((sum, one) => sum + one, 0))} in all states`} tone={active < pool.wanted ? "warn" : ""} />
        <Figure name="Wanted" value={count(pool.wanted)} unit={`${count(pool.min)} to ${count(pool.max)}${pool.bound ? `, bound by ${pool.bound}` : ""}`} />
        <Figure name="Demand" value={digits(pool.arrivals_per_s)} unit="requests/s" />
        <Figure name="Expected" value={pool.forecast_p90 ? digits(pool.forecast_p50) : "–"} unit={pool.forecast_p90 ? `requests/s; p90 ${digits(pool.forecast_p90)}` : "no forecast yet"} />
        <Figure name="Cost" value={money(pool.cost_per_hour)} unit={`per hour${cost ? `; ${money(cost.cost)} in 24 h` : ""}`} />
        <Figure name="Per 1,000 tokens" value={money(cost?.cost_per_1000_tokens)} unit={cost?.busy == null ? "idle time included" : `idle included; busy ${percent(cost.busy)}`} />
        <Figure name="Start, p95" value={duration(pool.durations["start_s"])} unit={pool.eta_s == null ? "none is on its way" : `next in ${duration(pool.eta_s)}`} />
      </section>
      {pool.reason && <p class="hint reason">Why {count(pool.wanted)}: {pool.reason}</p>}
      <FleetChart title="Replicas by state" hint="and decisions" times={history.times} range={range} format={(value) => (value == null ? "–" : digits(value))} series={history.replicas}>
        <Marks steps={decided} range={range} onPick={open} />
      </FleetChart>
      <div class="charts pair">
        <FleetChart title="Demand and forecast" hint="requests/s; the band is p50 to p90" times={history.times} range={range} format={requests} series={history.demand} />
        <FleetChart title="Cost per hour" hint="every state that has a price" times={history.times} range={range} format={money} series={history.cost} />
      </div>
      <Card title="Replicas" aside="as the controller has them">
        <Replicas rows={fleet.status!.replicas.filter((one) => one.pool === pool.pool)} now={now} />
      </Card>
      <Card title="Decisions" aside={`the newest first, of the last ${span(hours)}`}>
        {decided.length ? <DecisionList steps={decided} opened={opened} onOpen={open} /> : <Empty title="No decisions">The size has not changed in this time.</Empty>}
      </Card>
    </>
  );
}

/** What the charts draw: a point a minute, and the moment's; nothing where nobody took samples. */
function columns(pool: Pool, samples: FleetSample[]) {
  const past = samples.filter((one) => one.pool === pool.pool && one.at < pool.at);
  const points: (FleetSample | null)[] = [];
  const times: number[] = [];
  for (const one of [...past, pool]) {
    const last = times.at(-1);
    if (last != null && one.at - last > GAP_S) {
      times.push(last + 1);
      points.push(null);
    }
    times.push(one.at);
    points.push(one);
  }
  const values = (of: (one: FleetSample) => Value): Value[] => points.map((one) => one && of(one));
  const cost = points.map((one, at): Value => {
    if (at === points.length - 1) return pool.cost_per_hour;
    if (!one?.seconds) return null;
    const before = at > 0 ? times[at]! - times[at - 1]! : 60;
    return (3600 * (one.cost ?? 0)) / (before > GAP_S || !points[at - 1] ? 60 : Math.max(before, 1));
  });
  const replicas: Series[] = GROUPS.map(([label, color, states]) => ({
    label, color, kind: "stacked", isStepped: true,
    values: values((one) => states.reduce((sum, state) => sum + (one.states?.[state] ?? 0), 0)),
  }));
  replicas.push({ label: "wanted", color: "ink", kind: "dashed", isStepped: true, values: values((one) => one.wanted ?? 0) });
  const demand: Series[] = [
    { label: "expected, p90", color: "series-2", kind: "upper", values: values((one) => one.forecast_p90 || null) },
    { label: "expected, p50", color: "series-2", kind: "dashed", values: values((one) => (one.forecast_p90 ? (one.forecast_p50 ?? 0) : null)) },
    { label: "demand", color: "series-1", kind: "line", values: values((one) => one.arrivals_per_s ?? 0) },
  ];
  return { times, replicas, demand, cost: [{ label: "cost", color: "series-3", kind: "area", values: cost } satisfies Series] };
}

const TONES: Record<string, string> = { active: "healthy", starting: "starting", waking: "starting", draining: "draining", stopping: "draining" };

function Replicas({ rows, now }: { rows: FleetReplica[]; now: number }) {
  const columns: Column<FleetReplica>[] = [
    { name: "Replica", show: (one) => <span class="two"><b>{one.id}</b><small>{one.url.replace(/^https?:\/\//, "") || "no address yet"}</small></span> },
    {
      name: "State",
      show: (one) => (
        <span class="two">
          <Pill state={one.failure ? "failed" : (TONES[one.state] ?? one.state)}>{one.state}</Pill>
          <small title={one.failure}>{one.failure || (one.target === one.state ? `for ${age(now - one.since)}` : `to ${one.target}, for ${age(now - one.since)}`)}</small>
        </span>
      ),
    },
    { name: "Zone", show: (one) => one.zone || "–" },
    { name: "Capacity", show: (one) => <span class="two"><span>{words(one.capacity_type)}</span>{one.deadline != null && <small>gone in {age(one.deadline - now)}</small>}</span> },
    { name: "Age", isNumber: true, show: (one) => age(now - one.created_at) },
    { name: "Price per hour", isNumber: true, show: (one) => money(one.price_per_hour) },
  ];
  return rows.length ? <Table label="Fleet replicas" columns={columns} rows={rows} id={(one) => one.id} /> : <Empty title="No replicas">This pool has none: requests are held until one is there.</Empty>;
}
