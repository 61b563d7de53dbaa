// Replicas that an operator adds, drains and removes, by the admin API: in the store, which every gateway follows.

import { useState } from "preact/hooks";
import { Refused, change } from "../api";
import { count } from "../format";
import { store } from "../store";
import type { Replica } from "../types";
import { type Column, Modal, Problem } from "./basics";

const PATH = "/admin/v1/replicas";
const SOURCES: Record<string, string> = { file: "File", store: "Store", dns: "DNS" };

export interface NamedReplica {
  model: string;
  url: string;
}

export function named(one: Replica): NamedReplica {
  return { model: one.model, url: one.id.split("#")[0]! }; // a server of several models has an id for each
}

/** What the gateway's configuration names drains while the store has it too, as draining. */
function drain(one: Replica): Promise<void> {
  const row = { ...named(one), draining: true };
  return change(one.source === "store" ? "PATCH" : "POST", PATH, row);
}

function undrain(one: Replica): Promise<void> {
  return one.source === "store" ? change("PATCH", PATH, { ...named(one), draining: false }) : change("DELETE", PATH, named(one));
}

/** A change that is on its way, or why it was not made. */
export function useChange() {
  const [isBusy, setBusy] = useState(false);
  const [problem, setProblem] = useState("");
  const make = async (work: () => Promise<void>): Promise<boolean> => {
    setBusy(true);
    setProblem("");
    try {
      await work();
      return true;
    } catch (error) {
      setProblem(error instanceof Refused ? error.message : "The server does not answer.");
      return false;
    } finally {
      setBusy(false);
    }
  };
  return { isBusy, problem, make };
}

/** Where a replica comes from, and what can be done with it here. */
export function source({ isBusy, make }: ReturnType<typeof useChange>, onRemove: (one: Replica) => void): Column<Replica> {
  return {
    name: "Source",
    hint: "what names it: the gateway's file, DNS, or the store (this page, commands, the admin API)",
    show: (one) => (
      <span class="two">
        {SOURCES[one.source] ?? one.source}
        <span class="row-actions">
          {one.is_draining
            ? <button class="link" disabled={isBusy} onClick={() => make(() => undrain(one))}>Undrain</button>
            : <button class="link" disabled={isBusy} onClick={() => make(() => drain(one))}>Drain</button>}
          {one.source === "store" && <button class="link bad" disabled={isBusy} onClick={() => onRemove(one)}>Remove</button>}
        </span>
      </span>
    ),
  };
}

export function AddReplica({ onAdded, onClose }: { onAdded: (added: NamedReplica) => void; onClose: () => void }) {
  const { models, replicas } = store.state;
  const pools = [...new Set([...models.flatMap((one) => one.pools), ...replicas.map((one) => one.model)])].sort();
  const [model, setModel] = useState(pools.length === 1 ? pools[0]! : "");
  const [url, setUrl] = useState("");
  const [dialect, setDialect] = useState("");
  const [servedAs, setServedAs] = useState("");
  const { isBusy, problem, make } = useChange();
  const add = async () => {
    const row = { model: model.trim(), url: url.trim() };
    const options = { ...(dialect && { dialect }), ...(servedAs.trim() && { served_as: servedAs.trim() }) };
    if (await make(() => change("POST", PATH, { ...row, options }))) onAdded({ ...row, url: row.url.replace(/\/+$/, "") });
  };
  return (
    <Modal title="Add a replica" onClose={onClose}>
      <form class="fields" onSubmit={(event) => { event.preventDefault(); void add(); }}>
        <label>
          Model
          <input list="pools" required autocomplete="off" spellcheck={false} autofocus={!model} value={model} onInput={(event) => setModel(event.currentTarget.value)} />
          <datalist id="pools">{pools.map((name) => <option key={name} value={name} />)}</datalist>
          <small>A name that no gateway knows yet becomes a model.</small>
        </label>
        <label>
          URL
          <input inputMode="url" required autocomplete="off" spellcheck={false} autofocus={!!model} placeholder="http://HOST:PORT" value={url} onInput={(event) => setUrl(event.currentTarget.value)} />
        </label>
        <label>
          Dialect
          <select value={dialect} onChange={(event) => setDialect(event.currentTarget.value)}>
            <option value="">as its model has it</option>
            {store.session?.dialects?.map((name) => <option key={name}>{name}</option>)}
          </select>
        </label>
        <label>
          Served as
          <input autocomplete="off" spellcheck={false} placeholder="the model's name" value={servedAs} onInput={(event) => setServedAs(event.currentTarget.value)} />
          <small>What the server itself calls the model, where that is another name.</small>
        </label>
        {problem && <Problem title="It was not added.">{problem}</Problem>}
        <div class="actions">
          <button type="button" class="plain" onClick={onClose}>Cancel</button>
          <button type="submit" disabled={isBusy}>Add</button>
        </div>
      </form>
    </Modal>
  );
}

export function RemoveReplica({ replica, onClose }: { replica: Replica; onClose: () => void }) {
  const { isBusy, problem, make } = useChange();
  const { model, url } = named(replica);
  const isLast = !store.state.replicas.some((one) => one.model === model && one.id !== replica.id);
  return (
    <Modal title={`Remove ${replica.name}?`} onClose={onClose}>
      <p><code>{url}</code> leaves {model} on every gateway. Its streams move to other replicas, and what cannot move may end where it is.</p>
      {replica.in_flight > 0 && <p>{count(replica.in_flight)} {replica.in_flight === 1 ? "request is" : "requests are"} in flight there.</p>}
      {isLast && <p class="warn">It is the last replica of {model}.</p>}
      {problem && <Problem title="It was not removed.">{problem}</Problem>}
      <div class="actions">
        <button type="button" class="plain" autofocus onClick={onClose}>Cancel</button>
        <button type="button" class="danger" disabled={isBusy} onClick={async () => (await make(() => change("DELETE", PATH, named(replica)))) && onClose()}>Remove</button>
      </div>
    </Modal>
  );
}
