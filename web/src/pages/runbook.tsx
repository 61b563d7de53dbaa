import type { ComponentChildren } from "preact";
import { Empty } from "../parts/basics";

const FILES = import.meta.glob<string>("../../../docs/runbooks/*.md", { query: "?raw", import: "default", eager: true });
const TEXTS = new Map(Object.entries(FILES).map(([path, text]) => [path.replace(/^.*\//, "").replace(/\.md$/, ""), text]));

/** What to do about an alert: docs/runbooks, as they were when the page was built. */
export function Runbook({ name }: { name: string }) {
  const text = TEXTS.get(name);
  return (
    <section class="card runbook" aria-label="Runbook">
      {text ? blocks(text) : <Empty title="No such runbook">{name}</Empty>}
      <p><a href="#/alerts">All alerts</a></p>
    </section>
  );
}

/** The part of Markdown that runbooks use: headings, lists, and what `inline` knows. */
function blocks(text: string): ComponentChildren[] {
  return text.trim().split(/\n\n+/).map((block, at) => {
    const heading = /^(#+) (.*)/.exec(block);
    if (heading) return heading[1] === "#" ? <h3 key={at}>{inline(heading[2]!)}</h3> : <h4 key={at}>{inline(heading[2]!)}</h4>;
    if (block.startsWith("- ")) return <ul key={at}>{block.slice(2).split(/\n- /).map((item) => <li key={item}>{inline(item)}</li>)}</ul>;
    return <p key={at}>{inline(block)}</p>;
  });
}

function inline(text: string): ComponentChildren[] {
  return text.split(/(`[^`]+`|\*\*[^*]+\*\*|\[[^\]]+\]\([^)]+\))/).map((part, at) => {
    if (part.startsWith("`")) return <code key={at}>{part.slice(1, -1)}</code>;
    if (part.startsWith("**")) return <b key={at}>{part.slice(2, -2)}</b>;
    const link = /^\[(.*)\]\((.*)\.md\)$/.exec(part);
    if (!link) return part;
    const [, label, to] = link;
    return TEXTS.has(to!) ? <a key={at} href={`#/runbooks/${to}`}>{label}</a> : <span key={at}>{label} (<code>{to!.replace("..", "docs")}.md</code>)</span>;
  });
}
