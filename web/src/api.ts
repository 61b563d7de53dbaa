// Talking to the server. Keys live in this tab's sessionStorage: never in a URL, gone with the tab.

import type { Session } from "./types";

const ADMIN = "penstock.admin-key";
const TENANT = "penstock.tenant-key";

export const adminKey = stored(ADMIN);
export const tenantKey = stored(TENANT);

function stored(name: string) {
  return {
    get: () => sessionStorage.getItem(name) ?? "",
    set: (value: string) => (value ? sessionStorage.setItem(name, value) : sessionStorage.removeItem(name)),
  };
}

export class Refused extends Error {
  constructor(
    readonly status: number,
    message: string,
    readonly code = "",
  ) {
    super(message);
  }
}

export async function refusal(response: Response): Promise<Refused> {
  const text = await response.text().catch(() => "");
  try {
    const error = JSON.parse(text).error;
    return new Refused(response.status, String(error.message), String(error.code ?? error.type ?? ""));
  } catch {
    return new Refused(response.status, text.slice(0, 300) || `the server answered ${response.status}`);
  }
}

export function authorization(key: string): Record<string, string> {
  return key ? { authorization: `Bearer ${key}` } : {};
}

export async function ask(path: string, signal?: AbortSignal, options?: RequestInit): Promise<Response> {
  const headers = { ...authorization(adminKey.get()), "content-type": "application/json" };
  const response = await fetch(path, { headers, signal, cache: "no-store", ...options });
  if (!response.ok) throw await refusal(response);
  return response;
}

export async function change(method: "POST" | "PATCH" | "DELETE", path: string, body: object): Promise<void> {
  await ask(path, undefined, { method, body: JSON.stringify(body) });
}

export async function session(): Promise<Session> {
  return (await ask("/console/v1/session")).json();
}

export interface ServerEvent {
  event: string;
  data: string;
}

/** Server-sent events of a response: by fetch and not by EventSource, which cannot send a key. */
export async function* events(response: Response): AsyncGenerator<ServerEvent> {
  const reader = response.body!.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop()!;
    for (const block of blocks) {
      let event = "message";
      const data: string[] = [];
      for (const line of block.split("\n")) {
        if (line.startsWith("event:")) event = line.slice(6).trim();
        else if (line.startsWith("data:")) data.push(line.slice(5).trimStart());
      }
      if (data.length) yield { event, data: data.join("\n") };
    }
  }
}
