import { Empty } from "./basics";
import { duration } from "../format";
import type { Request } from "../types";

interface Part {
  name: string;
  from_s: number;
  to_s: number;
  tone: string;
}

const NAMES: Record<string, string> = {
  tokenize: "Tokenize", queue: "Engine queue", prefill: "Prefill", first_token: "First token out",
};

/** Where the time of one request went, from the first byte in to the last byte out. */
export function Waterfall({ request }: { request: Request }) {
  const parts = partsOf(request);
  const total_s = request.total_s;
  if (!parts.length || !total_s) return <Empty title="It never reached a replica" />;
  return (
    <ol class="waterfall" aria-label="Waterfall">
      {parts.map((part) => (
        <li key={part.name}>
          <span>{part.name}</span>
          <span class="lane">
            <i
              class={part.tone}
              style={{ left: `${(part.from_s / total_s) * 100}%`, width: `${Math.max(0.3, ((part.to_s - part.from_s) / total_s) * 100)}%` }}
            />
          </span>
          <b>{duration(part.to_s - part.from_s)}</b>
        </li>
      ))}
      <li class="sum">
        <span>Total</span>
        <span class="lane scale">
          <small>0</small>
          <small>{duration(total_s / 2)}</small>
          <small>{duration(total_s)}</small>
        </span>
        <b>{duration(total_s)}</b>
      </li>
    </ol>
  );
}

function partsOf(request: Request): Part[] {
  const { queue_s, total_s } = request;
  if (queue_s == null || total_s == null) return [];
  const found: Part[] = [];
  let at_s = queue_s;
  if (queue_s > 0) found.push({ name: "Gateway queue", from_s: 0, to_s: queue_s, tone: "wait" });
  const said = Object.entries(request.parts);
  const told_s = said.reduce((sum, [, seconds]) => sum + seconds, 0);
  // A whole answer has no first byte of its own: its parts say when the first token was there.
  const first_s = request.ttft_s ?? (said.length ? Math.min(total_s, queue_s + told_s) : null);
  const way_s = first_s == null ? 0 : Math.max(0, first_s - queue_s - told_s);
  for (const [name, seconds] of said) {
    const tone = name === "queue" ? "wait" : name === "prefill" ? "work" : "small";
    found.push({ name: NAMES[name] ?? name, from_s: at_s, to_s: at_s + seconds, tone });
    at_s += seconds;
  }
  if (first_s == null) return [...found, { name: "Replica", from_s: at_s, to_s: total_s, tone: "work" }];
  if (way_s > 0 && said.length) found.push({ name: "Network", from_s: at_s, to_s: first_s, tone: "small" });
  else if (!said.length) found.push({ name: "To the first token", from_s: at_s, to_s: first_s, tone: "work" });
  return [...found, { name: "Decode", from_s: first_s, to_s: total_s, tone: "decode" }];
}
