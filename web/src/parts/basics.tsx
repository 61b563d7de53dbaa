import type { ComponentChildren } from "preact";
import { useLayoutEffect, useRef } from "preact/hooks";

const TONES: Record<string, string> = {
  healthy: "good", ok: "good", closed: "good", resolved: "good",
  degraded: "warn", starting: "warn", restarting: "warn", stopped: "bad", draining: "warn", half_open: "warn", warning: "warn", ticket: "warn", refused: "warn", client_gone: "quiet",
  open: "bad", failed: "bad", critical: "bad", firing: "bad", page: "bad",
};

export function Pill({ state, children }: { state: string; children?: ComponentChildren }) {
  return <span class={`pill ${TONES[state] ?? "quiet"}`}>{children ?? state.replaceAll("_", " ")}</span>;
}

/** How full something is. Above 70 % it is a warning, above 90 % more than that. */
export function Bar({ share, label, isNeutral }: { share: number | null; label: string; isNeutral?: boolean }) {
  const at = Math.max(0, Math.min(1, share ?? 0));
  const tone = isNeutral || at < 0.7 ? "" : at < 0.9 ? "warn" : "bad";
  return (
    <span class="bar" role="meter" aria-valuemin={0} aria-valuemax={100} aria-valuenow={Math.round(at * 100)} aria-label={label}>
      <i class={tone} style={{ width: `${at * 100}%` }} />
    </span>
  );
}

export function Empty({ title, children }: { title: string; children?: ComponentChildren }) {
  return (
    <div class="empty">
      <svg viewBox="0 0 48 24" aria-hidden="true">
        <path d="M2 8c8 0 8 8 16 8s8-8 14-8 8 8 14 8" />
      </svg>
      <h3>{title}</h3>
      {children && <p>{children}</p>}
    </div>
  );
}

export function Figure({ name, value, unit, tone = "" }: { name: string; value: string; unit: ComponentChildren; tone?: string }) {
  return (
    <div class="figure">
      <span class="name">{name}</span>
      <b class={tone}>{value}</b>
      <span class="unit">{unit}</span>
    </div>
  );
}

export function Problem({ title, children }: { title: string; children?: ComponentChildren }) {
  return (
    <div class="problem" role="alert">
      <b>{title}</b>
      {children && <span>{children}</span>}
    </div>
  );
}

export function Modal({ title, onClose, children }: { title: string; onClose: () => void; children: ComponentChildren }) {
  const dialog = useRef<HTMLDialogElement>(null);
  useLayoutEffect(() => {
    const shown = dialog.current!;
    shown.showModal();
    return () => shown.close(); // the focus goes back to where it was
  }, []);
  return (
    <dialog ref={dialog} aria-label={title} onClose={onClose}>
      <h3>{title}</h3>
      {children}
    </dialog>
  );
}

export function Card({ title, aside, action, children }: {
  title: string;
  aside?: ComponentChildren;
  action?: ComponentChildren;
  children: ComponentChildren;
}) {
  return (
    <section class="card" aria-label={title}>
      <header>
        <h3>{title}</h3>
        {aside && <span class="hint">{aside}</span>}
        {action}
      </header>
      {children}
    </section>
  );
}

export interface Column<T> {
  name: string;
  isNumber?: boolean;
  hint?: string;
  show: (row: T) => ComponentChildren;
}

/** On a phone every row is a card, and its cells say what they are. */
export function Table<T>({ columns, rows, id, onOpen, label, tone }: {
  columns: Column<T>[];
  rows: T[];
  id: (row: T) => string;
  tone?: (row: T) => string;
  onOpen?: (row: T) => void;
  label: string;
}) {
  const move = (event: KeyboardEvent, row: T) => {
    const at = event.currentTarget as HTMLElement;
    if (event.key === "Enter" || event.key === " ") onOpen?.(row);
    else if (event.key === "ArrowDown" || event.key === "j") (at.nextElementSibling as HTMLElement | null)?.focus();
    else if (event.key === "ArrowUp" || event.key === "k") (at.previousElementSibling as HTMLElement | null)?.focus();
    else return;
    event.preventDefault();
  };
  return (
    <div class="scroll">
      <table aria-label={label}>
        <thead>
          <tr>
            {columns.map((column) => (
              <th key={column.name} scope="col" class={column.isNumber ? "number" : ""} title={column.hint}>
                {column.name}
              </th>
            ))}
          </tr>
        </thead>
        <tbody>
          {rows.map((row) => (
            <tr
              key={id(row)}
              class={[onOpen && "opens", tone?.(row)].filter(Boolean).join(" ")}
              tabIndex={onOpen ? 0 : undefined}
              onClick={onOpen && (() => onOpen(row))}
              onKeyDown={onOpen && ((event) => move(event, row))}
            >
              {columns.map((column) => (
                <td key={column.name} data-name={column.name} class={column.isNumber ? "number" : ""}>
                  {column.show(row)}
                </td>
              ))}
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}
