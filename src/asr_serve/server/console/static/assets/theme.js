// Before the first paint: the colours chosen earlier. A file of its own, since the page's policy allows no inline script.
try {
  const chosen = localStorage.getItem("asr-serve.theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
} catch {
  // storage is switched off: the system's colours
}
