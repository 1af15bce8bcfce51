import "../styles/page";
import "../../../src/asr_serve_tools/evaluate/evaluation_view.css";
import "../styles/models.css";

import { SpeechError } from "asr-serve";
import { showEvaluations } from "../../../src/asr_serve_tools/evaluate/evaluation_view.js";
import { address, authorization, get } from "../page/api";
import { byId, make } from "../page/dom";
import { askForKey } from "../page/key";
import { words } from "../page/problems";
import { themeButton } from "../page/theme";
import { count, language } from "../page/words";
import { part, sentences, type Route } from "./stages";

/** As many as the server sends at once. */
const MOST_RUNS = 200;
const MOST_LANGUAGES = 3;

interface ServedModel {
  id: string;
  state: string;
  languages: string[];
  parameters: number;
  licence: string;
  speaks: boolean;
}

interface Run {
  run_id: string;
  [figure: string]: unknown;
}

interface Clip {
  path: string;
  [figure: string]: unknown;
}

async function json<T>(route: string): Promise<T> {
  return (await (await get(route)).json()) as T;
}

/** Routes of the policy. None: there is no policy, or it is not for who has this key. */
async function routes(): Promise<Route[]> {
  const answer = await fetch(address("v1/policy"), { headers: authorization(), cache: "no-store" });
  return answer.ok ? ((await answer.json()) as { routes: Route[] }).routes : [];
}

function showServed(models: ServedModel[], policy: Route[]): void {
  const columns = ["Model", "State", ...(policy.length ? ["Policy"] : []), "Languages", "Parameters", "Licence"];
  const rows = models.map((model) => {
    const parts = policy.flatMap((route) => {
      const does = part(model.id, route);
      return does === undefined ? [] : [make("span", { class: `part ${does}` }, `${route.name}: ${does}`)];
    });
    const others = model.languages.length - MOST_LANGUAGES;
    const languages = model.languages.slice(0, MOST_LANGUAGES).map(language).join(", ");
    return make(
      "tr",
      {},
      make("th", { scope: "row" }, model.id),
      make("td", {}, `${model.state}${model.speaks ? ", speaks" : ""}`),
      ...(policy.length ? [make("td", { class: "parts" }, ...(parts.length ? parts : ["–"]))] : []),
      make("td", {}, others > 0 ? `${languages} and ${others} more` : languages),
      make("td", { class: "num" }, `${(model.parameters / 1e6).toFixed(model.parameters < 1e7 ? 1 : 0)} M`),
      make("td", {}, model.licence),
    );
  });
  const head = make("tr", {}, ...columns.map((name) => make("th", { scope: "col" }, name)));
  byId("models").replaceChildren(make("table", {}, make("thead", {}, head), make("tbody", {}, ...rows)));
  byId("routes").replaceChildren(...policy.map(sentences).filter(Boolean).map((text) => make("li", {}, text)));
}

async function showRuns(): Promise<void> {
  const { data, total } = await json<{ data: Run[]; total: number }>(`v1/evaluations?limit=${MOST_RUNS}`);
  if (!total) return teach("The file of evaluations has no run yet.");
  byId("teach").hidden = true;
  byId("about").textContent =
    `${data.length < total ? `The newest ${data.length} of ${total} runs` : count(total, "run")} of asr-serve eval. ` +
    "Intervals hold 95 % of 1,000 resamples of the clips.";
  byId("evaluations").replaceChildren();
  showEvaluations(byId("evaluations"), {
    runs: data,
    clips: (run, order, offset, limit) =>
      json<{ data: Clip[]; total: number }>(
        `v1/evaluations/${encodeURIComponent(String(run["run_id"]))}?order=${order}&offset=${offset}&limit=${limit}`,
      ),
    audio: async (run, clip) => {
      const route = `v1/evaluations/${encodeURIComponent(String(run["run_id"]))}/audio`;
      const file = await get(`${route}?path=${encodeURIComponent(String(clip["path"]))}`);
      return URL.createObjectURL(await file.blob());
    },
    words,
  });
}

function teach(why: string): void {
  byId("teach-why").textContent = why;
  byId("teach").hidden = false;
}

async function load(): Promise<void> {
  const problem = byId("problem");
  const otherKey = byId("other-key");
  problem.textContent = "";
  otherKey.hidden = true;
  try {
    const { data } = await json<{ data: ServedModel[] }>("v1/models"); // who has no key is asked for one here
    const served = data.filter((model) => model.state !== "not_loaded");
    showServed(served, []);
    const recognizer = served.find((model) => !model.speaks);
    if (recognizer) byId("teach-model").textContent = recognizer.id;
    try {
      await showRuns();
    } catch (failure) {
      if (!(failure instanceof SpeechError)) throw failure;
      if (failure.code === "no_evaluations") teach(words(failure));
      else problem.textContent = words(failure);
      otherKey.hidden = failure.code !== "not_allowed" && failure.code !== "invalid_api_key";
    }
    const policy = await routes(); // by now the key is an administrator's, where one is needed
    if (policy.length) showServed(served, policy);
  } catch (failure) {
    problem.textContent = words(failure);
    otherKey.hidden = !(failure instanceof SpeechError && failure.code === "invalid_api_key");
  }
}

byId("other-key").addEventListener("click", () => {
  void askForKey(false).then((given) => (given === undefined ? undefined : load()));
});
themeButton();
void load();
