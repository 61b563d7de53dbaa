// One streamed chat completion, with its times as the browser saw them.

import { Refused, authorization, events, refusal } from "./api";

export interface Message {
  role: "system" | "user" | "assistant";
  content: string;
}

export interface Options {
  temperature: number;
  max_tokens: number;
  system: string;
}

export interface Answer {
  text: string;
  isOver: boolean;
  model?: string;
  problem?: string;
  replica?: string;
  ttft_s?: number;
  total_s?: number;
  tokens?: number;
  cached_tokens?: number;
  speed?: number; // tokens per second after the first
  finish?: string;
}

const SHOW_MS = 50; // the page is drawn no more often than this

/** Tells `told` as the answer grows; never throws. */
export async function stream(
  model: string, messages: Message[], options: Options, key: string, signal: AbortSignal, told: (answer: Answer) => void,
): Promise<void> {
  const answer: Answer = { text: "", isOver: false, model };
  const began = performance.now();
  const since = () => (performance.now() - began) / 1e3;
  let pieces = 0;
  let shown = 0;
  const measure = () => {
    answer.total_s = since();
    const made = answer.tokens ?? pieces;
    if (answer.ttft_s != null && made > 1) answer.speed = (made - 1) / Math.max(answer.total_s - answer.ttft_s, 1e-3);
  };
  try {
    const { temperature, max_tokens } = options;
    const body = { model, messages, temperature, max_tokens, stream: true, stream_options: { include_usage: true } };
    const headers = { "content-type": "application/json", ...authorization(key) };
    const response = await fetch("/v1/chat/completions", { method: "POST", headers, body: JSON.stringify(body), signal });
    if (!response.ok) throw await refusal(response);
    answer.replica = response.headers.get("x-penstock-replica") ?? undefined;
    for await (const { data } of events(response)) {
      if (data === "[DONE]") break;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Refused(200, chunk.error.message);
      const choice = chunk.choices?.[0];
      if (choice?.delta?.content) {
        answer.ttft_s ??= since();
        pieces += 1;
        answer.text += choice.delta.content;
        measure();
      }
      if (choice?.finish_reason) answer.finish = choice.finish_reason;
      if (chunk.usage) {
        answer.tokens = chunk.usage.completion_tokens;
        answer.cached_tokens = chunk.usage.prompt_tokens_details?.cached_tokens;
        measure();
      }
      if (performance.now() - shown >= SHOW_MS) {
        shown = performance.now();
        told({ ...answer });
      }
    }
  } catch (error) {
    if (signal.aborted) answer.finish = "stopped";
    else answer.problem = error instanceof Refused ? error.message : "The server does not answer.";
  }
  told({ ...answer, isOver: true });
}
