import { useEffect, useRef, useState } from "preact/hooks";
import { Card, type Column, Empty, Pill, Problem, Table } from "../parts/basics";
import { DecisionCard } from "../parts/decision";
import { PipelineSteps, Steps } from "../parts/pipelines";
import { Waterfall } from "../parts/waterfall";
import { Refused, ask } from "../api";
import { clock, compact, count, duration, money, words } from "../format";
import { go } from "../router";
import { useStore } from "../store";
import type { Decision, Request, Step } from "../types";

const COLUMNS: Column<Request>[] = [
  { name: "Ended", show: (one) => <time>{clock(one.at_s)}</time> },
  {
    name: "Request",
    show: (one) => (
      <span class="two">
        <code>{one.id.slice(0, 12)}</code>
        <small>{words(one.surface)}</small>
      </span>
    ),
  },
  {
    name: "Outcome",
    show: (one) => (
      <span class="two">
        <Pill state={one.ending} />
        {one.reason && <small title={words(one.reason)}>{words(one.reason)}</small>}
      </span>
    ),
  },
  { name: "Model", show: (one) => one.model || "–" },
  { name: "Tenant", show: (one) => one.tenant || "–" },
  { name: "Replica", show: (one) => one.replica || (one.num_steps ? `${count(one.num_steps)} steps` : "–") },
  { name: "Prompt", isNumber: true, show: (one) => <>{compact(one.input_tokens)}{one.cached_tokens > 0 && <small> ({compact(one.cached_tokens)} cached)</small>}</> },
  { name: "Output", isNumber: true, show: (one) => compact(one.output_tokens) },
  { name: "TTFT", isNumber: true, show: (one) => duration(one.ttft_s) },
  { name: "Total", isNumber: true, show: (one) => duration(one.total_s) },
];

export function Requests({ id }: { id: string }) {
  const store = useStore();
  const [text, setText] = useState("");
  const [ending, setEnding] = useState("");
  const [held, hold] = useState<Request[] | null>(null); // the list as it was when it was paused
  const rows = (held ?? store.requests).filter((one) => {
    const said = `${one.id} ${one.model} ${one.tenant} ${one.replica} ${one.reason} ${one.surface}`.toLowerCase();
    return (!ending || one.ending === ending) && said.includes(text.toLowerCase());
  });
  return (
    <div class={`requests ${id ? "split" : ""}`}>
      {id && <Inspector key={id} id={id} />}
      <Card title="Recent requests" aside={`${count(rows.length)} shown; no prompt is kept`}>
        <div class="filters">
          <input
            id="filter" type="search" placeholder="Filter by id, model, tenant, replica, reason" aria-label="Filter requests"
            value={text} onInput={(event) => setText(event.currentTarget.value)}
          />
          <select aria-label="Outcome" value={ending} onChange={(event) => setEnding(event.currentTarget.value)}>
            <option value="">All outcomes</option>
            <option value="ok">ok</option>
            <option value="refused">refused</option>
            <option value="failed">failed</option>
            <option value="client_gone">client gone</option>
          </select>
          <button class="plain" aria-pressed={held != null} onClick={() => hold(held ? null : store.requests)}>
            {held ? "Resume" : "Pause"}
          </button>
        </div>
        {rows.length ? (
          <Table label="Recent requests" columns={COLUMNS} rows={rows.slice(0, 120)} id={(one) => one.id + one.at_s} onOpen={(one) => go(`requests/${one.id}`)} />
        ) : store.requests.length ? (
          <Empty title="No request matches this filter" />
        ) : (
          <Empty title="No requests yet">
            Ask something in the <a href="#/playground">playground</a>, or send a request to <code>/v1/chat/completions</code>.
          </Empty>
        )}
      </Card>
      {!id && store.state.steps.length > 0 && <PipelineSteps steps={store.state.steps} />}
    </div>
  );
}

function Inspector({ id }: { id: string }) {
  const [found, setFound] = useState<{ request: Request; decisions: Decision[]; steps: Step[] } | null>(null);
  const [problem, setProblem] = useState("");
  const heading = useRef<HTMLHeadingElement>(null);
  useEffect(() => {
    const asked = new AbortController();
    ask(`/console/v1/requests/${encodeURIComponent(id)}`, asked.signal)
      .then((response) => response.json())
      .then((answer) => {
        setFound(answer);
        heading.current?.focus();
        heading.current?.scrollIntoView?.({ block: "nearest" });
      })
      .catch((error) => asked.signal.aborted || setProblem(error instanceof Refused ? error.message : "The server does not answer."));
    return () => asked.abort();
  }, [id]);
  const close = () => go("requests");
  return (
    <section class="card inspector" aria-label="Request inspector" onKeyDown={(event) => event.key === "Escape" && close()}>
      <header>
        <h3 tabIndex={-1} ref={heading}>
          Request <code>{id}</code>
        </h3>
        <button class="plain" onClick={close} aria-label="Close the inspector">
          Close <kbd>Esc</kbd>
        </button>
      </header>
      {problem && <Problem title="It cannot be shown.">{problem}</Problem>}
      {found && <Details request={found.request} decisions={found.decisions} steps={found.steps} />}
    </section>
  );
}

function Details({ request, decisions, steps }: { request: Request; decisions: Decision[]; steps: Step[] }) {
  const tokens = request.output_tokens;
  const decode_s = request.ttft_s != null && request.total_s != null ? request.total_s - request.ttft_s : null;
  const facts: [string, preact.ComponentChildren][] = [
    ["Outcome", <><Pill state={request.ending} /> {words(request.reason)}</>],
    ["Ended", clock(request.at_s)],
    ["Endpoint", words(request.surface)],
    ["Model", request.model || "–"],
    ["Tenant", request.tenant || "–"],
    ["Replica", <>{request.replica || "–"}{request.num_tries > 1 && <small> after {request.num_tries} tries</small>}</>],
    ["Prompt", <>{count(request.input_tokens)} tokens{request.cached_tokens > 0 && <small>, {count(request.cached_tokens)} from the cache</small>}</>],
    ["Output", <>{count(tokens)} tokens{decode_s && tokens > 1 ? <small>, {compact((tokens - 1) / decode_s)} per second</small> : null}</>],
    ["Device time", request.device_s == null ? "not measured by this server" : duration(request.device_s)],
    ["Cost", request.cost == null ? "no price is set" : money(request.cost)],
  ];
  if (request.rule) facts.push(["Rule", request.rule]);
  if (request.step_of) facts.push(["Step of", <a href={`#/requests/${request.step_of}`}><code>{request.step_of.slice(0, 12)}</code></a>]);
  return (
    <>
      {steps.length > 0 ? <Steps steps={steps} total_s={request.total_s} /> : <Waterfall request={request} />}
      <dl class="facts">
        {facts.map(([name, value]) => (
          <div key={name}>
            <dt>{name}</dt>
            <dd>{value}</dd>
          </div>
        ))}
      </dl>
      {decisions.length > 0 && (
        <>
          <h4>Routing</h4>
          {decisions.map((one) => <DecisionCard key={one.at_s} decision={one} request={request} isOpen />)}
        </>
      )}
    </>
  );
}
