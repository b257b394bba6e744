// The live tensors, in the order of a column.

const when = (moment) => placeText({ step: model.moment.step[moment], phase: model.phaseAt(moment) });
const ofWords = (name) => ({ key: name, text: (i) => model.text(name, i), words: true });
const COLUMNS = {
  size: { key: 'requested', text: (i) => bytes(model.block.requested[i]), down: true },
  category: { key: 'layer', text: (i) => model.layers[model.block.layer[i]].name },
  ...Object.fromEntries(['name', 'shape', 'dtype', 'module', 'op', 'line'].map((name) => [name, ofWords(name)])),
  allocated: { key: 'born', text: (i) => (i < model.old ? 'before the recording' : when(model.block.born[i])) },
  freed: { key: 'freed', text: (i) => (model.block.freed[i] < model.moments ? when(model.block.freed[i]) : 'never') },
};

class TensorTable extends Rows {
  constructor(page) {
    super(byId('table'), 26);
    Object.assign(this, { page, query: '', sorted: this.box.querySelector('.sort') });
    for (const button of this.box.querySelectorAll('.sort')) {
      on(button, 'click', () => {
        this.sort(button, button === this.sorted ? !this.down : Boolean(COLUMNS[button.textContent].down));
        this.show(this.moment);
      });
    }
    this.sort(this.sorted, true);
  }

  // Sort all blocks by a column, once; each moment shows a subset.
  sort(button, down) {
    this.sorted.parentElement.removeAttribute('aria-sort');
    Object.assign(this, { sorted: button, down });
    const { requested, born, [COLUMNS[button.textContent].key]: values } = model.block;
    const keys = Float64Array.from(values, (key) => (down ? -key : key));
    this.order = Uint32Array.from(born, (_, i) => i).sort((a, b) => keys[a] - keys[b] || requested[b] - requested[a]);
    button.parentElement.setAttribute('aria-sort', down ? 'descending' : 'ascending');
  }

  // Return a function that tests whether a block matches all words of the search.
  matcher() {
    const found = this.query.toLowerCase().split(/\s+/).filter(Boolean).map((part) => ({
      layers: model.layers.map(({ name }) => name.includes(part)),
      words: model.words.map((word) => word.toLowerCase().includes(part)),
    }));
    const columns = Object.values(COLUMNS).filter(({ words }) => words).map(({ key }) => model.block[key]);
    return (i) => found.every(({ layers, words }) => layers[model.block.layer[i]] || columns.some((column) => words[column[i]]));
  }

  show(moment) {
    const matches = this.matcher();
    this.moment = moment;
    this.rows = this.order.filter((i) => model.alive(i, moment) && matches(i));
    this.count = this.rows.length;
    this.sum();
    this.mark(this.page.block);
  }

  search(query) {
    this.query = query;
    this.box.scrollTop = 0;
    this.show(this.moment);
  }

  sum() {
    const { requested: sizes, beyond } = model.block;
    const requested = this.rows.reduce((sum, i) => sum + sizes[i], 0);
    const rounding = this.rows.reduce((sum, i) => sum + beyond[i], 0);
    const together = total(model.restAt(this.moment));
    const element = byId('count');
    Object.assign(element.dataset, { rows: this.count, requested, rounding, together });
    const also = together ? ` + ${bytes(together)} drawn together` : '';
    const sum = `${bytes(requested)} + ${bytes(rounding)} rounding${also} = ${exactly(model.allocated[this.moment])}`;
    element.textContent = this.query.trim() ? `${whole(this.count)} found · ${bytes(requested)}`
      : `${counted(this.count, 'tensor')} · ${sum}`;
  }

  row(place) {
    const i = this.rows[place];
    const row = make('div', { role: 'row', class: 'row' });
    for (const [name, { text }] of Object.entries(COLUMNS)) {
      const shown = name === 'line' ? fileOnly(text(i)) : text(i);
      const cell = make('div', { role: 'gridcell', class: `cell ${name}` }, make('bdi', { dir: 'ltr' }, cut(shown)));
      if (name === 'category') cell.prepend(swatch(model.layers[model.block.layer[i]]));
      if (name === 'size') cell.title = exactly(model.block.requested[i]);
      row.append(cell);
    }
    on(row, 'click', () => this.onRow(place));
    return row;
  }

  onRow(row) {
    this.page.choose(this.rows[row]);
  }

  // Mark a block, and show its details.
  mark(block) {
    this.reveal(this.rows.indexOf(block));
    byId('details').replaceChildren(...(block === undefined ? [] : this.details(block)));
  }

  details(i) {
    const { requested, beyond, address } = model.block;
    const rows = [
      ['size', `${bytes(requested[i])} = ${exactly(requested[i])}, in a block of ${exactly(requested[i] + beyond[i])}`],
      ['address', `0x${address[i].toString(16)}`],
      ...Object.entries(COLUMNS).slice(1).map(([name, { text }]) => [name, text(i)]),
      ['stack', model.framesOf(i).join('\n')],
    ];
    return rows.filter(([, text]) => text)
      .map(([name, text]) => make('div', {}, make('dt', {}, name), make('dd', {}, make('bdi', {}, text))));
  }
}
