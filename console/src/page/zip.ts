/** An archive in the form ZIP whose files are not compressed.
 *
 * Source: APPNOTE.TXT of PKWARE, 4.3. Names are UTF-8 (bit 11 of the flags); sizes have 32 bits, so the whole has to
 * be below 4 GiB and 65,535 files. */
export function zip(files: readonly { path: string; text: string }[], now: Date): Blob {
  if (files.length > 0xffff) throw new RangeError(`${files.length} files are too many for an archive: 65,535`);
  const encoder = new TextEncoder();
  const time = (now.getHours() << 11) | (now.getMinutes() << 5) | (now.getSeconds() >> 1);
  const date = ((Math.max(1980, now.getFullYear()) - 1980) << 9) | ((now.getMonth() + 1) << 5) | now.getDate();
  const bodies: Uint8Array<ArrayBuffer>[] = [];
  const directory: Uint8Array<ArrayBuffer>[] = [];
  let [offset, directoryBytes] = [0, 0];
  for (const { path, text } of files) {
    const [name, data] = [encoder.encode(path), encoder.encode(text)];
    // Of both headers: version 2.0, flags, no compression, time, date, checksum, sizes, length of the name.
    const common = numbers([2, 20], [2, 1 << 11], [2, 0], [2, time], [2, date], [4, crc32(data)], [4, data.length], [4, data.length], [2, name.length]);
    const local = joined(numbers([4, 0x04034b50]), common, numbers([2, 0]), name, data);
    const entry = joined(numbers([4, 0x02014b50], [2, 20]), common, numbers([2, 0], [2, 0], [2, 0], [2, 0], [4, 0], [4, offset]), name);
    bodies.push(local);
    directory.push(entry);
    offset += local.length;
    directoryBytes += entry.length;
  }
  if (offset + directoryBytes > 0xffff_ffff) throw new RangeError("an archive may have up to 4 GiB");
  const count = files.length;
  const end = numbers([4, 0x06054b50], [2, 0], [2, 0], [2, count], [2, count], [4, directoryBytes], [4, offset], [2, 0]);
  return new Blob([...bodies, ...directory, end], { type: "application/zip" });
}

/** Little-endian: [bytes, value]. */
function numbers(...values: readonly (readonly [2 | 4, number])[]): Uint8Array<ArrayBuffer> {
  const view = new DataView(new ArrayBuffer(values.reduce((sum, [bytes]) => sum + bytes, 0)));
  let at = 0;
  for (const [bytes, value] of values) {
    if (bytes === 2) view.setUint16(at, value, true);
    else view.setUint32(at, value, true);
    at += bytes;
  }
  return new Uint8Array(view.buffer);
}

function joined(...parts: readonly Uint8Array[]): Uint8Array<ArrayBuffer> {
  const all = new Uint8Array(parts.reduce((sum, part) => sum + part.length, 0));
  let at = 0;
  for (const part of parts) {
    all.set(part, at);
    at += part.length;
  }
  return all;
}

const TABLE = Uint32Array.from({ length: 256 }, (_, n) => {
  let c = n;
  for (let bit = 0; bit < 8; bit++) c = c & 1 ? 0xedb88320 ^ (c >>> 1) : c >>> 1;
  return c;
});

/** As ZIP and PNG have it. */
export function crc32(data: Uint8Array): number {
  let crc = 0xffff_ffff;
  for (const byte of data) crc = TABLE[(crc ^ byte) & 0xff]! ^ (crc >>> 8);
  return (crc ^ 0xffff_ffff) >>> 0;
}
