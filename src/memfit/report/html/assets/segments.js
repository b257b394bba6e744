// The segment map: a row a segment, position in it is address.

const LINE = 15; // pixels a row
const BLOCK = 11;
const NAME = 74; // room for the row's size
const NARROW = 24; // pixels of the shortest row: to have a look into it, off scale if it must be
const HIGHEST = 330; // pixels of the map; beyond that it scrolls

class SegmentMap {
  constructor(model, { onBlock }) {
    Object.assign(this, { model, onBlock, block: -1, row: 0 });
    this.box = byId('map');
    this.canvas = byId('segments');
    this.box.addEventListener('scroll', () => { this.measure(); this.paint(); });
    this.canvas.addEventListener('click', (event) => this.click(event));
    this.canvas.addEventListener('pointermove', (event) => this.hover(event));
    this.canvas.addEventListener('pointerleave', () => hideTip());
    this.canvas.addEventListener('keydown', (event) => this.key(event));
    this.measure();
  }

  measure() {
    this.top = this.box.scrollTop;
    this.room = this.box.clientWidth;
  }

  scroll(top) {
    this.box.scrollTop = top;
    this.measure();
  }

  // Segments at a moment with the blocks in them. Mapped ranges that touch are one segment.
  show(moment) {
    const { model } = this;
    const c = model.columns;
    const found = [];
    for (let r = 0; r < c['range.address'].length; r++) {
      if (c['range.born'][r] > moment || c['range.freed'][r] <= moment) continue;
      const start = c['range.address'][r];
      const stop = start + c['range.size'][r];
      const expandable = c['range.expandable'][r];
      const small = c['range.small'][r];
      const last = found[found.length - 1];
      if (last && expandable && last.expandable && last.stop === start && last.small === small) last.stop = stop;
      else found.push({ start, stop, small, expandable, stream: c['range.stream'][r], blocks: [] });
    }
    const blocks = [...model.liveAt(moment), ...model.pendingAt(moment)];
    blocks.sort((a, b) => model.address[a] - model.address[b]);
    let at = 0;
    for (const i of blocks) {
      while (at < found.length && found[at].stop <= model.address[i]) at++;
      if (at < found.length && model.address[i] >= found[at].start) found[at].blocks.push(i);
    }
    this.moment = moment;
    const size = (one) => one.stop - one.start;
    this.segments = found.sort((a, b) => a.small - b.small || size(b) - size(a) || a.start - b.start);
    this.widest = found.reduce((most, one) => Math.max(most, size(one)), 1);
    this.row = Math.min(this.row, Math.max(0, this.segments.length - 1));
    this.summarize(moment);
    this.paint();
  }

  summarize(moment) {
    const { model } = this;
    let cached = 0;
    let wholly = 0;
    for (const segment of this.segments) {
      if (segment.blocks.length) continue;
      wholly++;
      cached += segment.stop - segment.start;
    }
    const free = model.reserved[moment] - model.allocated[moment];
    // Of a thinned trace, what looks free may hold small blocks.
    const told = wholly && !model.facts.together ? `, of which ${bytes(cached)} in ${counted(wholly, 'wholly free segment')}` : '';
    byId('reserved').textContent = `${counted(this.segments.length, 'segment')} · ${bytes(model.reserved[moment])} reserved · `
      + `${bytes(free)} cached${told}`;
  }

  paint() {
    const { segments, box } = this;
    const height = Math.min(HIGHEST, segments.length * LINE + 4);
    box.style.height = `${height}px`;
    byId('rows').style.height = `${segments.length * LINE + 4}px`;
    this.height = height;
    this.width = Math.max(40, this.room - NAME - 6);
    const context = fitted(this.canvas, this.room, height);
    context.font = `10px ${theme('font')}`;
    this.fills = this.model.layers.map((name) => fillOf(context, name));
    this.hole = stripes(context, theme('paper'), theme('hole'));
    const first = Math.floor(this.top / LINE);
    const last = Math.min(segments.length, Math.ceil((this.top + height) / LINE));
    for (let row = first; row < last; row++) this.paintRow(context, row, row * LINE - this.top + 2);
    this.canvas.setAttribute('aria-label', `Segments at the moment: ${byId('reserved').textContent}`);
  }

  scale(segment) {
    return Math.max(NARROW, (this.width * (segment.stop - segment.start)) / this.widest);
  }

