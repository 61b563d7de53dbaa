import { useEffect, useState } from "preact/hooks";
import { Card, Empty, Problem } from "../parts/basics";
import { Batchers } from "../parts/batchers";
import { Queues, Replicas } from "../parts/fleet";
import { AddReplica, type NamedReplica, RemoveReplica, named, source, useChange } from "../parts/replica_changes";
import { SharedModels } from "../parts/shared_models";
import { percent } from "../format";
import { isHealthy } from "../health";
import { useStore } from "../store";
import type { Replica } from "../types";

const CONFIGURED: Record<string, string> = { file: "the gateway's file", dns: "DNS" };

export function ReplicasPage() {
  const store = useStore();
  const { replicas, queues, models } = store.state;
  const [isAdding, setAdding] = useState(false);
  const [added, setAdded] = useState<NamedReplica | null>(null); // until this gateway has it
  const [removed, setRemoved] = useState<Replica | null>(null);
  const change = useChange();
  const isGateway = store.session?.kind === "gateway";
  const healthy = replicas.filter(isHealthy).length;
  const used = replicas.reduce((sum, one) => sum + (one.kv_capacity ? one.kv_used : 0), 0);
  const capacity = replicas.reduce((sum, one) => sum + (one.kv_capacity ?? 0), 0);
  const isAwaited = added && !replicas.map(named).some((one) => one.model === added.model && one.url === added.url);
  useEffect(() => { if (!isAwaited) setAdded(null); }, [isAwaited]);
  const elsewhere = Object.entries(CONFIGURED).filter(([name]) => replicas.some((one) => one.source === name)).map(([, words]) => words);
  return (
    <>
      {isGateway && <SharedModels />}
      <Card
        title="Replicas"
        aside={`${healthy} of ${replicas.length} healthy${capacity ? `, KV cache ${percent(used / capacity)} in use` : ""}`}
        action={isGateway && <button class="plain" onClick={() => setAdding(true)}>Add replica</button>}
      >
        {change.problem && <Problem title="Nothing was changed.">{change.problem}</Problem>}
        {isAwaited && <p class="hint" role="status">{added.url} is in the store. This gateway has not taken it yet; if it cannot, its log says why.</p>}
        {replicas.length
          ? <Replicas rows={replicas} source={isGateway ? source(change, setRemoved) : undefined} />
          : <Empty title="No replicas">Add one here, or name some under models in the gateway's file.</Empty>}
        {elsewhere.length > 0 && <p class="hint">Replicas of {elsewhere.join(" and ")} can be drained here; they are removed there.</p>}
      </Card>
      <Batchers replicas={replicas} />
      {isAdding && <AddReplica onClose={() => setAdding(false)} onAdded={(row) => { setAdded(row); setAdding(false); }} />}
      {removed && <RemoveReplica replica={removed} onClose={() => setRemoved(null)} />}
      <div class="halves">
        <Card title="Queues" aside="requests waiting, by priority class">
          <Queues rows={queues} />
        </Card>
        <Card title="Models" aside="names that clients can ask for">
          <ul class="models">
            {models.map((model) => (
              <li key={model.name}>
                <b>{model.name}</b>
                {model.aliases.length > 0 && <small>also {model.aliases.join(", ")}</small>}
                {model.pools.length > 0 && model.pools.join() !== model.name && <small>{model.pools.join(", ")}</small>}
              </li>
            ))}
          </ul>
        </Card>
      </div>
    </>
  );
}
