import { Card, type Column, Table } from "./basics";
import { compact, count, digits, duration } from "../format";
import type { Replica, TensorVersion } from "../types";

type Batcher = { replica: string; of: TensorVersion };

const number = (name: string, hint: string, show: (of: TensorVersion) => string): Column<Batcher> => ({ name, hint, isNumber: true, show: (row) => show(row.of) });
const COLUMNS: Column<Batcher>[] = [
  { name: "Model", show: ({ replica, of: [model, version] }) => <span class="two"><span>{model} <small>version {version}</small></span><small>{replica}</small></span> },
  number("Instances", "", ([, , instances, device]) => `${instances} ${device}`),
  number("Running", "", (of) => count(of[6])),
  number("Waiting", "requests, and how many may", (of) => `${count(of[5])} / ${count(of[10])}`),
  number("In queue", "on average", (of) => duration(of[12])),
  number("Longest delay", "for the sake of a batch", (of) => duration(of[11])),
  number("Batches", "executed", (of) => compact(of[8])),
  number("Rows in a batch", "on average, and at most", ([, , , , most, , , rows, batches]) => `${batches ? digits(rows / batches) : "–"} / ${most}`),
  number("Refused", "", (of) => compact(of[9])),
];

/** Versions of models that take tensors. */
export function Batchers({ replicas }: { replicas: Replica[] }) {
  const rows = replicas.flatMap((one) => one.tensors.map((of) => ({ replica: one.name, of })));
  if (!rows.length) return null;
  return (
    <Card title="Batchers" aside="of models that take tensors">
      <Table label="Batchers" columns={COLUMNS} rows={rows} id={({ replica, of }) => `${replica} ${of[0]} ${of[1]}`} />
    </Card>
  );
}
