import { useState } from "preact/hooks";
import { Bar } from "./basics";
import { clock, count, duration, score, words } from "../format";
import { go } from "../router";
import { store } from "../store";
import type { Decision, Request } from "../types";

const TIE = 0.0005; // scores that are nearer have no difference to show

/** Why the picked one won, in a sentence: by what it is ahead of the next. */
export function reason(decision: Decision): string {
  const [picked, next] = decision.candidates;
  if (!picked) return "no replica was eligible";
  if (!next) {
    const dropped = Object.keys(decision.dropped).length;
    return dropped ? `the only eligible replica; ${dropped} filtered out` : "the only replica";
  }
  const ahead = decision.scorers
    .map((name, at) => ({ name, by: picked.scores[at]! - next.scores[at]! }))
    .filter((one) => one.by > TIE)
    .sort((a, b) => b.by - a.by);
  const held = decision.matched_tokens
    ? `expected to have ${count(decision.matched_tokens)} of ${count(decision.prompt_tokens)} prompt tokens cached${decision.host_tokens ? `, ${count(decision.host_tokens)} in host memory` : ""}`
    : "";
  const won = ahead.length ? `ahead by ${ahead.map((one) => `${words(one.name)} +${score(one.by)}`).join(", ")}` : "";
  const tied = Math.abs(picked.total - next.total) <= TIE ? `tie with ${next.replica}, chosen at random` : "";
  return [held, tied || won].filter(Boolean).join("; ") || `chosen by ${words(decision.strategy)}`;
}

/** Where KV blocks of the prompt come from, or why from nowhere else. */
export function secondLeg(decision: Decision): string {
  if (!decision.why) return "";
  if (!decision.source) return `no KV source: ${words(decision.why)}`;
  const what = { prefill: "computes the prompt", prefix: "holds more of the prompt", moved: "gave the stream back" }[decision.why] ?? words(decision.why);
  const gain = decision.gain_s == null ? "" : `, expected to save ${duration(decision.gain_s)}`;
  return `KV of ${count(decision.pulled_tokens)} tokens from ${decision.source}, which ${what}${gain}`;
}

export function DecisionCard({ decision, request, isOpen = false }: { decision: Decision; request?: Request; isOpen?: boolean }) {
  const [open, setOpen] = useState(isOpen);
  return (
    <article class={`decision ${open ? "open" : ""}`}>
      <button class="plain head" aria-expanded={open} onClick={() => setOpen(!open)}>
        <time>{clock(decision.at_s)}</time>
        <b>{decision.picked || "none"}</b>
        <span class="why">{reason(decision)}</span>
        <small>
          {decision.model}, {count(decision.prompt_tokens)} tokens
        </small>
      </button>
      {open && <Scores decision={decision} request={request ?? store.requests.find((one) => one.id === decision.id)} />}
    </article>
  );
}

function Scores({ decision, request }: { decision: Decision; request?: Request }) {
  const most = Math.max(...decision.candidates.map((one) => one.total), 1e-9);
  const left = decision.num_candidates - decision.candidates.length;
  return (
    <div class="scores">
      <p class="hint">
        strategy <b>{words(decision.strategy)}</b>, tenant {decision.tenant}, request{" "}
        <button class="link" onClick={() => go(`requests/${decision.id}`)}>
          <code>{decision.id.slice(0, 12)}</code>
        </button>
      </p>
      <p class="hint">
        Cached prompt tokens: {request && `the replica reported ${count(request.cached_tokens)} of ${count(request.input_tokens)}; `}
        {decision.matched_tokens == null
          ? "the router made no estimate"
          : `the router expected ${count(decision.matched_tokens)}, in whole blocks of ${count(decision.block_tokens)}${decision.is_approximate ? ", by what it had sent there" : ""}`}
      </p>
      {secondLeg(decision) && <p class="hint">{secondLeg(decision)}</p>}
      <div class="scroll">
        <table aria-label="Scores">
          <thead>
            <tr>
              <th scope="col">Candidate</th>
              <th scope="col">Score</th>
              {decision.scorers.map((name) => <th key={name} scope="col" class="number">{words(name)}</th>)}
              <th scope="col" class="number" title="the router's estimate">expected cached tokens</th>
              <th scope="col" class="number">running</th>
              <th scope="col" class="number">queued tokens</th>
            </tr>
          </thead>
          <tbody>
            {decision.candidates.map((one) => (
              <tr key={one.replica} class={one.replica === decision.picked ? "picked" : ""}>
                <td data-name="Candidate">
                  {one.replica} {one.replica === decision.picked && <span class="pill good">picked</span>}
                </td>
                <td data-name="Score">
                  <span class="meter">
                    <Bar share={one.total / most} label={`score of ${one.replica}`} isNeutral />
                    <span class="n">{score(one.total)}</span>
                  </span>
                </td>
                {one.scores.map((value, at) => <td key={at} data-name={words(decision.scorers[at]!)} class="number">{score(value)}</td>)}
                <td data-name="Expected cached tokens" class="number">
                  {count(one.matched_tokens)}
                  {one.host_tokens > 0 && <small> ({count(one.host_tokens)} in host memory)</small>}
                </td>
                <td data-name="Running" class="number">{count(one.running)}</td>
                <td data-name="Queued tokens" class="number">{count(one.queued_tokens)}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
      {left > 0 && <p class="hint">and {count(left)} more, with lower scores</p>}
      {Object.entries(decision.dropped).map(([replica, why]) => (
        <p key={replica} class="hint">
          {replica} was filtered out: {words(why)}
        </p>
      ))}
    </div>
  );
}
