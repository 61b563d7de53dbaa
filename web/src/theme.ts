// Light, dark, or as the system has it.

export type Theme = "light" | "dark" | "auto";

const NAME = "penstock.theme";
const system = matchMedia("(prefers-color-scheme: dark)");
const listeners = new Set<() => void>();

export function theme(): Theme {
  return (localStorage.getItem(NAME) as Theme) || "auto";
}

export function isDark(): boolean {
  return theme() === "auto" ? system.matches : theme() === "dark";
}

export function setTheme(wanted: Theme): void {
  localStorage.setItem(NAME, wanted);
  apply();
}

export function nextTheme(): void {
  setTheme(isDark() ? "light" : "dark");
}

export function onTheme(listener: () => void): () => void {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

export function apply(): void {
  document.documentElement.dataset.theme = isDark() ? "dark" : "light";
  for (const listener of listeners) listener();
}

system.addEventListener("change", apply);
