/** Pages in a headless Chromium, with the package served to them under a strict content policy. */

import { spawn } from "node:child_process";
import { existsSync, mkdtempSync, readFileSync, rmSync } from "node:fs";
import { createServer } from "node:http";
import { type AddressInfo } from "node:net";
import { tmpdir } from "node:os";
import { delimiter, join } from "node:path";

const NAMES = ["chromium", "chromium-browser", "google-chrome", "chrome"];
const DIST = join(import.meta.dirname, "../dist");
const WAIT_MS = 120_000;
const POLICY = "default-src 'none'; script-src 'self' 'wasm-unsafe-eval'; connect-src 'self' ws:";
const PAGE = "<!doctype html><title>test</title><script type=module src=/page.js></script>";

export const chromium =
  process.env["CHROMIUM"] ??
  process.env["PATH"]?.split(delimiter)
    .flatMap((folder) => NAMES.map((name) => join(folder, name)))
    .find(existsSync);

/** Run `script`, a module's body that may import /dist/index.js and ends in `tell(result)`. */
export async function inPage(script: string, flags: string[], host = "localhost"): Promise<unknown> {
  let tell!: (value: unknown) => void;
  let fail!: (reason: Error) => void;
  const told = new Promise<unknown>((resolve, reject) => ([tell, fail] = [resolve, reject]));
  const server = createServer((request, response) => {
    const path = request.url ?? "/";
    response.setHeader("Content-Security-Policy", POLICY);
    if (path === "/told") {
      const body: Buffer[] = [];
      request.on("data", (part: Buffer) => body.push(part));
      request.on("end", () => {
        tell(JSON.parse(Buffer.concat(body).toString()));
        response.end();
      });
    } else if (path === "/page.js") {
      response.setHeader("Content-Type", "text/javascript");
      response.end(`const tell = (value) => fetch("/told", { method: "POST", body: JSON.stringify(value) });\n${script}`);
    } else if (path.startsWith("/dist/") && existsSync(join(DIST, path.slice(6)))) {
      response.setHeader("Content-Type", "text/javascript");
      response.end(readFileSync(join(DIST, path.slice(6))));
    } else {
      response.setHeader("Content-Type", "text/html");
      response.end(PAGE);
    }
  }).listen(0, "127.0.0.1");
  await new Promise((resolve) => server.once("listening", resolve));
  const { port } = server.address() as AddressInfo;
  const profile = mkdtempSync(join(tmpdir(), "asr-serve-js-"));
  const always = ["--headless=new", "--no-sandbox", "--disable-gpu", `--user-data-dir=${profile}`, "--no-first-run"];
  const mapped = `--host-resolver-rules=MAP ${host} 127.0.0.1`;
  const browser = spawn(chromium!, [...always, mapped, ...flags, `http://${host}:${port}/`], {
    stdio: "ignore",
    detached: true, // a group of its own, which is ended as one: nobody is left who writes into the profile
  });
  const over = new Promise((resolve) => browser.once("exit", resolve));
  const timer = setTimeout(() => fail(new Error("the page told nothing")), WAIT_MS);
  try {
    return await told;
  } finally {
    clearTimeout(timer);
    process.kill(-browser.pid!, "SIGKILL");
    await over;
    server.close();
    server.closeAllConnections();
    rmSync(profile, { recursive: true, force: true, maxRetries: 20 });
  }
}
