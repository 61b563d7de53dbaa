import { Empty, Pill } from "./basics";
import { ago, clock } from "../format";
import { store } from "../store";
import type { Alert } from "../types";

export function AlertList({ alerts }: { alerts: Alert[] }) {
  if (store.alerts == null) {
    return (
      <Empty title="Nothing is watched here">
        {store.session?.kind === "replica"
          ? "Alerts are a gateway's: start with --replicas 2, or put penstock gateway in front."
          : "This gateway raises no alerts."}
      </Empty>
    );
  }
  if (!alerts.length) return <Empty title="No alerts">All objectives are met and every replica does what it should.</Empty>;
  return (
    <ul class="alerts">
      {alerts.map((alert) => (
        <li key={alert.id} class={alert.state}>
          <div>
            <b>{alert.alert}</b> <Pill state={alert.state === "firing" ? alert.severity : "resolved"}>{alert.state === "firing" ? alert.severity : "resolved"}</Pill>
          </div>
          <p>{alert.summary}</p>
          <small>
            since {clock(alert.since)}, {ago(store.at_s - alert.since)}
            {alert.resolved_at != null && `; resolved ${ago(store.at_s - alert.resolved_at)}`}
            {alert.runbook && (
              <>
                {" · "}
                <code>{alert.runbook}</code>
              </>
            )}
          </small>
        </li>
      ))}
    </ul>
  );
}
