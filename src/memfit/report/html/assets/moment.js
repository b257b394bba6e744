// The panel beside the timeline: where the script is at the moment, and what its bytes are for.

// How sure the rows are: most are alike.
function sureText(layers) {
  const kinds = new Map();
  for (const { name, sure } of layers) kinds.set(sure, [...(kinds.get(sure) || []), name]);
  const [[most], ...others] = [...kinds].sort((a, b) => b[1].length - a[1].length);
  return [`${most}`, ...others.map(([sure, names]) => `${sure}: ${names.join(', ')}`)].join('; ');
}

class MomentPanel {
  constructor(model) {
    this.model = model;
    this.rows = model.layers.map((name, layer) => this.row(name, layer)).reverse(); // as they are stacked
    this.total = this.line('allocated', 'total');
    this.cached = this.line('cached', '');
    this.reserved = this.line('reserved', 'total');
    byId('sure').textContent = sureText(model.facts.layers);
    byId('sums').tBodies[0].append(...this.rows.map((row) => row.element), this.total.element,
      this.cached.element, this.reserved.element);
  }

  row(name, layer) {
    const swatch = make('i', { class: 'swatch', 'aria-hidden': 'true' });
    paint(swatch, name);
    const row = this.line(name, '', swatch);
    row.layer = layer;
    return row;
  }

  line(name, kind, ...before) {
    const value = make('td');
    const share = make('td', { class: 'share' });
    const element = make('tr', { class: kind, 'data-row': name }, make('th', { scope: 'row' }, ...before, name), value, share);
    return { element, value, share };
  }

  show(moment) {
    const { model } = this;
    const sums = model.sumsAt(moment);
    const allocated = model.allocated[moment];
    for (const { layer, element, value, share } of this.rows) {
      this.fill({ element, value, share }, sums.bytes[layer], allocated);
      element.classList.toggle('none', !sums.bytes[layer]);
    }
    this.fill(this.total, allocated, 0);
    this.fill(this.cached, model.reserved[moment] - allocated, 0);
    this.fill(this.reserved, model.reserved[moment], 0);
    byId('place').textContent = `${placeText(model.placeAt(moment))} · event ${whole(model.events[moment])}`;
    byId('h-moment').textContent = moment === model.peak ? 'At the peak' : 'At this moment';
  }

  fill({ element, value, share }, amount, all) {
    element.dataset.bytes = amount;
    value.textContent = bytes(amount);
    value.title = exactly(amount);
    share.textContent = percent(amount, all);
  }

  // What the pointer is over: the layer, who holds most then, and what the script does.
  tip(moment, layer) {
    const { model } = this;
    const place = model.placeAt(moment);
    const sums = model.sumsAt(moment);
    const lines = [make('b', {}, `${bytes(model.allocated[moment])} allocated, ${bytes(model.reserved[moment])} reserved`)];
    lines.push(make('div', { class: 'soft' }, placeText({ ...place, line: '' })));
    if (layer >= 0) {
      const name = model.layers[layer];
      const swatch = make('i', { class: 'swatch' });
      paint(swatch, name);
      lines.push(make('div', { class: 'over' }, swatch, `${name} ${bytes(sums.bytes[layer])}, ${counted(sums.count[layer], 'block')}`));
      for (const [module, amount] of this.holders(moment, layer)) {
        lines.push(make('div', { class: 'holder' }, make('bdi', {}, cut(module) || 'outside modules'), make('span', {}, bytes(amount))));
      }
    }
    return lines;
  }

  holders(moment, layer) {
    const { model } = this;
    const held = new Map();
    for (const i of model.liveAt(moment)) {
      if (layer !== model.rounding && model.layer[i] !== layer) continue;
      const module = model.word('block.module', i);
      held.set(module, (held.get(module) || 0) + (layer === model.rounding ? model.beyond[i] : model.requested[i]));
    }
    return [...held].sort((a, b) => b[1] - a[1]).slice(0, 3);
  }
}
