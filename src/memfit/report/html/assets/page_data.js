// The data behind all views: what is allocated at a moment, in total and block by block.
//
// A block is live at moment k if born <= k < freed.

let model = null; // set once the page has loaded

class Model {
  // payload: see ``page_payload.py``.
  constructor(payload) {
    Object.assign(this, payload);
    this.block.freed = Uint32Array.from(this.block.life, (life, i) => this.block.born[i] + life);
    this.peak = this.shortcuts[0];
    this.rounding = this.layers.length - 1;
    this.addUp();
  }

  // Bytes of every layer at every moment: first the changes, then their running sums.
  addUp() {
    const many = this.layers.length;
    this.sums = new Float64Array(many * (this.moments + 1)); // the last moment is for blocks that are never freed
    const change = (moment, layer, requested, beyond) => {
      this.sums[many * moment + layer] += requested;
      this.sums[many * moment + this.rounding] += beyond;
    };
    const { born, freed, layer, requested, beyond } = this.block;
    born.forEach((moment, i) => {
      change(moment, layer[i], requested[i], beyond[i]);
      change(freed[i], layer[i], -requested[i], -beyond[i]);
    });
    const { rest } = this;
    rest.moment.forEach((moment, r) => change(moment, rest.layer[r], rest.requested[r], rest.beyond[r]));
    for (let at = many; at < this.sums.length; at++) this.sums[at] += this.sums[at - many];
    this.reserved = this.moment.reserved;
    this.allocated = Float64Array.from(this.reserved, (_, k) => total(this.sumsAt(k)));
  }

  sumsAt(k) {
    return this.sums.subarray(k * this.layers.length, (k + 1) * this.layers.length);
  }

  // Bytes of each layer that are drawn together at a moment.
  restAt(k) {
    const { moment, layer, requested, beyond } = this.rest;
    const sums = new Float64Array(this.layers.length);
    for (let r = 0; r < moment.length && moment[r] <= k; r++) {
      sums[layer[r]] += requested[r];
      sums[this.rounding] += beyond[r];
    }
    return sums;
  }

  alive(i, k) {
    return this.block.born[i] <= k && k < this.block.freed[i];
  }

  // The blocks live at a moment; with `waiting`, also freed blocks that another stream still uses.
  liveAt(k, waiting = false) {
    const { born, freed, wait } = this.block;
    const found = [];
    for (let i = 0; i < born.length && born[i] <= k; i++) if (freed[i] + waiting * wait[i] > k) found.push(i);
    return found;
  }

  text(name, i) {
    return this.words[this.block[name][i]];
  }

  phaseAt(k) {
    return this.phases[this.moment.phase[k]];
  }

  placeAt(k) {
    const [module, op, line] = ['module', 'op', 'line'].map((name) => this.words[this.place[name][this.moment.place[k]]]);
    return { step: this.moment.step[k], phase: this.phaseAt(k), module, op, line };
  }

  framesOf(i) {
    const { frames, ends } = this.stack;
    const stack = this.block.stack[i];
    return Array.from(frames.subarray(ends[stack], ends[stack + 1]), (word) => this.words[word]).filter(Boolean);
  }
}
