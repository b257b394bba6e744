// The stacked timeline. Each pixel column shows the moment in its span with the most allocated memory.

const LEFT = 58; // space for the scale
const RIGHT = 8;
const TOP = 22; // space for the flags
const HEIGHT = 330;
const BANDS = 34; // phases and steps below the chart
const BLOCK = 22; // pixels of the narrowest block that stands for an allocation that failed

class Timeline {
  constructor(page) {
    Object.assign(this, { page, canvas: byId('timeline'), drag: [], from: 0, to: model.moments }); // [from, to) is in view
    const flag = (kind, text = '') => make('i', { class: `flag ${kind}` }, make('b', {}, text));
    this.flags = [
      ...model.shortcuts.slice(1).map((moment) => [moment, flag('near')]),
      [model.peak, flag('', 'peak')],
    ];
    // Of several failures, the last is labelled: each has its tooltip.
    this.failures = model.failures.map((failure, place) => {
      const label = place === model.failures.length - 1 ? [make('b', {}, failureText(failure))] : [];
      return { ...failure, element: make('i', { class: 'failure' }, ...label) };
    });
    this.chosen = flag('strong');
    this.life = make('i', { class: 'life' }); // of the chosen block
    this.veil = make('i', { class: 'veil' }); // over the dragged range
    byId('phases').append(...model.phases.flatMap((phase, at) => (
      model.moment.phase.includes(at) ? [make('span', {}, make('i', { 'data-phase': phase }), phase)] : [])));
    const failures = this.failures.map(({ element }) => element);
    byId('flags').append(this.life, ...this.flags.map(([, element]) => element), ...failures, this.chosen, this.veil);
    on(this.canvas, 'pointerdown', (event) => this.press(event));
    on(this.canvas, 'pointermove', (event) => this.move(event));
    for (const end of ['pointerup', 'pointercancel']) on(this.canvas, end, (event) => this.release(event));
    on(this.canvas, 'keydown', (event) => this.key(event));
    addTooltip(this.canvas, (event) => {
      const failure = this.failureAt(event);
      return failure ? panel.failure(failure) : panel.tooltip(this.momentAt(event), this.layerAt(event));
    });
  }

  // Choose the moment that each pixel column shows, and the scale.
  measure() {
    const { from, to } = this;
    this.width = Math.max(40, Math.floor(this.canvas.parentElement.clientWidth) - LEFT - RIGHT);
    this.picks = new Uint32Array(this.width);
    this.reserved = new Float64Array(this.width);
    for (let x = 0; x < this.width; x++) {
      const first = from + Math.floor((x * (to - from)) / this.width);
      const after = Math.max(first + 1, from + Math.ceil(((x + 1) * (to - from)) / this.width));
      this.picks[x] = first;
      for (let k = first; k < after; k++) {
        if (model.allocated[k] > model.allocated[this.picks[x]]) this.picks[x] = k;
        this.reserved[x] = Math.max(this.reserved[x], model.reserved[k]);
      }
    }
    this.tops = Float64Array.from(this.picks, (k) => model.allocated[k]);
    const drawn = Math.max(1, ...this.reserved, ...this.tops);
    // A block that failed reaches beyond the limit; one far larger is cut.
    const failed = this.failures.filter((failure) => this.shows(failure)).map(({ at, needed }) => model.reserved[at] + needed);
    const high = Math.max(drawn, ...failed.map((top) => Math.min(top, 1.5 * (model.room || drawn))));
    this.withRoom = model.room > 0 && model.room < 1.6 * high; // otherwise the limit would dwarf the chart
    this.high = (failed.length ? 1.13 : 1.06) * (this.withRoom ? Math.max(high, model.room) : high); // leaves space for a label
  }

  shows({ at }) {
    return this.from <= at && at < this.to;
  }

  // The place of a failed allocation: on top of the reserved memory of its moment, which it ends.
  blockOf({ at, needed }) {
    const moment = this.width / (this.to - this.from);
    const wide = Math.max(BLOCK, moment);
    const left = clamp((at - this.from + 1) * moment - wide, 0, this.width - wide);
    const top = Math.max(0, this.y(model.reserved[at] + needed));
    return { left, top, wide, tall: this.y(model.reserved[at]) - top, late: left > this.width / 2 };
  }

