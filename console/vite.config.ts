import { fileURLToPath } from "node:url";
import { defineConfig } from "vite";

const server = process.env["ASR_SERVE_URL"] ?? "http://127.0.0.1:8000";

export default defineConfig({
  resolve: { alias: { "asr-serve": fileURLToPath(new URL("../clients/js/src/index.ts", import.meta.url)) } },
  base: "./", // pages and assets find each other below any prefix a proxy gives them
  build: {
    outDir: "../src/asr_serve/server/console/static",
    emptyOutDir: true,
    target: "es2022",
    assetsInlineLimit: 0, // the pages' policy allows no data: addresses for scripts
    modulePreload: { polyfill: false },
    reportCompressedSize: false,
    rolldownOptions: { input: { index: "index.html", status: "status.html" } },
  },
  server: {
    proxy: {
      "/v1": { target: server, ws: true }, // with the page's own Host: the server compares it with the Origin
      "/metrics": server,
      "/health": server,
      "/ready": server,
    },
  },
});
