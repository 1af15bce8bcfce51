/** The element with this id, of the class the page's HTML gives it. */
export function byId<T extends Element = HTMLElement>(id: string, kind?: new () => T): T {
  const found = document.getElementById(id);
  if (!found || (kind && !(found instanceof kind))) throw new Error(`the page has no #${id}`);
  return found as unknown as T;
}

/** An element with attributes and children. */
export function make<K extends keyof HTMLElementTagNameMap>(
  tag: K,
  attributes: Record<string, string> = {},
  ...children: (Node | string)[]
): HTMLElementTagNameMap[K] {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

/** Show a symbol of the page's sprite. */
export function setIcon(use: Element, symbol: string): void {
  use.setAttribute("href", `#i-${symbol}`);
}

/** Something kept by the browser; nothing where it keeps nothing. */
export function recall(name: string): string | undefined {
  try {
    return localStorage.getItem(`asr-serve.${name}`) ?? undefined;
  } catch {
    return undefined;
  }
}

export function keep(name: string, value: string | undefined): void {
  try {
    if (value === undefined) localStorage.removeItem(`asr-serve.${name}`);
    else localStorage.setItem(`asr-serve.${name}`, value);
  } catch {
    // private windows may refuse: then it is not kept
  }
}
