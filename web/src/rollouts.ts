// Rollouts as the admin API tells them: asked for while their page is open. Orders go the same way.

import { useEffect, useState } from "preact/hooks";
import { ask } from "./api";
import { store } from "./store";
import type { Rollout, RolloutEntry } from "./types";

const EVERY_S = 2;

export interface Rollouts {
  rollouts: Rollout[] | null; // the newest first; null: not yet known
  problem: string;
  look: () => void; // at once, after an order
}

export function useRollouts(): Rollouts {
  const [found, set] = useState<Omit<Rollouts, "look">>({ rollouts: null, problem: "" });
  const [turn, look] = useState(0);
  useEffect(() => {
    if (store.session?.kind !== "gateway") return;
    return follow("/admin/v1/rollouts", (told) => set({ rollouts: told.rollouts, problem: "" }), (problem) => set((last) => ({ ...last, problem })));
  }, [turn]);
  return { ...found, look: () => look((at) => at + 1) };
}

/** The story of one rollout, the newest first. `changed_at`: it is read again when the rollout has changed. */
export function useStory(id: string, phase: string, step: number | undefined): RolloutEntry[] | null {
  const [story, set] = useState<RolloutEntry[] | null>(null);
  useEffect(() => {
    const gone = new AbortController();
    ask(`/admin/v1/rollouts/${id}/story`, gone.signal)
      .then((answer) => answer.json())
      .then((told) => set([...told.story].reverse()))
      .catch(() => undefined); // it is shown as it was; the list above says what is wrong
    return () => gone.abort();
  }, [id, phase, step]);
  return story;
}

function follow(path: string, told: (found: any) => void, failed: (problem: string) => void): () => void {
  const gone = new AbortController();
  void (async () => {
    while (!gone.signal.aborted) {
      try {
        told(await (await ask(path, gone.signal)).json());
      } catch (error) {
        if (gone.signal.aborted) return;
        failed(error instanceof Error ? error.message : String(error));
      }
      await new Promise((resume) => setTimeout(resume, EVERY_S * 1e3));
    }
  })();
  return () => gone.abort();
}
