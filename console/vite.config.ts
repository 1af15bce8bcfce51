import { readdirSync, readFileSync } from "node:fs";
import { fileURLToPath } from "node:url";
import { defineConfig, type Plugin } from "vite";

const server = process.env["ASR_SERVE_URL"] ?? "http://127.0.0.1:8000";

/** `<!--part top current="Status"-->` in a page stands for parts/top.html, with {{names}} filled in. */
const parts: Plugin = {
  name: "parts",
  transformIndexHtml: {
    order: "pre",
    handler: (page) =>
      page.replace(/ *<!--part (\w+)(.*?)-->\n/g, (_, file: string, given: string) => {
        const values = Object.fromEntries([...given.matchAll(/(\w+)="(.*?)"/g)].map(([, name, value]) => [name, value]));
        const html = readFileSync(new URL(`parts/${file}.html`, import.meta.url), "utf8");
        const filled = html.replace(/\{\{(\w+)\}\}/g, (_, name: string) => values[name] ?? "");
        return filled.replace(`>${values["current"]}</a>`, ` aria-current="page">${values["current"]}</a>`);
      }),
  },
};

export default defineConfig({
  plugins: [parts],
  resolve: { alias: { "asr-serve": fileURLToPath(new URL("../clients/js/src/index.ts", import.meta.url)) } },
  base: "./", // pages and assets find each other below any prefix a proxy gives them
  build: {
    outDir: "../src/asr_serve/server/console/static",
    emptyOutDir: true,
    target: "es2022",
    assetsInlineLimit: 0, // the pages' policy allows no data: addresses for scripts
    modulePreload: { polyfill: false },
    reportCompressedSize: false,
    rolldownOptions: {
      input: readdirSync(fileURLToPath(new URL(".", import.meta.url))).filter((name) => name.endsWith(".html")),
    },
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
