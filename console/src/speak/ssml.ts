import { byId, make } from "../page/dom";

/** What SSML can do here, with an example of each. tests/console/test_speak_page.py has the server read all of them. */
export const EXAMPLES: readonly { title: string; told: string; example: string }[] = [
  { title: "Pause", told: "0ms to 10s, or strength none to x-strong.", example: 'Wait. <break time="700ms"/> Now go.' },
  { title: "Sentence and paragraph", told: "Where they end, whatever the punctuation.", example: "<p><s>One line</s><s>And another</s></p>" },
  {
    title: "Speed, pitch, volume",
    told: "x-slow to x-fast, or 0.25 to 4, or +20%; x-low to x-high, or -12st to +12st; x-soft to x-loud, or -12dB to +12dB.",
    example: '<prosody rate="slow" pitch="-2st" volume="soft">Quietly and slowly.</prosody>',
  },
  { title: "Emphasis", told: "none, reduced, moderate or strong.", example: 'I said <emphasis level="strong">no</emphasis>.' },
  { title: "Letter by letter", told: "interpret-as characters; digits for figures one by one.", example: '<say-as interpret-as="characters">NATO</say-as>' },
  { title: "Number", told: "interpret-as cardinal, or ordinal for a place in a row.", example: 'The <say-as interpret-as="ordinal">3</say-as> of them.' },
  { title: "Date", told: "format mdy, dmy, ymd, md, dm, ym, my, y, m or d.", example: '<say-as interpret-as="date" format="dmy">1/2/2026</say-as>' },
  { title: "Said as another text", told: "Up to 1,000 characters.", example: '<sub alias="World Wide Web Consortium">W3C</sub>' },
  { title: "Phonemes", told: "alphabet ipa or x-misaki.", example: 'You say <phoneme alphabet="ipa" ph="təˈmɑːtoʊ">tomato</phoneme>.' },
];

export interface Place {
  /** Index of the character, as the text field counts. */
  at: number;
  line: number;
  column: number;
}

/** The place that an error of SSML names; undefined: it names none. */
export function placeOf(message: string, text: string): Place | undefined {
  const found = /^line (\d+), column (\d+):/i.exec(message);
  if (!found) return undefined;
  const [line, column] = [Number(found[1]), Number(found[2])];
  const lines = text.split("\n");
  const before = lines.slice(0, line - 1).reduce((sum, each) => sum + each.length + 1, 0);
  const within = [...(lines[line - 1] ?? "")].slice(0, column - 1).join("").length; // the server counts whole characters
  return { at: Math.min(text.length, before + within), line, column };
}

/** The end of the element's tag, or of the word, that stands at a place. */
export function endOf(text: string, at: number): number {
  const rest = text.slice(at);
  const tag = /^<[^>]*>?/.exec(rest) ?? /^\S+/.exec(rest);
  return at + Math.max(1, tag?.[0].length ?? 0);
}

/** The list of examples, each of which can be inserted. */
export function ssmlHelp(insert: (example: string) => void): void {
  const dialog = byId("ssml-dialog", HTMLDialogElement);
  byId("examples").replaceChildren(
    ...EXAMPLES.map(({ title, told, example }) => {
      const button = make("button", { class: "plain", type: "button", "aria-label": `Insert: ${title}` }, "Insert");
      button.addEventListener("click", () => {
        dialog.close();
        insert(example);
      });
      const code = make("code", {}, example);
      return make("li", {}, make("div", {}, make("b", {}, title), make("p", { class: "soft fine" }, told), code), button);
    }),
  );
  byId("ssml-help").addEventListener("click", () => dialog.showModal());
}

/** Put an example at the cursor of the field, inside <speak>. */
export function inserted(field: HTMLTextAreaElement, example: string): void {
  const { value } = field;
  if (/^\s*<speak[\s>]/.test(value)) {
    const [open, close] = [value.indexOf(">") + 1, value.lastIndexOf("</speak>")];
    const end = close < 0 ? value.length : close;
    const at = Math.min(Math.max(field.selectionStart, open), end);
    field.setRangeText(example, at, Math.min(Math.max(field.selectionEnd, at), end), "end");
  } else {
    const escape = (text: string): string => text.replace(/&/g, "&amp;").replace(/</g, "&lt;");
    const [before, after] = [escape(value.slice(0, field.selectionStart)), escape(value.slice(field.selectionEnd))];
    const head = `<speak>\n${before}${example}`;
    field.value = `${head}${after}\n</speak>`;
    field.setSelectionRange(head.length, head.length);
  }
  field.focus();
  field.dispatchEvent(new Event("input", { bubbles: true }));
}
