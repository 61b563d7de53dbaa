// All that the page knows, in one object, and who wants to hear of its changes.

import { useLayoutEffect, useReducer } from "preact/hooks";
import { Refused, adminKey, ask, events, session } from "./api";
import type { Alert, Decision, Hello, ModelSlo, Request, Session, State, Tick, Value } from "./types";

const SECONDS = 900;
const KEPT_REQUESTS = 400;
const KEPT_DECISIONS = 150;
const WATCH_S = 5; // how often SLOs and alerts are asked for
const ALL = "";

export type Phase = "starting" | "login" | "closed" | "live" | "lost";

class Store {
  phase: Phase = "starting";
  problem = ""; // why it is not live, in the server's words
  session: Session | null = null;
  began_s = 0;
  at_s = 0;
  columns: string[] = [];
  times: number[] = [];
  series: Record<string, Value[][]> = {};
  state: State = { models: [], replicas: [], queues: [], tenants: [], steps: [] };
  requests: Request[] = []; // the newest first
  decisions: Decision[] = [];
  slos: ModelSlo[] | null = null; // null: this server has none
  alerts: Alert[] | null = null;
  model = ALL; // what the charts are of
  minutes = 5;

  private listeners = new Set<() => void>();
  private running: AbortController | null = null;
  private isWatching = false;

  subscribe(listener: () => void): () => void {
    this.listeners.add(listener);
    return () => this.listeners.delete(listener);
  }

  changed(): void {
    for (const listener of this.listeners) listener();
  }

  set(values: Partial<Pick<Store, "model" | "minutes">>): void {
    Object.assign(this, values);
    this.changed();
  }

  // -- coming and going

  async start(): Promise<void> {
    this.running?.abort();
    const running = (this.running = new AbortController());
    let wait_s = 1;
    while (!running.signal.aborted) {
      try {
        this.session = await session();
        if (this.session.closed) return this.stop("closed", this.session.closed);
        if (this.session.needs_key && !adminKey.get()) return this.stop("login", "");
        const response = await ask("/console/v1/feed", running.signal);
        wait_s = 1;
        void this.watch(running.signal);
        await this.follow(response);
        throw new Error("the server has ended the stream");
      } catch (error) {
        if (running.signal.aborted) return;
        if (error instanceof Refused && (error.status === 401 || error.status === 403)) {
          const isKeyWrong = this.session?.needs_key ?? false;
          adminKey.set("");
          return this.stop(isKeyWrong ? "login" : "closed", error.message);
        }
        this.stop("lost", error instanceof Refused ? error.message : "The server does not answer.");
        await new Promise((resume) => setTimeout(resume, wait_s * 1e3));
        wait_s = Math.min(2 * wait_s, 10);
      }
    }
  }

  login(key: string): void {
    adminKey.set(key.trim());
    this.phase = "starting";
    this.problem = "";
    this.changed();
    void this.start();
  }

  logout(): void {
    adminKey.set("");
    this.running?.abort();
    this.stop("login", "");
  }

  private stop(phase: Phase, problem: string): void {
    this.phase = phase;
    this.problem = problem;
    this.changed();
  }

  private async follow(response: Response): Promise<void> {
    for await (const { event, data } of events(response)) {
      if (event === "hello") this.begin(JSON.parse(data));
      else if (event === "tick") this.tick(JSON.parse(data));
      this.phase = "live";
      this.problem = "";
      this.changed();
    }
  }

  private begin(hello: Hello): void {
    this.began_s = hello.began_s;
    this.at_s = hello.at_s;
    this.columns = hello.columns;
    this.times = hello.times;
    this.series = hello.series;
    this.state = hello.state;
    this.requests = hello.requests.reverse();
    this.decisions = hello.decisions.reverse();
  }

  private tick(tick: Tick): void {
    this.at_s = tick.at_s;
    this.state = tick.state;
    this.times.push(tick.at_s);
    if (this.times.length > SECONDS) this.times.shift();
    for (const [model, row] of Object.entries(tick.rows)) {
      const columns = (this.series[model] ??= row.map(() => []));
      if (!columns.length) row.forEach(() => columns.push([]));
      row.forEach((value, at) => {
        columns[at]!.push(value);
        if (columns[at]!.length > SECONDS) columns[at]!.shift();
      });
    }
    this.requests = [...tick.requests.reverse(), ...this.requests].slice(0, KEPT_REQUESTS);
    this.decisions = [...tick.decisions.reverse(), ...this.decisions].slice(0, KEPT_DECISIONS);
  }

  /** SLOs and alerts, where the server has them. */
  private async watch(signal: AbortSignal): Promise<void> {
    if (this.isWatching || this.session?.kind !== "gateway") return;
    this.isWatching = true;
    try {
      while (!signal.aborted) {
        const [slos, alerts] = await Promise.all([ask("/admin/v1/slo", signal), ask("/admin/v1/alerts", signal)]);
        this.slos = (await slos.json()).models;
        this.alerts = (await alerts.json()).alerts;
        await new Promise((resume) => setTimeout(resume, WATCH_S * 1e3));
      }
    } catch {
      // This server has none, or is gone: the next connection asks again.
    } finally {
      this.isWatching = false;
    }
  }

  // -- reading

  column(name: string, model = this.model): Value[] {
    const at = this.columns.indexOf(name);
    return this.series[model]?.[at] ?? [];
  }

  last(name: string, model = this.model): Value {
    return this.column(name, model).at(-1) ?? null;
  }

  /** A count over all that is kept: a quarter of an hour. */
  total(name: string, model = this.model): number {
    return this.column(name, model).reduce<number>((sum, value) => sum + (value ?? 0), 0);
  }

  /** A count per second, over the last seconds before each row. */
  rates(name: string, seconds: number, model = this.model): number[] {
    const counts = this.column(name, model);
    const times = this.times.slice(this.times.length - counts.length);
    let sum = 0;
    return counts.map((value, at) => {
      sum += (value ?? 0) - (counts[at - seconds] ?? 0);
      const span_s = times[at]! - (times[Math.max(0, at - seconds)] ?? 0) + (at < seconds ? 1 : 0);
      return sum / Math.max(span_s, 1e-3);
    });
  }

  rate(name: string, seconds: number, model = this.model): Value {
    return this.rates(name, seconds, model).at(-1) ?? null;
  }

  /** A model's targets, from the SLOs that are watched or from its settings. */
  target(objective: "ttft" | "tpot"): Value {
    const pool = this.model || (this.slos?.length === 1 ? this.slos[0]!.model : "");
    const slo = this.slos?.find(({ model }) => model === pool) ?? this.slos?.find(({ model }) => model === pool.split("@")[0]);
    const watched = slo?.objectives.find((one) => one.objective === objective);
    if (watched?.target != null) return watched.target;
    const models = this.state.models;
    const model = models.find((one) => one.name === this.model) ?? (models.length === 1 ? models[0] : undefined);
    return (objective === "ttft" ? model?.ttft_s : model?.tpot_s) ?? null;
  }

  get firing(): Alert[] {
    return (this.alerts ?? []).filter((alert) => alert.state === "firing");
  }
}

export const store = new Store();

export function useStore(): Store {
  const [, again] = useReducer((n: number) => n + 1, 0);
  useLayoutEffect(() => store.subscribe(() => again(0)), []); // at once: what changes before that is never shown
  return store;
}
