import { useEffect, useRef, useState } from "preact/hooks";
import uPlot from "uplot";
import "uplot/dist/uPlot.min.css";
import { store } from "../store";
import { onTheme } from "../theme";
import type { Value } from "../types";

export interface Line {
  label: string;
  column: string;
  color: string; // a CSS variable's name
  isArea?: boolean;
  isOff?: boolean; // until it is asked for
}

interface Props {
  title: string;
  hint?: string;
  lines: Line[];
  format: (value: Value | undefined) => string;
  target?: Value; // drawn as a line across
  targetLabel?: string;
  rate_s?: number; // the columns are counts: so many per second are drawn, over so many seconds
}

const HEIGHT = 168;

/** The last minutes of some columns. It follows the store by itself: a chart is made once and given data. */
export function Chart({ title, hint, lines, format, target, targetLabel, rate_s }: Props) {
  const place = useRef<HTMLDivElement>(null);
  const aim = useRef<{ value: Value; label: string }>({ value: null, label: "" });
  aim.current = { value: target ?? null, label: targetLabel ?? "" };
  const [shown, show] = useState<(Value | undefined)[]>([]);
  const [isOn, turn] = useState(lines.map((line) => !line.isOff));
  const made = useRef<uPlot | null>(null);
  const [isEmpty, setEmpty] = useState(false);

  useEffect(() => {
    const box = place.current!;
    let chart: uPlot | null = null;
    const draw = () => {
      const data = window_(lines, rate_s);
      if (chart) chart.setData(data as uPlot.AlignedData);
      setEmpty(data.slice(1).every((column) => column.every((value) => value == null)));
      const at = chart?.cursor.idx;
      show(data.slice(1).map((column) => (at != null ? column[at] : column.at(-1))) as Value[]);
    };
    const make = () => {
      chart?.destroy();
      chart = new uPlot(options(box, lines, format, aim), window_(lines, rate_s) as uPlot.AlignedData, box);
      made.current = chart;
      draw();
    };
    make();
    const resized = new ResizeObserver(() => chart?.setSize({ width: box.clientWidth, height: HEIGHT }));
    resized.observe(box);
    const unsubscribe = store.subscribe(draw);
    const unthemed = onTheme(make);
    box.addEventListener("mousemove", draw);
    box.addEventListener("mouseleave", draw);
    return () => {
      resized.disconnect();
      unsubscribe();
      unthemed();
      chart?.destroy();
    };
  }, []);

  const summary = lines.map((line, at) => `${line.label} ${format(shown[at])}`).join(", ");
  return (
    <section class="card chart" aria-label={title}>
      <header>
        <h3>{title}</h3>
        {hint && <span class="hint">{hint}</span>}
      </header>
      <ul class="legend">
        {lines.map((line, at) => (
          <li key={line.column}>
            <button
              aria-pressed={isOn[at]} title={isOn[at] ? "Hide" : "Show"}
              onClick={() => {
                made.current?.setSeries(at + 1, { show: !isOn[at] });
                turn(isOn.map((one, other) => (other === at ? !one : one)));
              }}
            >
              <i class={`swatch ${line.color}`} />
              {line.label} <b>{format(shown[at])}</b>
            </button>
          </li>
        ))}
        {target != null && (
          <li>
            <i class="swatch target" />
            {targetLabel} <b>{format(target)}</b>
          </li>
        )}
      </ul>
      <div class="plot" ref={place} role="img" aria-label={`${title}: ${summary}`}>
        {isEmpty && <span class="nothing">nothing in these minutes</span>}
      </div>
    </section>
  );
}

/** Times, then the columns, of the minutes that are shown. */
function window_(lines: Line[], rate_s: number | undefined): (number | Value)[][] {
  const size = Math.min(store.times.length, store.minutes * 60);
  const times = store.times.slice(store.times.length - size);
  const columns = lines.map(({ column }) => {
    const values = (rate_s ? store.rates(column, rate_s) : store.column(column)).slice(-size);
    return [...new Array<null>(size - values.length).fill(null), ...values];
  });
  return [times, ...columns];
}

function options(
  box: HTMLElement,
  lines: Line[],
  format: (value: Value) => string,
  aim: { current: { value: Value; label: string } },
): uPlot.Options {
  const css = getComputedStyle(document.documentElement);
  const color = (name: string) => css.getPropertyValue(`--${name}`).trim();
  const axis = { stroke: color("muted"), font: "11px system-ui, sans-serif", grid: { stroke: color("line"), width: 1 } };
  return {
    width: box.clientWidth,
    height: HEIGHT,
    padding: [8, 22, 0, 0],
    legend: { show: false },
    cursor: { y: false, points: { size: 6 }, sync: { key: "time" }, drag: { x: false, y: false } },
    scales: {
      x: { range: () => [store.at_s - store.minutes * 60, store.at_s] },
      y: { range: (_, __, most) => [0, Math.max(1.15 * (most ?? 0), 1.15 * (aim.current.value ?? 0)) || 1] },
    },
    axes: [
      { ...axis, grid: { show: false }, ticks: { show: false }, size: 24, space: 56, values: (_, at) => at.map(minute) },
      { ...axis, ticks: { show: false }, size: 58, space: 34, values: (_, at) => at.map((value) => format(value)) },
    ],
    series: [
      {},
      ...lines.map(
        (line): uPlot.Series => ({
          stroke: color(line.color),
          fill: line.isArea ? `${color(line.color)}1f` : undefined,
          width: 1.75,
          points: { show: false },
          show: !line.isOff,
        }),
      ),
    ],
    hooks: { draw: [(chart) => across(chart, aim.current.value, color("bad"))] },
  };
}

export function minute(at_s: number): string {
  const at = new Date(at_s * 1e3);
  const two = (value: number) => String(value).padStart(2, "0");
  return `${two(at.getHours())}:${two(at.getMinutes())}${at.getSeconds() ? `:${two(at.getSeconds())}` : ""}`;
}

function across(chart: uPlot, value: Value, color: string): void {
  if (value == null) return;
  const { ctx, bbox } = chart;
  const y = Math.round(chart.valToPos(value, "y", true)) + 0.5;
  ctx.save();
  ctx.strokeStyle = color;
  ctx.lineWidth = devicePixelRatio;
  ctx.setLineDash([5 * devicePixelRatio, 4 * devicePixelRatio]);
  ctx.beginPath();
  ctx.moveTo(bbox.left, y);
  ctx.lineTo(bbox.left + bbox.width, y);
  ctx.stroke();
  ctx.restore();
}
