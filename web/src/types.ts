// What the server sends: penstock/console/views.py and docs/console.md, and for SLOs and alerts docs/slo.md.

export interface Session {
  kind: "gateway" | "replica";
  version: string;
  needs_key: boolean;
  needs_tenant_key: boolean;
  closed?: string;
  dialects?: string[]; // of a gateway: what its replicas may speak
}

export interface Replica {
  id: string;
  name: string;
  model: string;
  kind: string;
  state: string;
  breaker: string;
  share: number;
  running: number;
  waiting: number;
  in_flight: number;
  max_sequences: number | null;
  kv_used: number;
  kv_capacity: number | null;
  tokens_per_s: number | null;
  hit_rate: number | null;
  step_s: number | null;
  heard_s_ago: number | null;
  restarts: number;
  version: string;
  source: "file" | "store" | "dns" | "";
  is_draining: boolean;
  role: "both" | "prefill" | "decode";
  parallelism: string; // TP2 PP2; empty: it has one rank, or does not say
  ranks: Rank[];
  tensors: TensorVersion[];
}

/** A version of a model that takes tensors, with its batcher: TensorNews in penstock/api/replica_report.py. */
export type TensorVersion = [
  model: string,
  version: number,
  instances: number,
  device: string,
  max_batch_size: number,
  waiting: number,
  running: number,
  rows: number,
  batches: number,
  refused: number,
  max_waiting: number,
  max_delay_s: number,
  queue_s: number | null,
];

export interface Rank {
  rank: number;
  node: string;
  device: string; // the UUID of its GPU
  memory_bytes: number;
  mbu: number | null;
  communication: number | null; // share of its steps' time
  is_estimated: boolean;
}

export interface Queue {
  model: string;
  waiting: Record<string, number>;
  limits: Record<string, number>;
}

export interface Tenant {
  id: string;
  name: string;
  priority: string;
  is_active: boolean;
  requests: number;
  refused: number;
  input_tokens: number;
  cached_tokens: number;
  output_tokens: number;
  device_s: number;
  cost: number;
  today_tokens: number;
  today_cost: number;
  month_tokens: number;
  month_cost: number;
  month_device_s: number;
  budget: Record<string, number>;
}

export interface Model {
  name: string;
  aliases: string[];
  pools: string[];
  has_price: boolean;
  ttft_s: number | null;
  tpot_s: number | null;
}

export interface State {
  models: Model[];
  replicas: Replica[];
  queues: Queue[];
  tenants: Tenant[];
  steps: StepCount[]; // of pipelines
}

export interface StepCount {
  pipeline: string;
  step: string;
  kind: string;
  model: string;
  ok: number;
  others: Record<string, number>;
  mean_s: number | null;
  tokens: number;
  cost: number;
}

export interface Step {
  name: string;
  kind: string;
  outcome: string;
  reason: string;
  model: string;
  request: string;
  from_s: number;
  to_s: number;
  number: number;
  input_tokens: number;
  output_tokens: number;
  cost: number;
}

export interface Request {
  id: string;
  at_s: number;
  surface: string;
  ending: "ok" | "refused" | "failed" | "client_gone";
  reason: string;
  tenant: string;
  model: string;
  replica: string;
  input_tokens: number;
  cached_tokens: number;
  output_tokens: number;
  queue_s: number | null;
  ttft_s: number | null;
  total_s: number | null;
  num_tries: number;
  rule: string;
  cost: number | null;
  device_s: number | null;
  parts: Record<string, number>;
  num_steps: number; // of a pipeline
  step_of: string; // the request of a pipeline that it is a step of
}

export interface Candidate {
  replica: string;
  total: number;
  scores: number[];
  matched_tokens: number | null;
  host_tokens: number;
  running: number;
  queued_tokens: number;
}

export interface Decision {
  id: string;
  at_s: number;
  model: string;
  tenant: string;
  prompt_tokens: number;
  strategy: string;
  picked: string;
  matched_tokens: number | null;
  host_tokens: number;
  block_tokens: number;
  is_approximate: boolean;
  scorers: string[];
  candidates: Candidate[];
  num_candidates: number;
  dropped: Record<string, string>;
  source: string;
  why: string;
  pulled_tokens: number;
  gain_s: number | null;
}

