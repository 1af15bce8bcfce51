import { connect, createServer, type AddressInfo, type Server, type Socket } from "node:net";

/** A network between a client and the server, which can fail: connections break, stall, or are not to be had. */
export class Network {
  /** Nobody gets through. */
  down = false;
  /** Connections made so far. */
  connections = 0;
  readonly #pairs = new Set<[Socket, Socket]>();
  readonly #server: Server;

  private constructor(private readonly target: URL) {
    this.#server = createServer((near) => this.#join(near));
  }

  static async to(url: string): Promise<Network> {
    const made = new Network(new URL(url));
    await new Promise<void>((resolve) => made.#server.listen(0, "127.0.0.1", resolve));
    return made;
  }

  get url(): string {
    return `http://127.0.0.1:${(this.#server.address() as AddressInfo).port}`;
  }

  /** Break every connection, without a goodbye. */
  cut(): void {
    for (const pair of this.#pairs) for (const end of pair) end.resetAndDestroy();
  }

  /** Every connection stays, and nothing gets through any more. */
  stall(): void {
    for (const [near, far] of this.#pairs) {
      near.unpipe(far);
      far.unpipe(near);
      near.pause();
      far.pause();
    }
  }

  close(): void {
    this.cut();
    this.#server.close();
  }

  #join(near: Socket): void {
    near.on("error", () => {});
    if (this.down) return void near.resetAndDestroy();
    this.connections++;
    const far = connect(Number(this.target.port), this.target.hostname);
    far.on("error", () => {});
    const pair: [Socket, Socket] = [near, far];
    this.#pairs.add(pair);
    near.pipe(far).pipe(near);
    for (const end of pair) {
      end.on("close", () => {
        this.#pairs.delete(pair);
        near.destroy();
        far.destroy();
      });
    }
  }
}
