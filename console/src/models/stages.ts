/** A route of the server's policy, as GET /v1/policy tells it. */
export interface Route {
  name: string;
  stage: "stable" | "shadow" | "canary" | "promoted";
  next_stage: string | null;
  stable: string;
  candidate: string | null;
  since_utc: string;
  by: string;
  reason: string;
  blocked_by: string[];
}

/** What a model does for a route; nothing where it has no part in it. */
export function part(model: string, { stage, stable, candidate }: Route): string | undefined {
  if (model === candidate) return stage === "promoted" ? "serving" : stage === "stable" ? "waiting" : stage;
  if (model === stable) return stage === "promoted" ? "stand-by" : "serving";
  return undefined;
}

/** Where the candidate of a route stands, and what keeps it from the next stage. */
export function sentences(route: Route): string {
  if (route.candidate === null) return "";
  const since = route.since_utc ? ` since ${route.since_utc.slice(0, 10)}` : "";
  const why = route.reason ? ` (${route.by}: ${route.reason})` : "";
  const stage = `${route.name}: ${route.candidate} is ${part(route.candidate, route)}${since}${why}.`;
  if (route.next_stage === null) return stage;
  if (!route.blocked_by.length) return `${stage} It may become ${route.next_stage}.`;
  return `${stage} It may not become ${route.next_stage}: ${route.blocked_by.join("; ")}.`;
}
