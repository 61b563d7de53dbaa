// Models that share a device: what the memory plan gives each, and orders to load, unload, park and pin, by the admin API.

import { useEffect, useState } from "preact/hooks";
import { ask, change } from "../api";
import { count, digits, duration } from "../format";
import { Bar, Card, type Column, Pill, Problem, Table } from "./basics";
import { useChange } from "./replica_changes";

const PATH = "/v1/penstock/models";
const LOOK_MS = 2000;
const TONES: Record<string, string> = { loaded: "ok", unloaded: "", parked: "" };

interface SharedModel {
  name: string;
  state: string;
  pinned: boolean;
  order: string;
  eta_s: number | null;
  reason: string;
  refusal: string;
  no_room: string;
  failure: string;
  in_flight: number;
  waiting: number;
  memory: { fixed_bytes: number; kv_bytes: number; held_bytes: number };
}

interface Seen {
  devices: { name: string; total_bytes: number; held_bytes: number; min_residence_s: number }[];
  models: SharedModel[];
}

const gib = (bytes: number) => `${digits(bytes / 2 ** 30)} GiB`;

export function SharedModels() {
  const [seen, setSeen] = useState<Seen | null>(null);
  const { isBusy, problem, make } = useChange();
  useEffect(() => {
    const given = new AbortController();
    let timer = 0;
    const look = async () => {
      try {
        const found: Seen = await (await ask(PATH, given.signal)).json();
        setSeen(found);
        if (!found.models.length) return; // no models share a device here, and none will
      } catch { /* the page says by itself that the server is away */ }
      if (!given.signal.aborted) timer = setTimeout(look, LOOK_MS);
    };
    look();
    return () => { given.abort(); clearTimeout(timer); };
  }, []);
  if (!seen?.models.length) return null;
  const order = (one: SharedModel, verb: string, name: string) => (
    <button class="link" disabled={isBusy} onClick={() => make(() => change("POST", `${PATH}/${encodeURIComponent(one.name)}/${verb}`, {}))}>{name}</button>
  );
  const columns: Column<SharedModel>[] = [
    { name: "Model", show: (one) => <span class="two"><b>{one.name}</b><small>{one.failure || one.refusal || one.no_room || one.reason}</small></span> },
    { name: "State", show: (one) => <Pill state={TONES[one.state] ?? "starting"}>{one.pinned ? `${one.state}, pinned` : one.state}</Pill> },
    { name: "Ready in", isNumber: true, show: (one) => duration(one.eta_s) },
    { name: "Memory", isNumber: true, hint: "of the device, with its KV cache", show: (one) => gib(one.memory.held_bytes) },
    { name: "KV cache", isNumber: true, show: (one) => gib(one.memory.kv_bytes) },
    { name: "Requests", isNumber: true, hint: "at it, and held for it", show: (one) => `${count(one.in_flight)} + ${count(one.waiting)}` },
    {
      name: "Orders",
      show: (one) => (
        <span class="row-actions">
          {one.state === "loaded" ? <>{order(one, "park", "Park")}{order(one, "unload", "Unload")}</> : order(one, "load", "Load")}
          {one.pinned ? order(one, "unpin", "Unpin") : order(one, "pin", "Pin")}
        </span>
      ),
    },
  ];
  return seen.devices.map((device) => (
    <Card key={device.name} title={`Models on ${device.name}`} aside={`${gib(device.held_bytes)} of ${gib(device.total_bytes)} held; a model stays for ${duration(device.min_residence_s)} at least`}>
      {problem && <Problem title="Nothing was changed.">{problem}</Problem>}
      <Bar share={device.held_bytes / device.total_bytes} label="memory held" isNeutral />
      <Table label={`Models on ${device.name}`} columns={columns} rows={seen.models} id={(one) => one.name} />
    </Card>
  ));
}
