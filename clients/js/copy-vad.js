// vad.wasm comes with the package: the server's own file.
import { copyFileSync } from "node:fs";

copyFileSync(new URL("../../src/asr_serve/edge/wasm/vad.wasm", import.meta.url), new URL("dist/vad.wasm", import.meta.url));
