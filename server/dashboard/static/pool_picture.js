// Reads the picture of the block pool that `dashboard/data/pool` sends; server/dashboard/pool_image.py says its layout.
// Pure: knows no canvas and no page.

export const HELD = 1;
export const CACHED = 2;
export const SHARED = 4;

/** The pool at one moment: flags of each block, the holders with their tables, and which holder each block has. */
export class PoolPicture {
  constructor(buffer) {
    const length = new DataView(buffer).getUint32(0, true);
    const head = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length)));
    const start = 4 + length;
    this.number = head.number;
    this.numBlocks = head.num_blocks;
    this.blockSize = head.block_size;
    this.secondsUntilNext = head.seconds_until_next;
    this.flags = new Uint8Array(buffer, start, this.numBlocks);
    const ids = new Uint32Array(buffer, start + Math.ceil(this.numBlocks / 4) * 4); // machines with browsers are all little-endian
    this.holders = head.holders;
    this.holderOf = new Int32Array(this.numBlocks).fill(-1); // the last one, of a shared block
    let begin = 0;
    this.holders.forEach((holder, place) => {
      holder.blockIds = ids.subarray(begin, begin + holder.num_blocks);
      begin += holder.num_blocks;
      for (const blockId of holder.blockIds) this.holderOf[blockId] = place;
    });
    this.totals = this.#count();
  }

  /** Who holds a block, each with the block's place in its table. */
  uses(blockId) {
    if (!(this.flags[blockId] & HELD)) return [];
    const found = [];
    for (const holder of this.holders) {
      const position = holder.blockIds.indexOf(blockId);
      if (position >= 0) found.push({ holder, position });
    }
    return found;
  }

  /** "free", "cached" (free, but its content can still be shared), "used" or "shared". */
  state(blockId) {
    const flags = this.flags[blockId];
    if (flags & SHARED) return "shared";
    if (flags & HELD) return "used";
    return flags & CACHED ? "cached" : "free";
  }

  /** What a block is, in words. */
  describe(blockId) {
    const flags = this.flags[blockId];
    const uses = this.uses(blockId);
    if (!uses.length) {
      return `Block ${blockId}: ${flags & CACHED ? "free, and still holds a cached prefix" : "free"}.`;
    }
    const told = uses.slice(0, 3).map((use) => this.#describeUse(use));
    if (uses.length > 3) told.push(`${uses.length - 3} more`);
    const kind = uses.length > 1 ? `shared by ${uses.length}` : "used";
    return `Block ${blockId}: ${kind}${flags & CACHED ? ", cached" : ""} – ${told.join("; ")}.`;
  }

  #describeUse({ holder, position }) {
    const first = position * this.blockSize;
    const last = Math.min(first + this.blockSize, holder.num_computed_tokens) - 1;
    const tokens = last < first ? "reserved" : `tokens ${first} to ${last}`;
    const which = [holder.id, holder.prompt ? `prompt ${holder.prompt}` : "", holder.index ? `answer ${holder.index}` : ""];
    return `${which.filter(Boolean).join(", ")}, place ${position} of its table, ${tokens}`;
  }

  #count() {
    const totals = { free: 0, cached: 0, used: 0, shared: 0 };
    const byFlags = new Uint32Array(8);
    for (const flags of this.flags) byFlags[flags] += 1;
    byFlags.forEach((number, flags) => {
      if (flags & SHARED) totals.shared += number;
      else if (flags & HELD) totals.used += number;
      else totals[flags & CACHED ? "cached" : "free"] += number;
    });
    return totals;
  }
}

/** A hue for an id: the same each time, and far from those of most others. */
export function hueOf(id) {
  let hash = 2166136261; // FNV-1a
  for (const unit of id) hash = Math.imul(hash ^ unit.codePointAt(0), 16777619);
  return ((hash >>> 0) * 0.618033988749895 * 360) % 360;
}
