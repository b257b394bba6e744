// The live tensors. Only the rows in view are in the page.

const TALL = 26; // pixels a row
const TABLE_COLUMNS = [
  { name: 'size', class: 'size', key: (m, i) => m.requested[i], text: (m, i) => bytes(m.requested[i]), down: true },
  { name: 'category', key: (m, i) => m.layer[i], text: (m, i) => m.layers[m.layer[i]] },
  { name: 'name', word: 'block.name' },
  { name: 'shape', class: 'shape', word: 'block.shape' },
  { name: 'dtype', class: 'dtype', word: 'block.dtype' },
  { name: 'module', class: 'module', word: 'block.module' },
  { name: 'op', class: 'op', word: 'block.op' },
  { name: 'line', class: 'line', word: 'block.line', short: fileOnly },
  { name: 'born', class: 'born', key: (m, i) => m.born[i], text: (m, i) => (i < m.facts.old ? 'before the recording' : when(m, m.born[i])) },
  { name: 'dies', class: 'dies', key: (m, i) => m.freed[i], text: (m, i) => (m.freed[i] < m.moments ? when(m, m.freed[i]) : 'is kept') },
];

const when = (model, moment) => placeText({ ...model.placeAt(moment), module: '', op: '', line: '' });

class TensorTable {
  constructor(model, { onBlock }) {
    Object.assign(this, { model, onBlock, column: TABLE_COLUMNS[0], down: true, query: '', block: -1, rows: [] });
    this.element = byId('table');
    this.ranks = new Map();
    this.head = make('div', { class: 'head', role: 'row' }, ...TABLE_COLUMNS.map((column) => this.header(column)));
    this.space = make('div', { class: 'space', role: 'rowgroup' });
    this.element.append(this.head, this.space);
    this.element.addEventListener('scroll', () => { this.measure(); this.paint(); });
    this.measure();
    this.element.addEventListener('keydown', (event) => this.key(event));
  }

  header(column) {
    const button = make('button', { type: 'button', class: 'sort' }, column.name);
    column.cell = make('div', { role: 'columnheader', class: `cell ${column.class || ''}` }, button);
    button.addEventListener('click', () => {
      this.down = column === this.column ? !this.down : Boolean(column.down);
      this.column = column;
      this.show(this.moment);
    });
    return column.cell;
  }

  // The place of every block in the order of a column, found once.
  rankOf(column) {
    if (!this.ranks.has(column)) {
      const { model } = this;
      const keys = column.word ? this.wordRanks(column.word) : Float64Array.from({ length: model.blocks }, (_, i) => column.key(model, i));
      const order = Uint32Array.from({ length: model.blocks }, (_, i) => i);
      order.sort((a, b) => keys[a] - keys[b] || model.requested[b] - model.requested[a] || a - b);
      const rank = new Uint32Array(model.blocks);
      order.forEach((i, place) => { rank[i] = place; });
      this.ranks.set(column, { order, rank });
    }
    return this.ranks.get(column);
  }

  wordRanks(name) {
    const { words, columns } = this.model;
    const rank = new Uint32Array(words.length);
    words.map((_, index) => index)
      .sort((a, b) => (words[a] < words[b] ? -1 : 1))
      .forEach((word, place) => { rank[word] = words[word] ? place : words.length; }); // nothing comes last
    return Float64Array.from(columns[name], (word) => rank[word]);
  }

  // Says of a block whether it has all the words of the search.
  matcher() {
    const asked = this.query.toLowerCase().split(/\s+/).filter(Boolean);
    if (!asked.length) return () => true;
    const { model } = this;
    const found = asked.map((part) => ({
      words: Uint8Array.from(model.words, (word) => word.toLowerCase().includes(part)),
      layers: model.layers.map((name) => name.includes(part)),
      phases: model.facts.phases.map((name) => name.includes(part)),
    }));
    const columns = TABLE_COLUMNS.filter((column) => column.word).map((column) => model.columns[column.word]);
    return (i) => found.every(({ words, layers, phases }) => layers[model.layer[i]]
      || phases[model.columns['block.phase'][i]] || columns.some((column) => words[column[i]]));
  }

  show(moment) {
    this.moment = moment;
    const { model } = this;
    const { order, rank } = this.rankOf(this.column);
    const live = model.liveAt(moment).filter(this.matcher());
    const places = Uint32Array.from(live, (i) => rank[i]).sort();
    if (this.down) places.reverse();
    this.rows = Array.from(places, (place) => order[place]);
    for (const column of TABLE_COLUMNS) {
      const state = this.down ? 'descending' : 'ascending';
      column.cell.setAttribute('aria-sort', column === this.column ? state : 'none');
    }
    this.element.setAttribute('aria-rowcount', this.rows.length + 1);
    this.space.style.height = `${this.rows.length * TALL}px`;
    this.count(live);
    if (this.top > this.rows.length * TALL) this.scroll(0);
    this.paint();
  }

