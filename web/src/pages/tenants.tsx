import { Bar, Card, type Column, Empty, Pill, Table } from "../parts/basics";
import { compact, count, duration, money, percent, words } from "../format";
import { useStore } from "../store";
import type { Tenant } from "../types";

export function Tenants() {
  const store = useStore();
  const { tenants, models } = store.state;
  const hasPrices = models.some((model) => model.has_price);
  if (!tenants.length) {
    return (
      <Card title="Tenants">
        {store.session?.kind === "replica" ? (
          <Empty title="A single replica has no tenants">
            Keys, limits and costs are a gateway's: start with <code>--replicas 2</code>, or put <code>penstock gateway</code> in front.
          </Empty>
        ) : (
          <Empty title="No tenants yet">
            Make one with <code>penstock tenants add NAME</code> and give it a key with <code>penstock keys create NAME</code>.
          </Empty>
        )}
      </Card>
    );
  }
  const total = tenants.reduce((sum, one) => sum + one.month_cost, 0);
  return (
    <Card title="Tenants" aside={hasPrices ? `${money(total)} this month` : "no prices are set, so nothing costs anything"}>
      <Table label="Tenants" columns={columns(hasPrices)} rows={tenants} id={(one) => one.id} />
    </Card>
  );
}

function columns(hasPrices: boolean): Column<Tenant>[] {
  const costs: Column<Tenant>[] = [
    { name: "Today", isNumber: true, show: (one) => money(one.today_cost) },
    { name: "This month", isNumber: true, show: (one) => <b>{money(one.month_cost)}</b> },
  ];
  return [
    {
      name: "Tenant",
      show: (one) => (
        <span class="two">
          <b>{one.name || one.id}</b>
          {one.name && <small>{one.id}</small>}
        </span>
      ),
    },
    { name: "Priority", show: (one) => (one.is_active ? one.priority : <Pill state="out">not active</Pill>) },
    { name: "Requests", isNumber: true, show: (one) => <>{count(one.requests)}{one.refused > 0 && <small> ({count(one.refused)} refused)</small>}</> },
    { name: "Prompt", isNumber: true, show: (one) => compact(one.input_tokens) },
    { name: "Cached", isNumber: true, show: (one) => (one.input_tokens ? percent(one.cached_tokens / one.input_tokens) : "–") },
    { name: "Output", isNumber: true, show: (one) => compact(one.output_tokens) },
    { name: "Tokens this month", isNumber: true, show: (one) => compact(one.month_tokens) },
    { name: "Device time", isNumber: true, show: (one) => (one.month_device_s > 0 ? duration(one.month_device_s) : "–") },
    ...(hasPrices ? costs : []),
    { name: "Budget", show: (one) => <Budget tenant={one} /> },
  ];
}

/** The bound that is nearest to being reached. */
function Budget({ tenant }: { tenant: Tenant }) {
  const used: Record<string, number> = {
    tokens_per_day: tenant.today_tokens, tokens_per_month: tenant.month_tokens,
    money_per_day: tenant.today_cost, money_per_month: tenant.month_cost,
  };
  const bounds = Object.entries(tenant.budget).map(([name, bound]) => ({ name, bound, share: used[name]! / bound }));
  const [nearest] = bounds.sort((a, b) => b.share - a.share);
  if (!nearest) return <small>none</small>;
  return (
    <span class="meter" title={`${words(nearest.name)}: ${compact(nearest.bound)}`}>
      <Bar share={nearest.share} label={`${tenant.id}: ${words(nearest.name)}`} />
      <span class="n">
        {percent(nearest.share)} <small>{words(nearest.name)}</small>
      </span>
    </span>
  );
}
