import "../styles/page";
import "../styles/docs.css";

import { byId, make } from "../page/dom";
import { themeButton } from "../page/theme";
import { resolve, typeName, type Document, type Operation, type Schema } from "./openapi";

type Row = [name: string, type: string, needed: boolean, text: string];

function table(caption: string, rows: Row[]): HTMLElement[] {
  if (rows.length === 0) return [];
  const lines = rows.map(([name, type, needed, text]) =>
    make(
      "tr",
      {},
      make("th", { scope: "row" }, make("code", {}, name), needed ? make("span", { class: "needed" }, "required") : ""),
      make("td", { class: "type" }, type),
      make("td", {}, text),
    ),
  );
  const scroll = { class: "scroll", tabindex: "0", role: "region", "aria-label": caption };
  return [make("h3", {}, caption), make("div", scroll, make("table", {}, make("tbody", {}, ...lines)))];
}

function fields(document: Document, given: Schema): Row[] {
  const schema = resolve(document, given);
  return Object.entries(schema.properties ?? {}).map(([name, field]) => {
    const preset = field.default === undefined || field.default === null ? "" : ` Default: ${JSON.stringify(field.default)}.`;
    return [name, typeName(field), schema.required?.includes(name) ?? false, `${field.description ?? ""}${preset}`.trim()];
  });
}

function route(document: Document, method: string, path: string, operation: Operation): HTMLElement {
  const parameters = (operation.parameters ?? []).map(
    ({ name, in: place, required, description, schema }): Row => [
      name,
      [typeName(schema), `in the ${place}`].filter(Boolean).join(", "),
      required ?? false,
      description ?? "",
    ],
  );
  const bodies = Object.entries(operation.requestBody?.content ?? {}).flatMap(([type, { schema }]) =>
    schema === undefined ? [] : table(`Request body, ${type}`, fields(document, schema)),
  );
  const responses = Object.entries(operation.responses ?? {}).map(([status, { description, content }]): Row => {
    const types = Object.entries(content ?? {}).map(([type, { schema }]) =>
      schema?.$ref === undefined ? type : `${typeName(schema)}, ${type}`,
    );
    return [status, types.join("; "), false, description ?? ""];
  });
  return make(
    "details",
    { class: "route" },
    make(
      "summary",
      {},
      make("b", { class: `method ${method}` }, method.toUpperCase()),
      make("code", { class: "path" }, path),
      make("span", { class: "soft" }, operation.summary ?? ""),
    ),
    make("p", {}, (operation.description ?? "").replaceAll("`", "")),
    ...table("Parameters", parameters),
    ...bodies,
    ...table("Responses", responses),
  );
}

function show(document: Document): void {
  byId("title").textContent = `${document.info.title} ${document.info.version}`;
  byId("about").textContent = document.info.description ?? "";
  const known = document.tags ?? [];
  const operations = Object.entries(document.paths).flatMap(([path, methods]) =>
    Object.entries(methods).map(([method, operation]) => ({ path, method, operation, tag: operation.tags?.[0] ?? "Other" })),
  );
  const names = [...new Set([...known.map(({ name }) => name), ...operations.map(({ tag }) => tag)])];
  for (const name of names) {
    const own = operations.filter(({ tag }) => tag === name);
    if (own.length === 0) continue;
    byId("routes").append(
      make(
        "section",
        {},
        make("h2", {}, name),
        make("p", { class: "soft" }, known.find((tag) => tag.name === name)?.description ?? ""),
        ...own.map(({ path, method, operation }) => route(document, method, path, operation)),
      ),
    );
  }
}

async function load(): Promise<void> {
  try {
    const answer = await fetch(byId("document", HTMLAnchorElement).href);
    if (!answer.ok) throw new Error(`the server answered ${answer.status}`);
    show((await answer.json()) as Document);
  } catch (error) {
    byId("about").textContent = "";
    byId("problem").textContent = `The API document cannot be read: ${error instanceof Error ? error.message : error}`;
  }
}

themeButton();
void load();
