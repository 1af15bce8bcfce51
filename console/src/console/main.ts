import "../styles/page";
import "../styles/console.css";
import "../styles/paper.css";
import "../styles/empty.css";
import "../styles/rail.css";
import "../styles/dock.css";
import "../styles/switch.css";
import "../styles/rich.css";

import { byId } from "../page/dom";
import { themeButton } from "../page/theme";
import { tour } from "../page/tour";
import { files } from "./drop";
import { Share } from "../share/share";
import { Keeper } from "./keep";
import { Recordings } from "./recordings";
import { sheet } from "./sheet";
import { shortcuts } from "./shortcuts";
import { Stage } from "./stage";
import { Talking } from "./talking";

const SKIP_S = 5;

const stage = new Stage();
const talking = new Talking(stage);
const recordings = new Recordings(stage);
const keeper = new Keeper(
  () => stage.shown,
  (busy) => byId("download").setAttribute("aria-busy", String(busy)),
);
const share = new Share(() => (stage.mode === "idle" ? stage.shown : undefined));
const { player } = stage;

/** The big button: what it does depends on what goes on. */
function primary(): void {
  if (stage.plays) player.toggle();
  else talkOrStop();
}

function talkOrStop(): void {
  if (stage.mode === "idle") void start();
  else if (stage.mode === "live") void talking.stop();
  else if (stage.mode === "file") recordings.cancel();
  else void talking.abandon();
}

function skip(seconds: number): boolean {
  if (!stage.plays) return false;
  player.to(player.seconds + seconds);
  return true;
}

/** Ask the server what it has, with a key if it wants one. False: that was told. */
async function known(): Promise<boolean> {
  if (stage.chooser.known) return true;
  try {
    await stage.chooser.load();
    return true;
  } catch (failure) {
    stage.banner.error(failure, () => void known());
    return false;
  }
}

async function start(): Promise<void> {
  if (await known()) await talking.start();
}

async function hear(file: File): Promise<void> {
  if (await known()) await recordings.hear(file);
}

const browse = files((file) => void hear(file));
const nextTheme = themeButton();
const closeSheet = sheet();
byId("primary").addEventListener("click", primary);
byId("talk").addEventListener("click", () => void start());
byId("invite-talk").addEventListener("click", () => void start());
shortcuts({
  " ": primary,
  r: talkOrStop,
  o: () => (stage.mode === "idle" ? browse() : false),
  c: () => void keeper.copy(),
  d: () => keeper.choose(),
  s: () => share.open(),
  t: nextTheme,
  arrowleft: () => skip(-SKIP_S),
  arrowright: () => skip(SKIP_S),
  escape: () => {
    if (stage.view.hush() || closeSheet() || keeper.cancel()) return;
    if (stage.mode === "file") recordings.cancel();
    else if (stage.mode === "starting") void talking.abandon();
    else stage.banner.hide();
  },
});
const showTour = tour();
byId("tour").addEventListener("click", () => {
  byId("keys-dialog", HTMLDialogElement).close();
  showTour();
});
addEventListener("beforeunload", (event) => {
  if (stage.mode !== "idle") event.preventDefault();
});
/** A transcript of the history: `#saved=ID`, and `&at=SECONDS` for a place in it. */
async function recall(): Promise<void> {
  const asked = new URLSearchParams(location.hash.slice(1));
  const id = asked.get("saved");
  if (!id || stage.mode !== "idle") return;
  history.replaceState(null, "", location.pathname + location.search); // a page that is loaded again is a new one
  const take = await stage.remember.open(id);
  if (!take) return stage.banner.show("This transcript is not in the history of this browser any more.");
  if (stage.mode !== "idle") return;
  stage.show(take);
  if (asked.has("at")) stage.view.reveal(Number(asked.get("at")));
}

stage.refresh();
void recall();
addEventListener("hashchange", () => void recall());
void known();
void stage.chooser.devices();
