/** The parts of an OpenAPI document that the page shows. */

export interface Schema {
  $ref?: string;
  type?: string | string[];
  enum?: unknown[];
  const?: unknown;
  default?: unknown;
  description?: string;
  items?: Schema;
  anyOf?: Schema[];
  oneOf?: Schema[];
  properties?: Record<string, Schema>;
  required?: string[];
}

export interface Parameter {
  name: string;
  in: string;
  required?: boolean;
  description?: string;
  schema?: Schema;
}

type Content = Record<string, { schema?: Schema }>;

export interface Operation {
  summary?: string;
  description?: string;
  tags?: string[];
  parameters?: Parameter[];
  requestBody?: { content: Content };
  responses?: Record<string, { description?: string; content?: Content }>;
}

export interface Document {
  info: { title: string; version: string; description?: string };
  tags?: { name: string; description?: string }[];
  paths: Record<string, Record<string, Operation>>;
  components?: { schemas?: Record<string, Schema> };
}

/** The schema that a reference names, or the schema itself. */
export function resolve(document: Document, schema: Schema): Schema {
  const name = schema.$ref?.split("/").pop();
  return (name !== undefined && document.components?.schemas?.[name]) || schema;
}

/** A type in a few words: `list of text`, `"json" | "text"`. */
export function typeName(schema: Schema | undefined): string {
  if (schema === undefined) return "";
  if (schema.$ref !== undefined) return schema.$ref.split("/").pop() ?? "";
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (schema.enum !== undefined) return schema.enum.map((value) => JSON.stringify(value)).join(" | ");
  const choices = schema.anyOf ?? schema.oneOf;
  if (choices !== undefined) return choices.map(typeName).join(" or ");
  if (schema.type === "array") return `list of ${typeName(schema.items) || "values"}`;
  return [schema.type ?? "any"].flat().join(" or ");
}