  failureAt({ offsetX, offsetY }) {
    return this.failures.find((failure) => {
      const { left, top, wide, tall } = this.blockOf(failure);
      const [x, y] = [offsetX - LEFT - left, offsetY - top];
      return this.shows(failure) && x >= 0 && x < wide && y >= 0 && y < tall;
    });
  }

  y(amount) {
    return TOP + HEIGHT * (1 - amount / this.high);
  }

  momentAt({ offsetX }) {
    return this.picks[clamp(Math.floor(offsetX - LEFT), 0, this.width - 1)];
  }

  // The layer under the pointer, or -1.
  layerAt(event) {
    const amount = this.high * (1 - (event.offsetY - TOP) / HEIGHT);
    let top = 0;
    return amount < 0 ? -1 : model.sumsAt(this.momentAt(event)).findIndex((size) => amount < (top += size));
  }

  draw() {
    this.measure();
    const context = fitted(this.canvas, LEFT + this.width + RIGHT, TOP + HEIGHT + BANDS);
    const write = (text, x, y, align, colour = 'soft') => {
      context.font = `11px ${theme('font')}`;
      context.textAlign = align;
      context.textBaseline = 'middle';
      context.fillStyle = theme(colour);
      context.fillText(text, x, y);
    };
    const end = LEFT + this.width;
    this.drawScale(context, write);
    this.drawLayers(context, end);
    context.strokeStyle = theme('ink');
    context.lineWidth = 1.25;
    this.steps(context, this.reserved);
    context.stroke();
    const over = { offsetX: end - 1, offsetY: this.y(this.reserved[this.width - 1]) - 9 };
    const failure = this.failureAt(over);
    write('reserved', end - 4 - (failure ? this.blockOf(failure).wide : 0), over.offsetY, 'right');
    if (this.withRoom) {
      const y = Math.round(this.y(model.room));
      context.fillStyle = theme('bad');
      for (let x = LEFT; x < end; x += 10) context.fillRect(x, y, 6, 1.5);
      write(`available on the device: ${bytes(model.room)}`, LEFT + 4, y - 9, 'left', 'bad');
    }
    this.drawBand(context, write, (k) => model.phaseAt(k), TOP + HEIGHT + 1);
    this.drawBand(context, write, (k) => (model.moment.step[k] ? `step ${model.moment.step[k]}` : 'setup'), TOP + HEIGHT + 17);
    this.lay();
  }

  drawScale(context, write) {
    const [unit, size] = UNITS.find(([, amount]) => this.high >= amount) || ['B', 1];
    let step = size;
    while (step < this.high / 6) step *= 2;
    while (step > this.high / 3 && step > 1) step /= 2;
    for (let amount = 0; amount <= this.high; amount += step) {
      const y = Math.round(this.y(amount));
      context.fillStyle = theme('grid');
      context.fillRect(LEFT, y, this.width, 1);
      write(amount ? `${+(amount / size).toFixed(2)} ${unit}` : '0', LEFT - 8, y, 'right');
    }
  }

  // A stepped line along the amount of each pixel column.
  steps(context, amounts) {
    context.beginPath();
    amounts.forEach((amount, x) => {
      context.lineTo(LEFT + x, this.y(amount));
      context.lineTo(LEFT + x + 1, this.y(amount));
    });
  }

  // Draw from the top layer down, each to the baseline, so that there are no seams between neighbours.
  drawLayers(context, end) {
    const tops = this.tops.slice();
    for (let layer = model.rounding; layer >= 0; layer--) {
      this.steps(context, tops);
      context.lineTo(end, this.y(0));
      context.lineTo(LEFT, this.y(0));
      context.fillStyle = fillOf(model.layers[layer]);
      context.fill();
      this.picks.forEach((k, x) => { tops[x] -= model.sumsAt(k)[layer]; });
    }
  }

