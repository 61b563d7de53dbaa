import { type Column, Modal, Table } from "./basics";
import { digits, percent } from "../format";
import type { Rank, Replica } from "../types";

const GIB = 2 ** 30;
const COLUMNS: Column<Rank>[] = [
  {
    name: "Rank",
    show: (one) => (
      <span class="two">
        <b>{one.rank}</b>
        <small>{[one.node, one.device].filter(Boolean).join(", ")}</small>
      </span>
    ),
  },
  { name: "Memory", isNumber: true, show: (one) => `${digits(one.memory_bytes / GIB)} GiB`, hint: "of its GPU, or of its process" },
  { name: "MBU", isNumber: true, show: (one) => percent(one.mbu), hint: "of its memory bandwidth, that its recent steps used" },
  {
    name: "Communication", isNumber: true, hint: "with other ranks, of its recent steps' time",
    show: (one) => <>{one.is_estimated && one.communication != null && "about "}{percent(one.communication)}</>,
  },
];

/** The ranks of a replica whose model is spread over several. */
export function Ranks({ replica, onClose }: { replica: Replica; onClose: () => void }) {
  return (
    <Modal title={`${replica.name}: ${replica.parallelism}`} onClose={onClose}>
      {replica.ranks.length
        ? <Table label="Ranks" columns={COLUMNS} rows={replica.ranks} id={(one) => String(one.rank)} />
        : <p class="hint">Its ranks have not said yet how they stand.</p>}
      {replica.ranks.some((one) => one.is_estimated) && (
        <p class="hint">Communication is estimated: collectives are counted, each with what one of its size took at the start, without waits.</p>
      )}
      <div class="actions"><button type="button" class="plain" autofocus onClick={onClose}>Close</button></div>
    </Modal>
  );
}
