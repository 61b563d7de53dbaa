import { Card, Empty } from "../parts/basics";
import { Queues, Replicas } from "../parts/fleet";
import { percent } from "../format";
import { isHealthy } from "../health";
import { useStore } from "../store";

export function Fleet() {
  const store = useStore();
  const { replicas, queues, models } = store.state;
  const healthy = replicas.filter(isHealthy).length;
  const used = replicas.reduce((sum, one) => sum + (one.kv_capacity ? one.kv_used : 0), 0);
  const capacity = replicas.reduce((sum, one) => sum + (one.kv_capacity ?? 0), 0);
  return (
    <>
      <Card title="Replicas" aside={`${healthy} of ${replicas.length} healthy${capacity ? `, KV cache ${percent(used / capacity)} in use` : ""}`}>
        {replicas.length ? <Replicas rows={replicas} /> : <Empty title="No replicas">Name some under models in the gateway's file.</Empty>}
      </Card>
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
