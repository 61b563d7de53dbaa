// The fleet as the admin API tells it: asked for while its page is open, and only what is new.

import { useEffect, useState } from "preact/hooks";
import { ask } from "./api";
import { store } from "./store";
import type { FleetDecision, FleetSample, FleetStatus, PoolCost } from "./types";

const STATUS_S = 2;
const NEWS_EVERY = 5; // of these
const MAX_DECISIONS = 500;

export interface Fleet {
  status: FleetStatus | null; // null: not yet known
  samples: FleetSample[]; // the oldest first
  decisions: FleetDecision[]; // the newest first
  costs: PoolCost[]; // of the last day
  problem: string;
}

const NOTHING: Fleet = { status: null, samples: [], decisions: [], costs: [], problem: "" };

/** The last hours of the fleet, for as long as somebody looks. */
export function useFleet(hours: number): Fleet {
  const [fleet, set] = useState<Fleet>(NOTHING);
  useEffect(() => {
    if (store.session?.kind !== "gateway") return;
    const gone = new AbortController();
    void follow(hours, set, gone.signal);
    return () => gone.abort();
  }, [hours]);
  return fleet;
}

async function follow(hours: number, set: (fleet: Fleet) => void, signal: AbortSignal): Promise<void> {
  const get = async (path: string) => (await ask(`/admin/v1/fleet${path}`, signal)).json();
  let found: Fleet = NOTHING;
  for (let round = 0; !signal.aborted; round++) {
    try {
      const status: FleetStatus = await get("");
      if (status.pools.length && (round % NEWS_EVERY === 0 || !found.samples.length)) found = await news(get, found, status.at - hours * 3600);
      found = { ...found, status, problem: "" };
    } catch (error) {
      if (signal.aborted) return;
      found = { ...found, problem: error instanceof Error ? error.message : String(error) };
    }
    set(found);
    await new Promise((resume) => setTimeout(resume, STATUS_S * 1e3));
  }
}

async function news(get: (path: string) => Promise<any>, found: Fleet, since: number): Promise<Fleet> {
  const after = (at: number | undefined) => `since=${encodeURIComponent(new Date(Math.max(since, at ?? 0) * 1e3).toISOString())}`;
  const [history, decisions, costs] = await Promise.all([
    get(`/history?${after(found.samples.at(-1)?.at)}`),
    get(`/decisions?limit=${MAX_DECISIONS}&${after(found.decisions[0]?.at)}`),
    get("/cost"),
  ]);
  return {
    ...found,
    samples: unique([...found.samples, ...history.samples]).filter((one) => one.at >= since),
    decisions: unique([...decisions.decisions, ...found.decisions]).slice(0, MAX_DECISIONS),
    costs: costs.pools,
  };
}

/** A time in a query has milliseconds only, so that the last one may come again. */
function unique<T extends { at: number; pool: string }>(rows: T[]): T[] {
  const seen = new Set<string>();
  return rows.filter((row) => {
    const key = `${row.at} ${row.pool}`;
    return !seen.has(key) && seen.add(key);
  });
}
