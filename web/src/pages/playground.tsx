import { useEffect, useRef, useState } from "preact/hooks";
import { Problem } from "../parts/basics";
import { tenantKey } from "../api";
import { compact, count, duration } from "../format";
import { type Answer, type Message, type Options, stream } from "../talk";
import { useStore } from "../store";

interface Turn {
  prompt: string;
  answers: Answer[]; // by side
}

const NOTHING: Answer = { text: "", isOver: false };

/** Talk with one model, or with two at once. What is said stays in this page and goes when it is left. */
export function Playground() {
  const store = useStore();
  const names = store.state.models.map((model) => model.name);
  const [models, setModels] = useState<string[]>(["", ""]);
  const [isCompared, compare] = useState(false);
  const [options, setOptions] = useState<Options>({ temperature: 0.7, max_tokens: 256, system: "" });
  const [key, setKey] = useState(tenantKey.get());
  const [turns, setTurns] = useState<Turn[]>([]);
  const [prompt, setPrompt] = useState("");
  const running = useRef<AbortController | null>(null);
  const [isRunning, setRunning] = useState(false);
  const end = useRef<HTMLDivElement>(null);
  const sides = isCompared ? [0, 1] : [0];
  const model = (side: number) => models[side] || names[Math.min(side, names.length - 1)] || "";

  useEffect(() => () => running.current?.abort(), []);
  useEffect(() => end.current?.scrollIntoView({ block: "nearest" }), [turns]);

  const run = async () => {
    const asked = prompt.trim();
    if (!asked || isRunning || !names.length) return;
    const before = turns;
    const turn: Turn = { prompt: asked, answers: sides.map(() => NOTHING) };
    const ended = (running.current = new AbortController());
    setRunning(true);
    setPrompt("");
    setTurns([...before, turn]);
    await Promise.all(
      sides.map((side) =>
        stream(model(side), messages(options.system, before, side, asked), options, tenantKey.get(), ended.signal, (answer) => {
          turn.answers = turn.answers.map((one, at) => (at === side ? answer : one));
          setTurns([...before, { ...turn }]);
        }),
      ),
    );
    setRunning(false);
  };

  const number = (name: "temperature" | "max_tokens", label: string, step: number, most: number) => (
    <label>
      {label}
      <input
        type="number" min={0} max={most} step={step} value={options[name]}
        onInput={(event) => setOptions({ ...options, [name]: Number(event.currentTarget.value) })}
      />
    </label>
  );

  return (
    <section class="playground" aria-label="Playground">
      <div class="card settings">
        {sides.map((side) => (
          <label key={side}>
            {isCompared ? `Model ${"AB"[side]}` : "Model"}
            <select value={model(side)} onChange={(event) => setModels(models.map((one, at) => (at === side ? event.currentTarget.value : one)))}>
              {names.map((name) => <option key={name}>{name}</option>)}
            </select>
          </label>
        ))}
        {number("temperature", "Temperature", 0.1, 2)}
        {number("max_tokens", "Max tokens", 1, 32768)}
        <label class="wide">
          System prompt
          <input value={options.system} placeholder="optional" onInput={(event) => setOptions({ ...options, system: event.currentTarget.value })} />
        </label>
        {store.session?.needs_tenant_key && (
          <label class="wide">
            Tenant's key
            <input
              type="password" autocomplete="off" placeholder="psk_…" value={key}
              onInput={(event) => {
                setKey(event.currentTarget.value);
                tenantKey.set(event.currentTarget.value.trim());
              }}
            />
          </label>
        )}
        <label class="check">
          <input type="checkbox" checked={isCompared} onChange={(event) => { compare(event.currentTarget.checked); setTurns([]); }} />
          Compare two side by side
        </label>
      </div>

      <div class={`thread ${isCompared ? "compared" : ""}`} aria-live="polite">
        {!turns.length && <Welcome isCompared={isCompared} pick={setPrompt} />}
        {turns.map((turn, at) => (
          <div key={at} class="turn">
            <p class="prompt">{turn.prompt}</p>
            <div class="answers">
              {turn.answers.map((answer, side) => (
                <AnswerCard key={side} answer={answer} model={answer.model ?? model(side)} />
              ))}
            </div>
          </div>
        ))}
        <div class="end" ref={end} />
      </div>

      <form class="card composer" onSubmit={(event) => { event.preventDefault(); void run(); }}>
        <textarea
          id="prompt" rows={3} value={prompt} placeholder="Ask something" aria-label="Prompt"
          onInput={(event) => setPrompt(event.currentTarget.value)}
          onKeyDown={(event) => {
            if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
              event.preventDefault();
              void run();
            }
          }}
        />
        <div class="actions">
          <span class="hint">
            <kbd>Enter</kbd> sends, <kbd>Shift</kbd> <kbd>Enter</kbd> is a new line. Nothing is stored.
          </span>
          <button type="button" class="plain" disabled={!turns.length || isRunning} onClick={() => setTurns([])}>
            New chat
          </button>
          {isRunning ? (
            <button type="button" onClick={() => running.current?.abort()}>Stop</button>
          ) : (
            <button type="submit" disabled={!prompt.trim() || !names.length}>Send</button>
          )}
        </div>
      </form>
    </section>
  );
}

const IDEAS = ["Why is the sky blue?", "Explain a KV cache to a plumber.", "Write a haiku about water under pressure."];

function Welcome({ isCompared, pick }: { isCompared: boolean; pick: (text: string) => void }) {
  return (
    <div class="welcome">
      <h3>{isCompared ? "One prompt, two answers" : "Try the model"}</h3>
      <p>{isCompared ? "Both get the same words at the same moment; times and speeds are side by side." : "Answers stream as they are made, with their time to first token and their speed."}</p>
      <div>
        {IDEAS.map((idea) => (
          <button key={idea} class="plain idea" onClick={() => { pick(idea); document.getElementById("prompt")?.focus(); }}>
            {idea}
          </button>
        ))}
      </div>
    </div>
  );
}

function AnswerCard({ answer, model }: { answer: Answer; model: string }) {
  return (
    <article class="card answer" aria-busy={!answer.isOver}>
      <header>
        <h3>{model}</h3>
        {answer.replica && <span class="hint">{answer.replica}</span>}
      </header>
      {answer.problem && <Problem title="No answer.">{answer.problem}</Problem>}
      {(answer.text || !answer.problem) && (
        <p class={`text ${answer.isOver ? "" : "streaming"}`}>{answer.text || (answer.isOver ? "(an empty answer)" : "")}</p>
      )}
      <footer>
        <span>TTFT <b class="ttft">{duration(answer.ttft_s)}</b></span>
        <span><b class="speed">{answer.speed == null ? "–" : compact(Math.round(answer.speed * 10) / 10)}</b> tokens/s</span>
        <span><b>{count(answer.tokens)}</b> tokens</span>
        <span>total <b>{duration(answer.total_s)}</b></span>
        {answer.cached_tokens ? <span><b>{count(answer.cached_tokens)}</b> prompt tokens from the cache</span> : null}
        {answer.finish && answer.finish !== "stop" && <span>ended: {answer.finish}</span>}
      </footer>
    </article>
  );
}

function messages(system: string, turns: Turn[], side: number, prompt: string): Message[] {
  const found: Message[] = system ? [{ role: "system", content: system }] : [];
  for (const turn of turns) {
    const answer = turn.answers[side];
    if (!answer?.text) continue;
    found.push({ role: "user", content: turn.prompt }, { role: "assistant", content: answer.text });
  }
  return [...found, { role: "user", content: prompt }];
}
