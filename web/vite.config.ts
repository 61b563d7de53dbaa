import { defineConfig } from "vite";

// Fixed names: the files are committed, and a change of one is to be a change and not a new file.
export default defineConfig({
  base: "/console/",
  // Elements are calls of h, whose children need no name: the page is half a kilobyte smaller.
  oxc: { jsx: { runtime: "classic", pragma: "h", pragmaFrag: "Fragment" }, jsxInject: 'import { h, Fragment } from "preact"' },
  build: {
    outDir: "../src/penstock/console/assets",
    emptyOutDir: true,
    assetsDir: ".",
    modulePreload: false,
    assetsInlineLimit: 0,
    rollupOptions: {
      output: { entryFileNames: "console.js", assetFileNames: "[name][extname]", chunkFileNames: "[name].js" },
    },
  },
  server: { fs: { allow: [".."] }, proxy: { "/console/v1": "http://127.0.0.1:8000", "/v1": "http://127.0.0.1:8000", "/admin": "http://127.0.0.1:8000" } },
});
