// Where the page is, kept behind the # so that a reload and the back button do what they should.

import { useLayoutEffect, useState } from "preact/hooks";

export interface Place {
  page: string;
  id: string;
}

function place(): Place {
  const [page = "", id = ""] = location.hash.replace(/^#\/?/, "").split("/");
  return { page: page || "overview", id: decodeURIComponent(id) };
}

export function go(to: string): void {
  location.hash = `#/${to}`;
}

export function usePlace(): Place {
  const [at, set] = useState(place);
  useLayoutEffect(() => {
    const moved = () => set(place());
    addEventListener("hashchange", moved);
    return () => removeEventListener("hashchange", moved);
  }, []);
  return at;
}
