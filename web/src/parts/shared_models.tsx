// Models that share a device: what the memory plan gives each, and orders to load, unload, park and pin, by the admin API.

import { useEffect, useState } from "preact/hooks";
import { ask, change } from "../api";
import { count, digits, duration } from "../format";
import { Bar, Card, type Column, Pill, Problem, Table } from "./basics";
import { useChange } from "./replica_changes";

const PATH = "/v1/penstock/models";
const LOOK_MS = 2000;

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
  devices: { name: string; total_bytes: number; held_bytes: number }[];
  models: SharedModel[];
}

const gib = (bytes: number) => `${digits(bytes / 2 ** 30)} GiB`;

export function SharedModels() {
  const [seen, setSeen] = useState<Seen | null>(null);
  const { isBusy, problem, make } = useChange();
  useEffect(() => {
    let isGone = false;
    const look = async () => {
      while (!isGone) {
        const found: Seen | null = await ask(PATH).then((answer) => answer.json(), () => null); // the page says if the server is away
        if (found) setSeen(found);
        if (found && !found.models.length) return; // no models share a device here, and none will
        await new Promise((resume) => setTimeout(resume, LOOK_MS));
      }
    };
    look();
    return () => { isGone = true; };
  }, []);
  if (!seen?.models.length) return null;
  const order = (one: SharedModel, name: string) =>
    make(() => change("POST", `${PATH}/${encodeURIComponent(one.name)}/${name.toLowerCase()}`, {}));
  const columns: Column<SharedModel>[] = [
    { name: "Model", show: (one) => <span class="two"><b>{one.name}</b><small>{one.failure || one.refusal || one.no_room || one.reason}</small></span> },
    { name: "State", show: (one) => <Pill state={one.state === "loaded" ? "ok" : ""}>{one.pinned ? `${one.state}, pinned` : one.state}</Pill> },
    { name: "Ready in", isNumber: true, show: (one) => duration(one.eta_s) },
    { name: "Memory", isNumber: true, hint: "with its KV cache", show: (one) => gib(one.memory.held_bytes) },
    { name: "KV cache", isNumber: true, show: (one) => gib(one.memory.kv_bytes) },
    { name: "Requests", isNumber: true, show: (one) => `${count(one.in_flight)}, ${count(one.waiting)} held` },
    {
      name: "Orders",
      show: (one) => (
        <span class="row-actions">
          {[...(one.state === "loaded" ? ["Park", "Unload"] : ["Load"]), one.pinned ? "Unpin" : "Pin"].map((name) => (
            <button key={name} class="link" disabled={isBusy} onClick={() => order(one, name)}>{name}</button>
          ))}
        </span>
      ),
    },
  ];
  return seen.devices.map((device) => (
    <Card key={device.name} title={`Models on ${device.name}`} aside={`${gib(device.held_bytes)} of ${gib(device.total_bytes)} held`}>
      {problem && <Problem title="Nothing was changed.">{problem}</Problem>}
      <Bar share={device.held_bytes / device.total_bytes} label="memory held" isNeutral />
      <Table label={`Models on ${device.name}`} columns={columns} rows={seen.models} id={(one) => one.name} />
    </Card>
  ));
}
