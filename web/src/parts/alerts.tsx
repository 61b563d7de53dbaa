import { Card, Empty, Pill } from "./basics";
import { ago, clock } from "../format";
import { findings, summary } from "../health";
import { store } from "../store";
import type { Alert } from "../types";

/** What is wrong, at the top of the overview; a line where nothing is. */
export function Status() {
  const { firing, alerts, slos, state } = store;
  const found = findings(slos ?? [], state.replicas);
  if (firing.length) {
    return (
      <Card title="Alerts" aside={<><Pill state="firing">{firing.length} firing</Pill> <a href="#/alerts">All</a></>}>
        <AlertList alerts={firing.slice(0, 3)} />
        <Findings />
      </Card>
    );
  }
  return (
    <section class={`card status ${found.length ? "warn" : "good"}`} aria-label="Alerts">
      <b>{alerts == null ? (found.length ? "Not all is well" : "All is well") : found.length ? "No alert is firing" : "No alerts"}</b>
      {found.length ? <Findings /> : <span>{summary(slos ?? [], state.replicas)}</span>}
    </section>
  );
}

function Findings() {
  const found = findings(store.slos ?? [], store.state.replicas);
  if (!found.length) return null;
  return (
    <ul class="findings">
      {found.slice(0, 6).map((one) => (
        <li key={one.text} class={one.tone}>
          <a href={`#/${one.page}`}>{one.text}</a>
        </li>
      ))}
      {found.length > 6 && <li>and {found.length - 6} more</li>}
    </ul>
  );
}

export function AlertList({ alerts }: { alerts: Alert[] }) {
  if (store.alerts == null) {
    return (
      <Empty title="No alerting here">
        {store.session?.kind === "replica"
          ? "Alerts are a gateway's: start with --replicas 2, or put penstock gateway in front."
          : "This gateway raises no alerts."}
      </Empty>
    );
  }
  if (!alerts.length) {
    const { slos, state } = store;
    const isWell = !findings(slos ?? [], state.replicas).length;
    return <Empty title={isWell ? "No alerts" : "No alert is firing"}>{isWell ? summary(slos ?? [], state.replicas) : <Findings />}</Empty>;
  }
  return (
    <ul class="alerts">
      {alerts.map((alert) => (
        <li key={alert.id} class={alert.state}>
          <div>
            <b>{alert.alert}</b> <Pill state={alert.state === "firing" ? alert.severity : "resolved"} />
          </div>
          <p>{alert.summary}</p>
          <small>
            since {clock(alert.since)}, {ago(store.at_s - alert.since)}
            {alert.resolved_at != null && `; resolved ${ago(store.at_s - alert.resolved_at)}`}
            {alert.runbook && <> · <Runbook at={alert.runbook} /></>}
          </small>
        </li>
      ))}
    </ul>
  );
}

/** The operator's page where there is one, else the copy that the console brings. */
function Runbook({ at }: { at: string }) {
  if (/^https?:\/\//.test(at)) return <a href={at} target="_blank" rel="noopener noreferrer">Runbook</a>;
  return <a href={`#/runbooks/${at.replace(/^.*\//, "").replace(/\.md$/, "")}`}>Runbook</a>;
}
