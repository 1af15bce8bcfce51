import { SpeechError, type Restart, type StreamState } from "asr-serve";
import { byId } from "../page/dom";
import { toast } from "../page/toast";
import { clock } from "../page/words";
import { Lag } from "./lag";
import { refused } from "./refused";
import type { Stage } from "./stage";
import type { Take } from "./take";
import { Talk, type Line } from "./talk";

/** The microphone's blocks that levels are told of. */
const BLOCK_S = 0.02;

/** From the press of the button to the last word. */
export class Talking {
  readonly #lag = new Lag();
  #talk: Talk | undefined;
  #take: Take | undefined;
  /** The server was restarted, and is about to hear again. */
  #another = false;

  constructor(private readonly stage: Stage) {}

  async start(): Promise<void> {
    const { stage } = this;
    if (stage.mode !== "idle") return;
    stage.player.pause();
    stage.banner.hide();
    stage.enter("starting");
    this.#take = undefined;
    this.#another = false;
    const talk = this.#made();
    this.#talk = talk;
    stage.wanted.refused();
    try {
      const { deviceId, liveModel: model, language, calls } = stage.chooser;
      const { speechOnly } = stage.wanted;
      byId("sent-share").textContent = "";
      await talk.begin({ deviceId, model, language, speechOnly, calls, rich: stage.wanted.options() });
      if (this.#talk !== talk) return; // cancelled meanwhile
      stage.enter("live");
      stage.tell("Listening");
      void stage.chooser.devices();
    } catch (failure) {
      if (this.#talk !== talk) return;
      this.#never();
      stage.wanted.refused(failure);
      await refused(failure, stage.banner, () => void this.start());
    }
  }

  /** End what is said. `reason`: it cannot go on. */
  async stop(reason?: SpeechError): Promise<void> {
    const { stage } = this;
    const talk = this.#talk;
    if (!talk || stage.mode !== "live") return;
    stage.enter("finishing");
    stage.tell("Finishing");
    let failure: unknown = reason;
    try {
      await talk.end();
    } catch (late) {
      failure ??= late;
    }
    if (this.#talk === talk) this.#over(failure);
  }

  /** Do not wait any longer, for the microphone or for the last words. */
  async abandon(): Promise<void> {
    const talk = this.#talk;
    if (this.stage.mode === "starting") this.#never();
    else if (this.stage.mode === "finishing") this.#over();
    await talk?.abandon();
  }

  #made(): Talk {
    const { stage } = this;
    const talk = new Talk((stream) => this.#begun(stream), this.#lag, {
      level: ({ peak }) => {
        stage.meter.level(peak);
        stage.wave.push(peak, BLOCK_S, talk.deaf ? undefined : talk.seconds);
        byId("clock").textContent = clock(talk.seconds);
        if (stage.wanted.speechOnly && talk.seconds) {
          byId("sent-share").textContent = `${Math.round(100 * talk.sentShare)} % of the sound was sent.`;
        }
      },
      text: (settledS) => {
        if (this.#talk !== talk) return;
        stage.view.open();
        if (settledS !== undefined) stage.wave.settled(settledS);
      },
      segment: (segment) => {
        if (this.#talk !== talk) return;
        stage.view.segment(segment);
        stage.wave.settled(segment.end);
        stage.refresh();
      },
      speakers: () => {
        if (this.#talk === talk) stage.voices();
      },
      state: (state, lostS) => {
        if (this.#talk === talk) this.#connection(state, lostS);
      },
      restarted: (restart) => {
        if (this.#talk === talk) this.#restarted(restart);
      },
      broken: (error) => {
        if (this.#talk === talk) void this.stop(error);
      },
    });
    return talk;
  }

  #begun({ transcript }: Line): Take {
    const at = new Date().toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" });
    this.#take = { kind: "talk", title: `Talk at ${at}`, transcript, names: new Map(), sound: undefined };
    this.stage.show(this.#take);
    return this.#take;
  }

  #restarted({ segment }: Restart): void {
    const { stage } = this;
    this.#another = true;
    if (segment) stage.view.segment(segment);
    else stage.view.open();
    stage.refresh();
  }

  #connection(state: StreamState, lostS: number): void {
    const { stage } = this;
    if (state === "reconnecting") {
      const what = "Connection lost. Go on talking: the sound is kept, and sent when the connection is back.";
      stage.banner.show(stage.mode === "live" ? what : "Connection lost. The last words come when it is back.", "wait");
    } else if (state === "open" && this.#another) {
      this.#another = false;
      stage.banner.show("The server was restarted; some words between may be missing.", "wait");
    } else if (state === "open" && stage.mode !== "starting") {
      stage.banner.hide();
      const lost = lostS >= 0.5 ? `${Math.round(lostS)} s of sound found no room and were lost.` : "Nothing was lost.";
      toast(`Connected again. ${lost}`);
    }
  }

  /** It ended before it began. */
  #never(): void {
    this.#talk = undefined;
    this.stage.meter.rest();
    this.stage.enter("idle");
    if (this.#take) this.stage.forget(this.#take);
  }

  #over(failure?: unknown): void {
    const { stage } = this;
    const { transcript } = this.#take!;
    this.#talk = undefined;
    const left = transcript.settle();
    if (left) stage.view.segment(left);
    else stage.view.open();
    transcript.duration ||= transcript.segments.at(-1)?.end ?? 0;
    stage.wave.settled(transcript.duration);
    stage.meter.rest();
    stage.enter("idle");
    stage.remember.keep(this.#take!);
    const none = !transcript.segments.length;
    stage.tell(none ? "" : "The transcript is done");
    if (failure) return stage.banner.error(failure);
    stage.banner.hide();
    if (none) toast("No speech was heard");
  }
}
