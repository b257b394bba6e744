// The segments: one row per segment, or per group of equal ones; the position in a row is the address.

const NAME = 104; // pixels for a segment's size
const NARROW = 24; // pixels of the shortest segment, off scale if necessary, so that its blocks can be seen

class SegmentMap extends Rows {
  constructor(page) {
    super(byId('map'), 15);
    this.page = page;
    this.canvas = make('canvas');
    this.box.prepend(this.canvas);
    on(this.box, 'keydown', (event) => this.along(event));
  }

  // Segments at a moment, with their blocks. Adjacent mapped ranges form one segment.
  show(moment) {
    const { address, size, born, freed, small, expandable } = model.range;
    const found = [];
    address.forEach((start, r) => {
      if (born[r] > moment || freed[r] <= moment) return;
      const last = found[found.length - 1];
      const touches = last && last.start + last.size === start && last.small === small[r];
      if (touches && last.expandable && expandable[r]) last.size += size[r];
      else found.push({ start, size: size[r], small: small[r], expandable: expandable[r], blocks: [] });
    });
    const of = model.block.address;
    let at = 0;
    for (const i of model.liveAt(moment, true).sort((a, b) => of[a] - of[b])) {
      while (at < found.length && found[at].start + found[at].size <= of[i]) at++;
      if (at < found.length && of[i] >= found[at].start) found[at].blocks.push(i);
    }
    this.moment = moment;
    this.total = found.length;
    this.segments = this.grouped(found).sort((a, b) => a.small - b.small || b.size - a.size || a.start - b.start);
    this.count = this.segments.length;
    this.widest = Math.max(1, ...found.map((segment) => segment.size));
    this.box.style.height = `${Math.min(330, this.count * this.tall + 4)}px`;
    byId('reserved').textContent = this.summary(found.filter(({ blocks }) => !blocks.length));
    this.mark(this.page.block);
  }

  // Segments of one size whose blocks lie alike become one row, which draws the first of them.
  grouped(segments) {
    const { address, requested, beyond, layer, freed } = model.block;
    const groups = new Map();
    for (const segment of segments) {
      const { start, size, small, blocks } = segment;
      const alike = blocks.map((i) => [address[i] - start, requested[i], beyond[i], layer[i], freed[i] <= this.moment]);
      const key = [size, small, ...alike].join();
      if (groups.has(key)) groups.get(key).equal.push(segment);
      else groups.set(key, Object.assign(segment, { equal: [segment] }));
    }
    return [...groups.values()];
  }

  summary(free) {
    const reserved = model.reserved[this.moment];
    // If blocks are drawn together, a segment that looks free may hold small blocks.
    const wholly = `, of which ${bytes(total(free.map(({ size }) => size)))} in ${counted(free.length, 'wholly free segment')}`;
    const cached = `${bytes(reserved - model.allocated[this.moment])} cached${free.length && !model.together ? wholly : ''}`;
    return dotted(counted(this.total, 'segment'), `${bytes(reserved)} reserved`, cached);
  }

  // Pixels per byte of a segment.
  scale({ size }) {
    return Math.max(NARROW, ((this.box.clientWidth - NAME - 6) * size) / this.widest) / size;
  }

  row(place) {
    const { start, size, blocks, equal } = this.segments[place];
    const many = equal.length > 1;
    const per = this.scale({ size });
    const { address, requested, beyond } = model.block;
    const under = ({ offsetX }) => {
      const at = start + (offsetX - NAME) / per;
      return blocks.find((i) => address[i] <= at && at < address[i] + requested[i] + beyond[i]);
    };
    const row = make('div', { role: 'row', class: 'segment' }, make('span', { role: 'rowheader' }, `${bytes(size)}${many ? ` × ${equal.length}` : ''}`));
    const held = `${counted(blocks.length, 'block')}${many ? ` in each of ${equal.length} equal segments` : ''}`;
    row.append(make('span', { role: 'gridcell', 'aria-label': held }));
    row.style.width = `${NAME + size * per}px`;
    on(row, 'click', (event) => this.choose(place, under(event)));
    const free = blocks.length ? byId('hole').textContent : 'cached: the whole segment is free';
    const first = many ? `the first of ${equal.length} equal segments: ` : '';
    addTooltip(row, (event) => [first + (under(event) === undefined ? free : this.describe(under(event)))]);
    return row;
  }

  // One canvas lies below the rows in view.
  paint(...rows) {
    super.paint(...rows);
    const context = fitted(this.canvas, this.box.clientWidth - NAME, (this.last - this.first) * this.tall);
    this.canvas.style.top = `${this.first * this.tall}px`;
    for (let place = this.first; place < this.last; place++) this.draw(context, this.segments[place], (place - this.first) * this.tall);
  }

  draw(context, segment, y) {
    const { address, requested, beyond, freed, layer } = model.block;
    const { start, size, blocks } = segment;
    const per = this.scale(segment);
    const [paper, hole, line, waiting, ink] = ['paper', 'hole', 'line', 'waiting', 'ink'].map(theme);
    const fill = (from, length, style) => {
      context.fillStyle = style;
      context.fillRect(from, y + 2, length, this.tall - 4);
    };
    const frame = (from, length, style) => {
      context.strokeStyle = style;
      context.strokeRect(from + 0.5, y + 1.5, length - 1, this.tall - 3);
    };
    fill(0, size * per, blocks.length ? stripes(paper, hole) : paper);
    for (const i of blocks) {
      const from = (address[i] - start) * per;
      const thick = Math.max(0.6, (requested[i] + beyond[i]) * per);
      const rounding = beyond[i] * per;
      const waits = freed[i] <= this.moment;
      fill(from, thick, waits ? waiting : fillOf(model.layers[layer[i]]));
      if (rounding >= 0.5 && !waits) fill(from + thick - rounding, rounding, fillOf(model.layers[model.rounding]));
      if (thick > 3) fill(from + thick - 0.6, 0.6, paper);
    }
    frame(0, size * per, line);
    const { block } = this.page;
    const owner = segment.equal.find((one) => one.blocks.includes(block));
    if (!owner) return;
    frame((address[block] - owner.start) * per, Math.max(3, (requested[block] + beyond[block]) * per), ink);
  }

  describe(i) {
    const waits = model.block.freed[i] <= this.moment ? 'freed, another stream uses it' : '';
    return dotted(waits, ...['size', 'category', 'name', 'op', 'module'].map((name) => cut(COLUMNS[name].text(i))));
  }

  choose(row, block) {
    this.chosen = row;
    this.page.choose(block);
  }

  onRow(row) {
    this.choose(row, this.segments[row].blocks[0]);
  }

  along(event) {
    const row = Math.max(0, this.chosen);
    const blocks = this.segments[row].equal.flatMap((segment) => segment.blocks);
    if (!event.key.startsWith('Arrow')) return; // Home and End are for rows
    const place = moveTo(event, blocks.indexOf(this.page.block), blocks.length, { ArrowRight: 1, ArrowLeft: -1 });
    if (place !== undefined) this.choose(row, blocks[place]);
  }

  // Show where a block is.
  mark(block) {
    const isChosen = block !== undefined;
    byId('block').textContent = isChosen ? this.describe(block) : '';
    this.reveal(isChosen ? this.segments.findIndex(({ equal }) => equal.some(({ blocks }) => blocks.includes(block))) : Math.min(this.chosen, this.count - 1));
  }
}
