// Gates of a rollout: each one's interval against its margin.

import { count, digits, percent, words } from "../format";
import type { RolloutGate } from "../types";

const NAMES: Record<string, string> = { ttft: "TTFT", tpot: "TPOT", device_time: "device time per token", cost: "cost per token" };
const VERDICTS: Record<string, string> = { better: "good", equal: "good", worse: "bad", undecided: "quiet" };
const ORDER = ["worse", "undecided", "equal", "better"];
const WIDE = 4; // margins at least from the middle to the end of a bar

export function title(gate: RolloutGate): string {
  const [metric = "", quantile] = gate.gate.split("_p");
  const name = NAMES[metric] ?? words(quantile ? metric : gate.gate);
  return `${quantile && /^\d+$/.test(quantile) ? `p${quantile} ` : ""}${name}${gate.tenant ? ` of ${gate.tenant}` : ""}`;
}

function said(gate: RolloutGate): string {
  if (gate.estimate == null || gate.low == null || gate.high == null) return "too few to say";
  return gate.is_ratio
    ? `${digits(gate.estimate)} × [${digits(gate.low)}, ${digits(gate.high)}]`
    : `${signed(gate.estimate)} [${signed(gate.low)}, ${signed(gate.high)}]`;
}

function signed(difference: number): string {
  return `${difference < 0 ? "−" : "+"}${percent(Math.abs(difference))}`;
}

export function Gates({ gates }: { gates: RolloutGate[] }) {
  const rows = [...gates].sort((a, b) => ORDER.indexOf(a.verdict) - ORDER.indexOf(b.verdict));
  return (
    <ul class="gates" aria-label="Gates">
      {rows.map((gate) => (
        <li key={`${gate.gate} ${gate.tenant}`}>
          <b>{title(gate)}</b>
          <Interval gate={gate} />
          <span class="n">{said(gate)}</span>
          <span class={`pill ${VERDICTS[gate.verdict]}`}>{gate.verdict}</span>
          <small>{count(gate.new_count)} and {count(gate.old_count)} requests; margin {gate.is_ratio ? `× ${digits(1 + gate.margin)}` : `+${percent(gate.margin)}`}</small>
        </li>
      ))}
    </ul>
  );
}

/** The interval on an axis on which the old version is the middle, and the margin a line. */
function Interval({ gate }: { gate: RolloutGate }) {
  const middle = gate.is_ratio ? 1 : 0;
  const has = gate.low != null && gate.high != null;
  const far = has ? 1.1 * Math.max(...[gate.low!, gate.high!, gate.estimate ?? middle].map((value) => Math.abs(value - middle))) : 0;
  const end = Math.max(WIDE * gate.margin, Math.min(far, 20 * gate.margin)); // farther off it is cut
  const place = (value: number) => 50 + 50 * Math.max(-1, Math.min(1, (value - middle) / end));
  const [low, high] = has ? [place(gate.low!), place(gate.high!)] : [0, 100];
  return (
    <span class="interval" role="img" aria-label={`${title(gate)}: ${said(gate)}, ${gate.verdict}`}>
      <i class="zero" />
      <i class="margin" style={{ left: `${place(middle + gate.margin)}%` }} />
      {has && <i class={`range ${VERDICTS[gate.verdict]}`} style={{ left: `${low}%`, width: `${Math.max(1, high - low)}%` }} />}
      {gate.estimate != null && <i class={`point ${VERDICTS[gate.verdict]}`} style={{ left: `${place(gate.estimate)}%` }} />}
    </span>
  );
}
