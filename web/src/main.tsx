import { render } from "preact";
import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import { Problem } from "./parts/basics";
import { Alerts } from "./pages/alerts";
import { Fleet } from "./pages/fleet";
import { Overview } from "./pages/overview";
import { Playground } from "./pages/playground";
import { ReplicasPage } from "./pages/replicas";
import { RolloutsPage } from "./pages/rollouts";
import { Requests } from "./pages/requests";
import { Runbook } from "./pages/runbook";
import { Routing } from "./pages/routing";
import { Tenants } from "./pages/tenants";
import { age } from "./format";
import { go, usePlace } from "./router";
import { store, useStore } from "./store";
import { apply, nextTheme } from "./theme";

const PAGES: [name: string, title: string][] = [
  ["overview", "Overview"], ["replicas", "Replicas"], ["fleet", "Fleet"], ["rollouts", "Rollouts"], ["requests", "Requests"], ["routing", "Routing"],
  ["tenants", "Tenants"], ["alerts", "Alerts"], ["playground", "Playground"],
];
const KEYS: [string, string][] = [
  ["1 – 9", "go to a page"], ["/", "filter requests, or write a prompt"], ["↑ ↓  j k", "move in a table"],
  ["Enter", "open what is selected"], ["t", "light or dark"], ["Esc", "close"], ["?", "these keys"],
];

function App() {
  const { phase, problem } = useStore();
  switch (phase) {
    case "login": return <Login problem={problem} />;
    case "closed": return <Closed problem={problem} />;
    case "starting": return <main class="alone"><p class="hint">Connecting …</p></main>;
    default: return store.at_s ? <Console /> : <Waiting problem={problem} />;
  }
}

function Console() {
  const { phase, problem, session, state } = useStore();
  const { page, id } = usePlace();
  const keys = useRef<HTMLDialogElement>(null);
  useLayoutEffect(() => {
    const pressed = (event: KeyboardEvent) => shortcut(event, keys.current!);
    addEventListener("keydown", pressed);
    return () => removeEventListener("keydown", pressed);
  }, []);
  const title = page === "runbooks" ? "Runbook" : (PAGES.find(([name]) => name === page)?.[1] ?? "Overview");
  const section = page === "runbooks" ? "alerts" : page;
  useEffect(() => {
    document.title = `${title} · penstock`;
    document.querySelector("nav [aria-current]")?.scrollIntoView({ inline: "center", block: "nearest" });
  }, [title]);
  return (
    <div class="shell">
      <a class="skip" href="#main" onClick={(event) => { event.preventDefault(); document.getElementById("main")?.focus(); }}>Skip to the content</a>
      <nav aria-label="Pages">
        <a class="brand" href="#/overview">
          <Mark /> penstock
        </a>
        <ul>
          {PAGES.map(([name, label], at) => (
            <li key={name}>
              <a href={`#/${name}`} aria-current={name === section ? "page" : undefined}>
                {label}
                {name === "alerts" && store.firing.length > 0 ? <span class="badge">{store.firing.length}</span> : <kbd>{at + 1}</kbd>}
              </a>
            </li>
          ))}
        </ul>
        <footer>
          <button class="plain" onClick={nextTheme} title="Light or dark (t)">Theme</button>
          <button class="plain" onClick={() => keys.current!.showModal()} title="Keys (?)">Keys</button>
          {session?.needs_key && <button class="plain" onClick={() => store.logout()}>Sign out</button>}
          <small>{session?.kind} {session?.version}, up {age(store.at_s - store.began_s)}</small>
        </footer>
      </nav>
      <main id="main" tabIndex={-1}>
        <div class="top">
          <h2>{title}</h2>
          <span class={`live ${phase}`} role="status">{phase === "live" ? "live" : "reconnecting"}</span>
          <span class="gap" />
          {["overview", "routing"].includes(page) && state.models.length > 1 && <ModelChoice />}
          {page === "overview" && <Minutes />}
        </div>
        {phase === "lost" && <Problem title="The connection is lost; what is shown is old.">{problem} It is tried again.</Problem>}
        <Page page={page} id={id} />
      </main>
      <dialog ref={keys} aria-label="Keys">
        <h3>Keys</h3>
        <dl>
          {KEYS.map(([key, what]) => <div key={key}><dt><kbd>{key}</kbd></dt><dd>{what}</dd></div>)}
        </dl>
        <form method="dialog"><button>Close</button></form>
      </dialog>
    </div>
  );
}

