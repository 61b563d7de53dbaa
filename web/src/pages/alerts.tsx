import { Card } from "../parts/basics";
import { AlertList } from "../parts/alerts";
import { Budgets } from "../parts/budgets";
import { useStore } from "../store";

export function Alerts() {
  const store = useStore();
  const firing = store.firing;
  const resolved = (store.alerts ?? []).filter((alert) => alert.state !== "firing");
  return (
    <>
      <Card title="Alerts" aside={store.alerts && `${firing.length} firing`}>
        <AlertList alerts={firing} />
      </Card>
      <Budgets slos={store.slos} />
      {resolved.length > 0 && (
        <Card title="Resolved" aside="of the last day">
          <AlertList alerts={resolved} />
        </Card>
      )}
    </>
  );
}
