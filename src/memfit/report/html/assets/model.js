// Every question that the views ask: what is allocated at a moment, in sum and block by block.
//
// A block is alive at moment k if born <= k < freed. Sums and live blocks are kept at every so many
// moments; those in between are a short walk from the one before.

class Model {
  constructor({ facts, words, columns }) {
    this.facts = facts;
    this.words = words;
    this.columns = columns;
    this.moments = columns['moment.event'].length;
    this.events = columns['moment.event'];
    this.reserved = columns['moment.reserved'];
    this.layers = facts.layers.map((layer) => layer.name); // rounding is the last
    this.rounding = this.layers.length - 1;
    this.readBlocks();
    this.readChanges();
    this.keepStates();
    const steps = facts.marks.filter(([, kind]) => kind === 'training step').map(([moment]) => moment);
    this.stepEnds = Uint32Array.from(steps);
  }

  readBlocks() {
    const c = this.columns;
    const count = c['block.born'].length;
    const layerOf = [];
    this.facts.layers.forEach((layer, index) => { layerOf[layer.category] = index; });
    this.layerOf = layerOf;
    this.blocks = count;
    this.born = c['block.born'];
    this.freed = new Float64Array(count);
    this.done = new Float64Array(count);
    this.requested = new Float64Array(count);
    this.beyond = new Float64Array(count);
    this.layer = new Uint8Array(count);
    this.waiting = [];
    for (let i = 0; i < count; i++) {
      this.freed[i] = this.born[i] + c['block.life'][i];
      this.done[i] = this.freed[i] + c['block.wait'][i];
      this.requested[i] = c['sizes.requested'][c['block.requested'][i]];
      this.beyond[i] = c['sizes.beyond'][c['block.beyond'][i]];
      this.layer[i] = layerOf[c['block.category'][i]];
      if (this.done[i] > this.freed[i]) this.waiting.push(i);
    }
    this.address = c['block.address'];
  }

  // Which blocks come (i) and go (~i) at each moment: those of moment k are changes[starts[k]..starts[k + 1]].
  readChanges() {
    const starts = new Uint32Array(this.moments + 2);
    for (let i = 0; i < this.blocks; i++) {
      starts[this.born[i] + 2]++;
      if (this.freed[i] < this.moments) starts[this.freed[i] + 2]++;
    }
    for (let k = 2; k < starts.length; k++) starts[k] += starts[k - 1];
    this.changes = new Int32Array(starts[this.moments + 1]);
    for (let i = 0; i < this.blocks; i++) {
      this.changes[starts[this.born[i] + 1]++] = i;
      if (this.freed[i] < this.moments) this.changes[starts[this.freed[i] + 1]++] = ~i;
    }
    this.starts = starts;
    const of = this.columns['rest.moment'];
    this.restStarts = new Uint32Array(this.moments + 1);
    for (let r = 0; r < of.length; r++) this.restStarts[of[r] + 1]++;
    for (let k = 1; k <= this.moments; k++) this.restStarts[k] += this.restStarts[k - 1];
  }

  // What a walk carries along: bytes and blocks of each layer, and of these what is drawn together.
  emptySums() {
    const zeros = () => new Float64Array(this.layers.length);
    return { at: -1, bytes: zeros(), count: zeros(), rest: zeros(), restCount: zeros(), restBeyond: 0 };
  }

  copySums(sums) {
    const copy = { at: sums.at, restBeyond: sums.restBeyond };
    for (const name of ['bytes', 'count', 'rest', 'restCount']) copy[name] = sums[name].slice();
    return copy;
  }

  // Walk on to moment k, which is not before sums.at.
  walk(sums, k) {
    const { changes, starts, layer, requested, beyond, rounding, restStarts } = this;
    const { bytes, count } = sums;
    for (let c = starts[sums.at + 1]; c < starts[k + 1]; c++) {
      const change = changes[c];
      if (change >= 0) {
        bytes[layer[change]] += requested[change];
        bytes[rounding] += beyond[change];
        count[layer[change]]++;
      } else {
        bytes[layer[~change]] -= requested[~change];
        bytes[rounding] -= beyond[~change];
        count[layer[~change]]--;
      }
    }
    for (let r = restStarts[sums.at + 1]; r < restStarts[k + 1]; r++) this.walkRest(sums, r);
    sums.at = k;
  }

  walkRest(sums, r) {
    const c = this.columns;
    const layer = this.layerOf[c['rest.category'][r]];
    const more = c['rest.requested'][r];
    const beyond = c['rest.size'][r] - more;
    sums.bytes[layer] += more;
    sums.rest[layer] += more;
    sums.bytes[this.rounding] += beyond;
    sums.restBeyond += beyond;
    sums.count[layer] += c['rest.count'][r];
    sums.restCount[layer] += c['rest.count'][r];
  }

  keepStates() {
    let lifetimes = 0;
    for (let i = 0; i < this.blocks; i++) lifetimes += this.freed[i] - this.born[i];
    this.stride = Math.max(512, Math.ceil(lifetimes / 4e6)); // so that no more than 4 million places are kept
    this.kept = [];
    this.allocated = new Float64Array(this.moments);
    const sums = this.emptySums();
    let live = [];
    let next = 0;
    for (let k = 0; k < this.moments; k++) {
      this.walk(sums, k);
      let total = 0;
      for (let l = 0; l < sums.bytes.length; l++) total += sums.bytes[l];
      this.allocated[k] = total;
      if (k % this.stride) continue;
      live = live.filter((i) => this.freed[i] > k);
      for (; next < this.blocks && this.born[next] <= k; next++) if (this.freed[next] > k) live.push(next);
      this.kept.push({ sums: this.copySums(sums), live: Int32Array.from(live), next });
    }
    this.peak = 0;
    for (let k = 0; k < this.moments; k++) if (this.allocated[k] > this.allocated[this.peak]) this.peak = k;
  }

  sumsAt(k) {
    const sums = this.copySums(this.kept[Math.floor(k / this.stride)].sums);
    this.walk(sums, k);
    return sums;
  }

  // The blocks alive at a moment, those made first first.
  liveAt(k) {
    const { live, next } = this.kept[Math.floor(k / this.stride)];
    const found = [];
    for (const i of live) if (this.freed[i] > k) found.push(i);
    for (let i = next; i < this.blocks && this.born[i] <= k; i++) if (this.freed[i] > k) found.push(i);
    return found;
  }

  // Blocks that are freed and that another stream still uses.
  pendingAt(k) {
    return this.waiting.filter((i) => this.freed[i] <= k && k < this.done[i]);
  }

  word(column, i) {
    return this.words[this.columns[column][i]];
  }

  phaseAt(k) {
    return this.facts.phases[this.columns['place.phase'][this.columns['moment.place'][k]]];
  }

  // As ``place_at`` counts: 0 before the first training step.
  stepAt(k) {
    let ended = 0;
    while (ended < this.stepEnds.length && this.stepEnds[ended] <= k) ended++;
    return ended || this.phaseAt(k) !== 'setup' ? ended + 1 : 0;
  }

  placeAt(k) {
    const place = this.columns['moment.place'][k];
    const part = (name) => this.word(`place.${name}`, place);
    return { step: this.stepAt(k), phase: this.phaseAt(k), module: part('module'), op: part('op'), line: part('line') };
  }

  framesOf(i) {
    const stack = this.columns['block.stack'][i];
    const ends = this.columns['stack.ends'];
    const frames = this.columns['stack.frames'].subarray(ends[stack], ends[stack + 1]);
    return Array.from(frames, (word) => this.words[word]).filter(Boolean);
  }
}