function Page({ page, id }: { page: string; id: string }) {
  switch (page) {
    case "replicas": return <ReplicasPage />;
    case "fleet": return <Fleet />;
    case "rollouts": return <RolloutsPage id={id} />;
    case "requests": return <Requests id={id} />;
    case "routing": return <Routing />;
    case "tenants": return <Tenants />;
    case "alerts": return <Alerts />;
    case "runbooks": return <Runbook name={id} />;
    case "playground": return <Playground />;
    default: return <Overview />;
  }
}

function ModelChoice() {
  const pools = Object.keys(store.series).filter(Boolean);
  return (
    <select aria-label="Model" value={store.model} onChange={(event) => store.set({ model: event.currentTarget.value })}>
      <option value="">All models</option>
      {pools.map((name) => <option key={name}>{name}</option>)}
    </select>
  );
}

function Minutes() {
  return (
    <div class="choice" role="group" aria-label="Time shown">
      {[1, 5, 15].map((minutes) => (
        <button key={minutes} aria-pressed={store.minutes === minutes} onClick={() => store.set({ minutes })}>
          {minutes} min
        </button>
      ))}
    </div>
  );
}

function Login({ problem }: { problem: string }) {
  const [key, setKey] = useState("");
  return (
    <main class="alone">
      <form class="card" onSubmit={(event) => { event.preventDefault(); if (key.trim()) store.login(key); }}>
        <h1><Mark /> penstock</h1>
        <label>
          Admin key
          <input type="password" name="key" autocomplete="current-password" autofocus placeholder="psa_…" value={key} onInput={(event) => setKey(event.currentTarget.value)} />
        </label>
        {problem && <Problem title="That did not work.">{problem}</Problem>}
        <button type="submit" disabled={!key.trim()}>Sign in</button>
        <p class="hint">Made with <code>penstock admins add NAME</code>. It stays in this tab and goes with it.</p>
      </form>
    </main>
  );
}

function Closed({ problem }: { problem: string }) {
  return (
    <main class="alone">
      <div class="card">
        <h1><Mark /> penstock</h1>
        <Problem title="The console is closed here.">{problem}</Problem>
      </div>
    </main>
  );
}

function Waiting({ problem }: { problem: string }) {
  return (
    <main class="alone">
      <div class="card">
        <h1><Mark /> penstock</h1>
        <Problem title="No connection.">{problem} It is tried again.</Problem>
      </div>
    </main>
  );
}

function Mark() {
  return (
    <svg class="mark" viewBox="0 0 32 32" aria-hidden="true">
      <rect width="32" height="32" rx="7" />
      <path d="M7 8h6c5 0 5 8 10 8h2M7 14h4c6 0 5 10 12 10h2" />
    </svg>
  );
}

function shortcut(event: KeyboardEvent, keys: HTMLDialogElement): void {
  const at = event.target as HTMLElement;
  if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|TEXTAREA|SELECT)$/.test(at.tagName)) {
    if (event.key === "Escape") at.blur();
    return;
  }
  const page = PAGES[Number(event.key) - 1];
  if (page) go(page[0]);
  else if (event.key === "t") nextTheme();
  else if (event.key === "?") keys.showModal();
  else if (event.key === "/") (document.getElementById("filter") ?? document.getElementById("prompt"))?.focus();
  else return;
  event.preventDefault();
}

apply();
void store.start();
render(<App />, document.getElementById("app")!);