  paintRow(context, row, y) {
    const { model } = this;
    const segment = this.segments[row];
    const wide = this.scale(segment);
    const per = wide / (segment.stop - segment.start);
    const x = (address) => NAME + (address - segment.start) * per;
    context.fillStyle = theme(row === this.row ? 'ink' : 'soft');
    context.textAlign = 'right';
    context.textBaseline = 'middle';
    context.fillText(bytes(segment.stop - segment.start), NAME - 8, y + BLOCK / 2);
    context.fillStyle = segment.blocks.length ? this.hole : theme('paper');
    context.fillRect(NAME, y, wide, BLOCK);
    for (const i of segment.blocks) {
      const from = x(model.address[i]);
      const size = model.requested[i] + model.beyond[i];
      const thick = Math.max(0.6, size * per);
      const waits = model.freed[i] <= this.moment;
      context.fillStyle = waits ? theme('waiting') : this.fills[model.layer[i]];
      context.fillRect(from, y, thick, BLOCK);
      if (model.beyond[i] * per >= 0.5 && !waits) {
        context.fillStyle = this.fills[model.rounding];
        context.fillRect(x(model.address[i] + model.requested[i]), y, model.beyond[i] * per, BLOCK);
      }
      if (thick > 3) {
        context.fillStyle = theme('paper');
        context.fillRect(from + thick - 0.6, y, 0.6, BLOCK);
      }
      if (i === this.block) {
        context.strokeStyle = theme('ink');
        context.lineWidth = 2;
        context.strokeRect(from, y, Math.max(2, thick), BLOCK);
      }
    }
    context.strokeStyle = theme(row === this.row && document.activeElement === this.canvas ? 'ink' : 'line');
    context.lineWidth = 1;
    context.strokeRect(NAME - 0.5, y - 0.5, wide + 1, BLOCK + 1);
  }

  // The segment and the block under the pointer.
  at(event) {
    const box = this.canvas.getBoundingClientRect();
    const row = Math.floor((event.clientY - box.top + this.top) / LINE);
    const segment = this.segments[row];
    if (!segment) return {};
    const address = segment.start + ((event.clientX - box.left - NAME) * (segment.stop - segment.start)) / this.scale(segment);
    const { model } = this;
    const block = segment.blocks.find((i) => model.address[i] <= address
      && address < model.address[i] + model.requested[i] + model.beyond[i]);
    return { row, segment, address, block };
  }

  said({ segment, block }) {
    const { model } = this;
    if (block === undefined) {
      const free = model.facts.together ? 'free, or of small blocks drawn together' : 'a hole';
      return segment.blocks.length ? free : 'cached: the whole segment is free';
    }
    const name = model.word('block.name', block) || model.word('block.op', block);
    const waits = model.freed[block] <= this.moment ? 'freed, another stream uses it' : model.layers[model.layer[block]];
    return [bytes(model.requested[block]), waits, cut(name), cut(model.word('block.module', block))].filter(Boolean).join(' · ');
  }

  hover(event) {
    const at = this.at(event);
    if (!at.segment || at.address < at.segment.start || at.address >= at.segment.stop) return hideTip();
    const size = at.segment.stop - at.segment.start;
    const kind = `${at.segment.small ? 'small' : 'large'} pool${at.segment.expandable ? ', expandable' : ''}, stream ${at.segment.stream}`;
    return showTip(event, make('b', {}, this.said(at)),
      make('div', { class: 'soft' }, `0x${Math.floor(at.address).toString(16)} in ${bytes(size)} at 0x${at.segment.start.toString(16)} · ${kind}`));
  }

  click(event) {
    const at = this.at(event);
    if (!at.segment) return;
    this.row = at.row;
    this.choose(at.block);
  }

  choose(block) {
    byId('block').textContent = this.said({ segment: this.segments[this.row], block });
    this.onBlock(block === undefined ? -1 : block);
  }

  key(event) {
    const segment = this.segments[this.row];
    const rows = { ArrowDown: 1, ArrowUp: -1, PageDown: 10, PageUp: -10 }[event.key];
    const along = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!segment || (!rows && !along)) return;
    event.preventDefault();
    if (rows) {
      this.row = Math.min(this.segments.length - 1, Math.max(0, this.row + rows));
      this.scroll(Math.min(this.row * LINE, Math.max(this.top, (this.row + 1) * LINE - this.height + 4)));
      this.choose(this.segments[this.row].blocks[0]);
      return;
    }
    const place = segment.blocks.indexOf(this.block);
    this.choose(segment.blocks[Math.min(segment.blocks.length - 1, Math.max(0, place + along))]);
  }

  mark(block) {
    this.block = block;
    this.paint();
  }
}
