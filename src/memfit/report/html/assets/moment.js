// The panel beside the timeline: where the script is at the moment, and the bytes of each category.

const panel = {
  show(moment) {
    const allocated = model.allocated[moment];
    const reserved = model.reserved[moment];
    const sums = [...model.sumsAt(moment)].reverse(); // in the order of the stack and of the table
    [...sums, allocated, reserved - allocated, reserved].forEach((amount, place) => {
      const row = byId('sums').rows[place];
      const [, value, share] = row.children;
      row.dataset.bytes = amount;
      row.classList.toggle('none', !amount);
      value.textContent = bytes(amount);
      value.title = exactly(amount);
      share.textContent = place < sums.length ? `${Math.round((100 * amount) / (allocated || 1))} %` : '';
    });
    byId('place').textContent = `${placeText(model.placeAt(moment))} · event ${whole(model.moment.event[moment])}`;
    byId('h-moment').textContent = moment === model.peak ? 'At the peak' : 'At this moment';
  },

  // The tooltip of an allocation that failed.
  failure(failure) {
    const lines = [make('b', {}, failureText(failure)), make('div', { class: 'soft' }, placeText({ ...model.placeAt(failure.at), line: '' }))];
    return [...lines, make('div', {}, `${exactly(failure.needed)} needed, ${exactly(failure.available)} available`)];
  },

  // The tooltip of a moment and a layer: where the script is, and which modules hold most.
  tooltip(moment, layer) {
    const lines = [
      make('b', {}, `${bytes(model.allocated[moment])} allocated, ${bytes(model.reserved[moment])} reserved`),
      make('div', { class: 'soft' }, placeText({ ...model.placeAt(moment), line: '' })),
    ];
    if (layer < 0) return lines;
    const kind = model.layers[layer];
    lines.push(make('div', { class: 'over' }, swatch(kind), `${kind.name} ${bytes(model.sumsAt(moment)[layer])}`));
    for (const [module, amount] of this.holders(moment, layer)) {
      const name = make('bdi', {}, cut(module) || 'outside modules');
      lines.push(make('div', { class: 'holder' }, name, bytes(amount)));
    }
    return lines;
  },

  holders(moment, layer) {
    const rounding = layer === model.rounding;
    const amounts = rounding ? model.block.beyond : model.block.requested;
    const held = new Map();
    for (const i of model.liveAt(moment)) {
      const module = model.text('module', i);
      if (rounding || model.block.layer[i] === layer) held.set(module, (held.get(module) || 0) + amounts[i]);
    }
    return [...held].sort((a, b) => b[1] - a[1]).slice(0, 3);
  }
};
