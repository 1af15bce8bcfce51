/** Do some work for each of `items`, at most `atOnce` at a time. Rejects with the first failure, when what was begun
 * has ended; nothing is begun after a failure. */
export async function forEach<T>(items: readonly T[], atOnce: number, work: (item: T) => Promise<void>): Promise<void> {
  let next = 0;
  const run = async (): Promise<void> => {
    while (next < items.length) {
      try {
        await work(items[next++]!);
      } catch (failure) {
        next = items.length;
        throw failure;
      }
    }
  };
  const ends = await Promise.allSettled(Array.from({ length: Math.min(atOnce, items.length) }, run));
  for (const end of ends) if (end.status === "rejected") throw end.reason;
}
