import { useState } from "preact/hooks";
import { Card, Empty, Modal, Pill, Problem, Table } from "../parts/basics";
import { useChange } from "../parts/replica_changes";
import { Gates } from "../parts/rollout_gates";
import { change } from "../api";
import { age, clock, duration } from "../format";
import { useRollouts, useStory } from "../rollouts";
import { go } from "../router";
import { useStore } from "../store";
import type { Rollout } from "../types";

const TONES: Record<string, string> = { waiting: "warning", watching: "ok", paused: "warning", holding: "ok", promoted: "ok", aborting: "bad", aborted: "failed" };

export function RolloutsPage({ id }: { id: string }) {
  const store = useStore();
  const { rollouts, problem, look } = useRollouts();
  if (store.session?.kind !== "gateway") return <None>Rollouts are seen at a gateway; this is one replica.</None>;
  if (problem && !rollouts) return <Problem title="Rollouts cannot be read.">{problem}</Problem>;
  if (!rollouts) return <p class="hint">Reading the store …</p>;
  if (!rollouts.length) return <None>A new version takes over step by step, and goes back by itself if it is worse.</None>;
  const shown = rollouts.find((one) => one.id === id) ?? rollouts.find((one) => !one.is_over) ?? rollouts[0]!;
  return (
    <>
      {problem && <Problem title="Rollouts cannot be read; what is shown is old.">{problem}</Problem>}
      <View key={shown.id} rollout={shown} onOrdered={look} />
      <Card title="All rollouts" aside="the newest first">
        <Table
          label="All rollouts" rows={rollouts} id={(one) => one.id} onOpen={(one) => go(`rollouts/${one.id}`)}
          columns={[
            { name: "Model", show: (one) => one.model },
            { name: "Versions", show: (one) => `${one.from} → ${one.to}` },
            { name: "Phase", show: (one) => <Pill state={TONES[one.phase] ?? one.phase}>{one.phase}</Pill> },
            { name: "Started", show: (one) => `${new Date(one.started_at * 1e3).toLocaleDateString("en-GB")} ${clock(one.started_at)}` },
            { name: "By", show: (one) => one.by || "–" },
          ]}
        />
      </Card>
    </>
  );
}

function None({ children }: { children: string }) {
  return (
    <Card title="Rollouts">
      <Empty title="No rollouts">{children} <code>penstock rollout start MODEL --to VERSION</code> begins one.</Empty>
    </Card>
  );
}

function View({ rollout, onOrdered }: { rollout: Rollout; onOrdered: () => void }) {
  const store = useStore();
  const story = useStory(rollout.id, `${rollout.phase} ${rollout.reason}`, rollout.step);
  const gates = rollout.gates ?? [];
  return (
    <>
      <Card
        title={`${rollout.model}: ${rollout.from} → ${rollout.to}`}
        aside={rollout.since ? `${rollout.phase} for ${age(store.at_s - rollout.since)}` : rollout.phase}
        action={<Pill state={TONES[rollout.phase] ?? rollout.phase}>{rollout.phase}</Pill>}
      >
        {rollout.steps && (
          <ol class="rollout-steps" aria-label="Steps">
            {rollout.steps.map((step, at) => (
              <li key={at} class={at < rollout.step! || rollout.phase === "promoted" || rollout.phase === "holding" ? "done" : ""} aria-current={at === rollout.step && !rollout.is_over ? "step" : undefined}>
                <b>{step.title}</b>
                <small>{duration(step.min_s)} to {duration(step.max_s)}</small>
              </li>
            ))}
          </ol>
        )}
        <p>{rollout.reason}</p>
        {rollout.hands_off && <p class="warn">The shares were changed by hand. Resume orders the step's anew.</p>}
        {!rollout.is_over && <Orders rollout={rollout} onOrdered={onOrdered} />}
      </Card>
      {gates.length > 0 && (
        <Card title="Gates" aside={`${rollout.to} against ${rollout.from}; the line is the margin`}>
          <Gates gates={gates} />
        </Card>
      )}
      <Card title="Story" aside="the newest first">
        {(story ?? []).map((entry) => (
          <article key={`${entry.at} ${entry.what}`} class="entry">
            <time>{clock(entry.at)}</time>
            <b>{entry.what}</b>
            <span>step {entry.step + 1}{entry.by && `, by ${entry.by}`}</span>
            <p>{entry.reason}</p>
            {entry.gates.length > 0 && (
              <details>
                <summary>{entry.gates.length} gates</summary>
                <Gates gates={entry.gates} />
              </details>
            )}
          </article>
        ))}
      </Card>
    </>
  );
}

function Orders({ rollout, onOrdered }: { rollout: Rollout; onOrdered: () => void }) {
  const { isBusy, problem, make } = useChange();
  const [asks, ask] = useState<"" | "abort" | "promote">("");
  const order = async (verb: string) => {
    if (await make(() => change("POST", `/admin/v1/rollouts/${rollout.id}/${verb}`, {}))) {
      ask("");
      onOrdered();
    }
  };
  return (
    <>
      {problem && <Problem title="It was not ordered.">{problem}</Problem>}
      {rollout.ordered && <p class="hint" role="status">{rollout.ordered} is ordered.</p>}
      <div class="actions">
        {rollout.phase === "paused"
          ? <button class="plain" disabled={isBusy} onClick={() => order("resume")}>Resume</button>
          : rollout.phase !== "holding" && <button class="plain" disabled={isBusy} onClick={() => order("pause")}>Pause</button>}
        {rollout.phase !== "holding" && <button class="plain" disabled={isBusy} onClick={() => ask("promote")}>Promote</button>}
        <button class="danger" disabled={isBusy} onClick={() => ask("abort")}>Abort</button>
      </div>
      {asks && (
        <Modal title={asks === "abort" ? `Back to ${rollout.from}?` : "Pass this step?"} onClose={() => ask("")}>
          <p>
            {asks === "abort"
              ? `${rollout.model} has the shares from before the rollout at once, on every gateway.`
              : `The next step of ${rollout.to} begins, whatever the gates say.`}
          </p>
          <div class="actions">
            <button type="button" class="plain" autofocus onClick={() => ask("")}>Cancel</button>
            <button type="button" class={asks === "abort" ? "danger" : ""} disabled={isBusy} onClick={() => order(asks)}>{asks === "abort" ? "Abort" : "Promote"}</button>
          </div>
        </Modal>
      )}
    </>
  );
}
