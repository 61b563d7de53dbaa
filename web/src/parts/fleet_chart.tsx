import { useEffect, useRef, useState } from "preact/hooks";
import type { ComponentChildren } from "preact";
import uPlot from "uplot";
import { minute } from "./chart";
import { onTheme } from "../theme";
import type { Value } from "../types";

export interface Series {
  label: string;
  color: string; // a CSS variable's name
  values: Value[];
  kind: "line" | "dashed" | "area" | "stacked" | "upper"; // upper: the space below it, down to the series after it, is a band
  isStepped?: boolean;
}

interface Props {
  title: string;
  hint?: string;
  times: number[];
  range: [from: number, to: number];
  series: Series[];
  format: (value: Value | undefined) => string;
  children?: ComponentChildren; // over the plot
}

const HEIGHT = 190;

/** Series over hours. Stacked ones stand on each other, the first at the bottom. */
export function FleetChart({ title, hint, times, range, series, format, children }: Props) {
  const place = useRef<HTMLDivElement>(null);
  const chart = useRef<uPlot | null>(null);
  const latest = useRef({ times, range, series });
  latest.current = { times, range, series };
  const [at, setAt] = useState<number | null>(null);

  useEffect(() => {
    const box = place.current!;
    const make = () => {
      chart.current?.destroy();
      chart.current = new uPlot(options(box, latest, format, setAt), drawn(latest.current), box);
    };
    make();
    const resized = new ResizeObserver(() => chart.current?.setSize({ width: box.clientWidth, height: HEIGHT }));
    resized.observe(box);
    const unthemed = onTheme(make);
    return () => {
      resized.disconnect();
      unthemed();
      chart.current?.destroy();
    };
  }, [series.map((one) => one.label).join()]);
  useEffect(() => { chart.current?.setData(drawn(latest.current)); }, [times, range[0], range[1], series]);

  const value = (one: Series) => format(one.values[at ?? one.values.length - 1]);
  const shown = series.filter((one) => one.label);
  return (
    <section class="card chart" aria-label={title}>
      <header>
        <h3>{title}</h3>
        {hint && <span class="hint">{hint}</span>}
      </header>
      <ul class="legend">
        {shown.map((one) => (
          <li key={one.label}>
            <i class={`swatch ${one.color} ${one.kind}`} />
            {one.label} <b>{value(one)}</b>
          </li>
        ))}
      </ul>
      <div class="plot tall" ref={place} role="img" aria-label={`${title}: ${shown.map((one) => `${one.label} ${value(one)}`).join(", ")}`}>
        {!times.length && <span class="nothing">nothing in these hours</span>}
      </div>
      {children}
    </section>
  );
}

type Latest = { current: { times: number[]; range: [number, number]; series: Series[] } };

/** Times, then what is drawn: of stacked series the sums so far, the highest first so that lower ones lie over it. */
function drawn({ times, series }: Latest["current"]): uPlot.AlignedData {
  const sums: Value[][] = [];
  for (const one of series.filter(({ kind }) => kind === "stacked")) {
    const below = sums.at(-1);
    sums.push(one.values.map((value, at) => (value == null ? null : value + (below?.[at] ?? 0))));
  }
  let stacked = 0;
  return [times, ...series.map((one) => (one.kind === "stacked" ? sums[stacked++]! : one.values))] as uPlot.AlignedData;
}

function options(box: HTMLElement, latest: Latest, format: (value: Value) => string, point: (at: number | null) => void): uPlot.Options {
  const css = getComputedStyle(document.documentElement);
  const color = (name: string) => css.getPropertyValue(`--${name}`).trim();
  const axis = { stroke: color("muted"), font: "11px system-ui, sans-serif", grid: { stroke: color("line"), width: 1 } };
  const series = latest.current.series;
  const bands = series.flatMap((one, at): uPlot.Band[] => {
    if (one.kind === "stacked" && at > 0) return [{ series: [at + 1, at], fill: `${color(one.color)}88` }];
    return one.kind === "upper" ? [{ series: [at + 1, at + 2], fill: `${color(one.color)}26` }] : [];
  });
  return {
    width: box.clientWidth,
    height: HEIGHT,
    padding: [14, 22, 0, 0],
    legend: { show: false },
    cursor: { y: false, points: { size: 6 }, sync: { key: "fleet" }, drag: { x: false, y: false } },
    scales: {
      x: { range: () => latest.current.range },
      y: { range: (_, __, most) => [0, 1.15 * (most ?? 0) || 1] },
    },
    axes: [
      { ...axis, grid: { show: false }, ticks: { show: false }, size: 24, space: 56, values: (_, at) => at.map(minute) },
      { ...axis, ticks: { show: false }, size: 58, space: 34, values: (_, at) => at.map((value) => format(value)) },
    ],
    bands,
    series: [
      {},
      ...series.map(
        (one, at): uPlot.Series => ({
          stroke: color(one.color),
          fill: one.kind === "area" || (one.kind === "stacked" && at === 0) ? `${color(one.color)}${one.kind === "area" ? "1f" : "88"}` : undefined,
          width: one.kind === "upper" || one.kind === "stacked" ? 0 : 1.75,
          dash: one.kind === "dashed" ? [5, 4] : undefined,
          paths: one.isStepped ? uPlot.paths.stepped!({ align: 1 }) : undefined,
          points: { show: false },
        }),
      ),
    ],
    hooks: { setCursor: [(chart) => point(chart.cursor.idx ?? null)] },
  };
}