export type Value = number | null;

export interface Hello {
  kind: "gateway" | "replica";
  version: string;
  began_s: number;
  at_s: number;
  columns: string[];
  times: number[];
  series: Record<string, Value[][]>;
  state: State;
  requests: Request[];
  decisions: Decision[];
}

export interface Tick {
  at_s: number;
  state: State;
  rows: Record<string, Value[]>;
  requests: Request[];
  decisions: Decision[];
}

export interface Objective {
  objective: string;
  unit: "s" | "ratio";
  target: number | null;
  quantile: number | null;
  observed: number | null;
  used: number | null;
  state: string;
  events: number;
  bad: number;
  compliance: number | null;
  goal: number | null;
  budget_left: number | null;
  burn: Record<string, number | null>;
}

export interface ModelSlo {
  model: string;
  window_s: number;
  covered_s: number;
  state: string;
  objectives: Objective[];
}

export interface Alert {
  id: string;
  alert: string;
  severity: string;
  state: string;
  model: string;
  replica: string;
  summary: string;
  value: number | null;
  since: number;
  resolved_at: number | null;
  runbook: string;
}

// The fleet: penstock/tenancy/fleet.py and fleet/policy/decision.py. Fields with their default may be missing.

export interface Pool {
  pool: string;
  at: number;
  wanted: number;
  min: number;
  max: number;
  states: Record<string, number>;
  eta_s: number | null;
  reason: string;
  bound: string;
  arrivals_per_s: number;
  forecast_p50: number;
  forecast_p90: number;
  cost_per_hour: number;
  durations: Record<string, number>;
  oldest_start_s: number;
  start_failures: number;
  failure: string;
  reversals: number;
}

export interface FleetReplica {
  id: string;
  pool: string;
  state: string;
  since: number;
  target: string;
  url: string;
  zone: string;
  capacity_type: string;
  price_per_hour: number;
  created_at: number;
  deadline: number | null;
  failure: string;
}

export interface FleetStatus {
  at: number;
  pools: Pool[];
  replicas: FleetReplica[];
}

export interface FleetSample {
  at: number;
  pool: string;
  states?: Record<string, number>;
  arrivals_per_s?: number;
  forecast_p50?: number;
  forecast_p90?: number;
  wanted?: number;
  cost?: number;
  seconds?: Record<string, number>; // replica-seconds by state; missing: nothing was metered yet
}

export interface FleetAction {
  kind: string;
  reason: string;
  replica?: string;
  to?: string;
  zone?: string;
  capacity_type?: string;
}

export interface FleetDecision {
  pool: string;
  at: number;
  wanted: number;
  standby?: number;
  parked?: number;
  actions?: FleetAction[];
  reason?: string;
  bound?: string;
  numbers?: Record<string, number>;
}

export interface PoolCost {
  pool: string;
  cost: number;
  cost_per_1000_tokens: number | null;
  busy: number | null;
}

// Rollouts: penstock/rollout/desk.py and rollout/policy/state.py.

export interface RolloutGate {
  gate: string;
  verdict: "better" | "equal" | "worse" | "undecided";
  margin: number;
  tenant: string;
  estimate: number | null; // of a ratio new over old, else of a difference
  low: number | null;
  high: number | null;
  old_count: number;
  new_count: number;
  is_ratio: boolean;
  method: string;
}

export interface RolloutStep {
  title: string;
  shadow: number | null;
  share: number | null;
  min_s: number;
  max_s: number;
}

export interface Rollout {
  id: string;
  model: string;
  from: string;
  to: string;
  phase: string;
  is_over: boolean;
  by: string;
  started_at: number;
  ended_at: number | null;
  ordered: string | null;
  reason: string;
  step?: number; // these are missing if another version of penstock wrote it
  steps?: RolloutStep[];
  since?: number;
  hold_until?: number | null;
  hands_off?: boolean;
  gates?: RolloutGate[];
}

export interface RolloutEntry {
  at: number;
  what: string;
  reason: string;
  phase: string;
  step: number;
  by: string;
  gates: RolloutGate[];
}
