"""WebAssembly modules: vad.wasm with its source and its builder."""