  count(live) {
    const { model } = this;
    const sums = model.sumsAt(this.moment);
    let asked = 0;
    let beyond = 0;
    for (const i of live) {
      asked += model.requested[i];
      beyond += model.beyond[i];
    }
    const element = byId('count');
    Object.assign(element.dataset, { rows: live.length, requested: asked, rounding: beyond });
    if (this.query.trim()) {
      element.textContent = `${whole(live.length)} found · ${bytes(asked)}`;
      return;
    }
    let rest = sums.restBeyond;
    let count = 0;
    sums.rest.forEach((amount, layer) => { rest += amount; count += sums.restCount[layer]; });
    element.dataset.together = rest;
    const together = count ? ` + ${bytes(rest)} in ${whole(count)} drawn together` : '';
    element.textContent = `${counted(live.length, 'tensor')} · ${bytes(asked)} + ${bytes(beyond)} rounding${together}`
      + ` = ${exactly(model.allocated[this.moment])}`;
  }

  // Read when it may have changed, and kept: asking makes the browser lay out the page.
  measure() {
    this.height = this.element.clientHeight || 380;
    this.top = this.element.scrollTop;
  }

  // Make the rows that are in view, and a few around them.
  paint(first = Math.floor(this.top / TALL) - 3, count = Math.ceil(this.height / TALL) + 6) {
    const from = Math.max(0, first);
    const to = Math.min(this.rows.length, from + count);
    const made = [];
    for (let row = from; row < to; row++) made.push(this.row(row));
    this.space.replaceChildren(...made);
    const chosen = this.space.querySelector('[aria-selected=true]');
    if (chosen) this.element.setAttribute('aria-activedescendant', chosen.id);
    else this.element.removeAttribute('aria-activedescendant');
  }

  row(place) {
    const { model } = this;
    const i = this.rows[place];
    const row = make('div', { role: 'row', class: 'row', id: `row-${place}`, 'aria-rowindex': place + 2, 'aria-selected': i === this.block });
    row.style.top = `${place * TALL}px`;
    for (const column of TABLE_COLUMNS) {
      const text = column.word ? model.word(column.word, i) : column.text(model, i);
      const cell = make('div', { role: 'gridcell', class: `cell ${column.class || ''}` });
      if (column.name === 'category') {
        const swatch = make('i', { class: 'swatch', 'aria-hidden': 'true' });
        paint(swatch, text);
        cell.append(swatch);
      }
      cell.append(make('bdi', { dir: 'ltr' }, cut(column.short ? column.short(text) : text)));
      if (column.name === 'size') cell.title = exactly(model.requested[i]);
      row.append(cell);
    }
    row.addEventListener('click', () => this.onBlock(i));
    return row;
  }

  key(event) {
    if (event.target !== this.element) return; // a header's own keys
    const page = Math.max(1, Math.floor(this.height / TALL) - 2);
    const now = this.rows.indexOf(this.block);
    const to = {
      ArrowDown: now + 1, ArrowUp: now - 1, PageDown: now + page, PageUp: now - page, Home: 0, End: this.rows.length - 1,
    }[event.key];
    if (to === undefined || !this.rows.length) return;
    event.preventDefault();
    const row = Math.min(this.rows.length - 1, Math.max(0, to));
    this.onBlock(this.rows[row]);
  }

  mark(block) {
    this.block = block;
    const row = this.rows.indexOf(block);
    if (row >= 0) {
      const room = this.height - TALL * 2;
      if (row * TALL < this.top) this.scroll(row * TALL);
      else if (row * TALL > this.top + room) this.scroll(row * TALL - room);
    }
    this.paint();
    this.detail(block);
  }

  scroll(top) {
    this.element.scrollTop = top;
    this.measure();
  }

  // Everything that is known of a block, in full.
  detail(i) {
    const { model } = this;
    const rows = [];
    const tell = (name, text) => {
      if (text) rows.push(make('div', {}, make('dt', {}, name), make('dd', {}, make('bdi', {}, text))));
    };
    if (i >= 0) {
      tell('size', `${bytes(model.requested[i])} = ${exactly(model.requested[i])}, in a block of ${exactly(model.requested[i] + model.beyond[i])}`);
      tell('address', `0x${model.address[i].toString(16)}`);
      for (const column of TABLE_COLUMNS.slice(1)) tell(column.name, column.word ? model.word(column.word, i) : column.text(model, i));
      tell('stack', model.framesOf(i).join('\n'));
    }
    byId('details').replaceChildren(...rows);
  }
}