  // A band below the chart: runs of columns with the same name, labelled where the name fits.
  drawBand(context, write, name, y) {
    const names = Array.from(this.picks, name);
    for (let from = 0, to = 0; from < this.width; from = to) {
      while (to < this.width && names[to] === names[from]) to++;
      context.fillStyle = theme(`phase-${names[from]}`) || theme('paper');
      context.fillRect(LEFT + from, y, to - from, 15);
      context.fillStyle = theme('line');
      context.fillRect(LEFT + from, y, 1, 15);
      if (names[from].length * 6.5 + 4 < to - from) write(names[from], LEFT + (from + to) / 2, y + 8, 'center', 'ink');
    }
  }

  // Position the flags, the chosen block's lifetime and the dragged range; hide those out of view.
  lay() {
    const share = (moment) => clamp((moment - this.from) / (this.to - this.from), 0, 1);
    const put = (element, from, to = from) => {
      element.hidden = !(from < this.to && to >= this.from);
      element.classList.toggle('late', share(from) > 0.5);
      element.style.left = `${100 * share(from)}%`;
      element.style.width = `${100 * (share(to) - share(from))}%`;
    };
    const { moment, block } = this.page;
    for (const [at, flag] of [...this.flags, [moment, this.chosen]]) put(flag, at + 0.5);
    for (const failure of this.failures) {
      const { element } = failure;
      const { left, top, wide, tall, late } = this.blockOf(failure);
      element.hidden = !this.shows(failure);
      element.classList.toggle('late', late);
      Object.entries({ left, top, width: wide, height: tall }).forEach(([name, length]) => { element.style[name] = `${length}px`; });
    }
    this.chosen.firstChild.textContent = `${moment === model.peak ? 'peak ' : ''}${bytes(model.allocated[moment])}`;
    put(this.life, model.block.born[block], model.block.freed[block]);
    put(this.veil, ...this.dragged());
  }

  view(from, to) {
    const span = clamp(Math.round(to - from), Math.min(model.moments, 16), model.moments);
    this.from = clamp(Math.round(from), 0, model.moments - span);
    this.to = this.from + span;
    this.draw();
  }

  // The moment keeps its position on the screen.
  zoom(factor) {
    const middle = clamp(this.page.moment, this.from, this.to);
    this.view(middle - (middle - this.from) * factor, middle + (this.to - middle) * factor);
  }

  show(moment) {
    const half = (this.to - this.from) / 2;
    if (moment < this.from || moment >= this.to) this.view(moment - half, moment + half);
    else this.lay();
  }

  // The pointer as a fractional moment.
  under({ offsetX }) {
    return this.from + clamp((offsetX - LEFT) / this.width, 0, 1) * (this.to - this.from);
  }

  // The dragged range, if it is more than a click.
  dragged() {
    const [from, to] = [...this.drag].sort((a, b) => a - b);
    return (to - from) * this.width > 4 * (this.to - this.from) ? [from, to] : [];
  }

  press(event) {
    if (event.button) return;
    this.drag = [this.under(event), this.under(event)];
    this.canvas.setPointerCapture(event.pointerId);
  }

  move(event) {
    if (!this.drag.length) return;
    this.drag[1] = this.under(event);
    this.lay();
  }

  release(event) {
    const [from, to] = this.dragged();
    const pressed = this.drag.length && event.type === 'pointerup';
    this.drag = [];
    if (pressed && to) this.view(from, to);
    else if (pressed) this.page.select(this.momentAt(event));
    else this.lay();
  }

  key(event) {
    const step = event.shiftKey ? Math.max(1, Math.round((this.to - this.from) / 40)) : 1;
    const p = model.peak - this.page.moment;
    const keys = { ArrowRight: step, ArrowUp: step, ArrowLeft: -step, ArrowDown: -step, p, P: p };
    const moment = moveTo(event, this.page.moment, model.moments, keys);
    const zoom = { '+': 0.5, '=': 0.5, '-': 2, 0: 1e9 }[event.key];
    if (moment !== undefined) this.page.select(moment);
    else if (zoom && !modified(event)) this.zoom(zoom);
  }
}
