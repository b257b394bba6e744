// The stacked timeline. Each column of pixels shows the moment among its own with the most allocated.

const LEFT = 58; // room for the scale
const TOP = 22; // room for the flags of the peak and of the moment
const BANDS = 34; // phases and steps below the chart
const HEIGHT = 330;

class Timeline {
  constructor(model, canvas, { onSelect, onHover }) {
    Object.assign(this, { model, canvas, onSelect, onHover });
    this.from = 0;
    this.to = model.moments; // the view is [from, to)
    this.toDevice = false;
    this.selected = model.peak;
    this.block = -1;
    this.drag = null;
    canvas.addEventListener('pointerdown', (event) => this.press(event));
    canvas.addEventListener('pointermove', (event) => this.move(event));
    canvas.addEventListener('pointerup', (event) => this.release(event));
    canvas.addEventListener('pointercancel', () => { this.drag = null; this.paint(); });
    canvas.addEventListener('pointerleave', () => onHover(null));
    canvas.addEventListener('keydown', (event) => this.key(event));
  }

  // Choose moments, and add up their layers from the bottom.
  measure() {
    const { model } = this;
    this.width = Math.max(40, Math.floor(this.canvas.parentElement.clientWidth) - LEFT - 8);
    const { width, from, to } = this;
    const layers = model.layers.length;
    this.picks = new Uint32Array(width);
    this.tops = new Float64Array(width * layers);
    this.most = new Float64Array(width); // reserved
    let sums = model.sumsAt(from);
    for (let x = 0; x < width; x++) {
      const first = from + Math.floor((x * (to - from)) / width);
      const last = Math.max(first, from + Math.ceil(((x + 1) * (to - from)) / width) - 1);
      let pick = first;
      let most = 0;
      for (let k = first; k <= last; k++) {
        if (model.allocated[k] > model.allocated[pick]) pick = k;
        most = Math.max(most, model.reserved[k]);
      }
      if (pick < sums.at) sums = model.sumsAt(pick); // zoomed in so far that columns share moments
      else model.walk(sums, pick);
      this.picks[x] = pick;
      this.most[x] = most;
      for (let l = 0, top = 0; l < layers; l++) {
        top += sums.bytes[l];
        this.tops[x * layers + l] = top;
      }
    }
    let high = 1;
    for (let k = from; k < to; k++) high = Math.max(high, model.reserved[k], model.allocated[k]);
    const { room } = model.facts;
    this.withRoom = room > 0 && (this.toDevice || room < 1.6 * high);
    this.high = 1.06 * (this.withRoom ? Math.max(high, room) : high);
  }

  x(moment) {
    return LEFT + ((moment - this.from) / (this.to - this.from)) * this.width;
  }

  y(amount) {
    return TOP + HEIGHT * (1 - amount / this.high);
  }

  momentAt(event) {
    const x = event.clientX - this.canvas.getBoundingClientRect().left - LEFT;
    return this.picks[Math.min(this.width - 1, Math.max(0, Math.floor(x)))];
  }

  // The layer under the pointer, or -1.
  layerAt(event) {
    const box = this.canvas.getBoundingClientRect();
    const x = Math.floor(event.clientX - box.left - LEFT);
    const amount = this.high * (1 - (event.clientY - box.top - TOP) / HEIGHT);
    if (x < 0 || x >= this.width || amount < 0) return -1;
    const layers = this.model.layers.length;
    for (let l = 0; l < layers; l++) if (amount < this.tops[x * layers + l]) return l;
    return -1;
  }

  // All that depends on the view alone is drawn once, aside; a click only adds flags to a copy of it.
  draw() {
    this.measure();
    this.aside = document.createElement('canvas');
    const context = fitted(this.aside, LEFT + this.width + 8, TOP + HEIGHT + BANDS);
    context.font = `11px ${theme('font')}`;
    this.drawScale(context);
    this.drawLayers(context);
    this.drawReserved(context);
    this.drawBands(context);
    this.drawFailures(context);
    if (this.withRoom) this.drawRoom(context);
    this.paint();
  }

  paint() {
    const context = fitted(this.canvas, LEFT + this.width + 8, TOP + HEIGHT + BANDS);
    context.drawImage(this.aside, 0, 0, LEFT + this.width + 8, TOP + HEIGHT + BANDS);
    context.font = `11px ${theme('font')}`;
    this.drawBlock(context);
    this.drawFlags(context);
    if (this.drag && this.drag.moved) {
      context.fillStyle = theme('veil');
      context.fillRect(Math.min(this.drag.x, this.drag.now), TOP, Math.abs(this.drag.now - this.drag.x), HEIGHT);
    }
  }

  drawScale(context) {
    const [unit, size] = UNITS.find(([, amount]) => this.high >= amount) || ['B', 1];
    let step = size;
    while (step < this.high / 6) step *= 2;
    while (step > this.high / 3 && step > 1) step /= 2;
    context.textAlign = 'right';
    context.textBaseline = 'middle';
    for (let amount = 0; amount <= this.high; amount += step) {
      const y = Math.round(this.y(amount)) + 0.5;
      context.fillStyle = theme('grid');
      context.fillRect(LEFT, y - 0.5, this.width, 1);
      context.fillStyle = theme('soft');
      context.fillText(amount ? `${+(amount / size).toFixed(2)} ${unit}` : '0', LEFT - 8, y);
    }
  }

  // From the top layer down to the bottom, each to the ground: no seams between neighbours.
  drawLayers(context) {
    const { model, width, tops } = this;
    const layers = model.layers.length;
    const ground = this.y(0);
    for (let l = layers - 1; l >= 0; l--) {
      context.beginPath();
      context.moveTo(LEFT, ground);
      for (let x = 0; x < width; x++) {
        const y = this.y(tops[x * layers + l]);
        context.lineTo(LEFT + x, y);
        context.lineTo(LEFT + x + 1, y);
      }
      context.lineTo(LEFT + width, ground);
      context.fillStyle = fillOf(context, model.layers[l]);
      context.fill();
    }
  }

  drawReserved(context) {
    context.beginPath();
    for (let x = 0; x < this.width; x++) {
      const y = this.y(this.most[x]);
      context.lineTo(LEFT + x, y);
      context.lineTo(LEFT + x + 1, y);
    }
    context.strokeStyle = theme('ink');
    context.lineWidth = 1.25;
    context.stroke();
    const y = this.y(this.most[this.width - 1]);
    context.fillStyle = theme('soft');
    context.textAlign = 'right';
    context.textBaseline = 'bottom';
    context.fillText('reserved', LEFT + this.width - 4, y - 3);
  }

  drawRoom(context) {
    const y = Math.round(this.y(this.model.facts.room)) + 0.5;
    context.strokeStyle = context.fillStyle = theme('bad');
    context.lineWidth = 1.5;
    context.setLineDash([6, 4]);
    context.beginPath();
    context.moveTo(LEFT, y);
    context.lineTo(LEFT + this.width, y);
    context.stroke();
    context.setLineDash([]);
    context.textAlign = 'left';
    context.textBaseline = 'bottom';
    context.fillText(`room on the device ${bytes(this.model.facts.room)}`, LEFT + 4, y - 3);
  }

  drawBands(context) {
    const { model, width } = this;
    const runs = (value) => {
      const found = [];
      for (let x = 0; x < width; x++) {
        const what = value(this.picks[x]);
        const last = found[found.length - 1];
        if (last && last.what === what) last.to = x + 1;
        else found.push({ what, from: x, to: x + 1 });
      }
      return found;
    };
    const label = (run, text, y) => {
      context.save();
      context.beginPath();
      context.rect(LEFT + run.from, y - 8, run.to - run.from, 16);
      context.clip();
      if (context.measureText(text).width + 6 <= run.to - run.from) {
        context.fillText(text, LEFT + (run.from + run.to) / 2, y);
      }
      context.restore();
    };
    context.textAlign = 'center';
    context.textBaseline = 'middle';
    const y = TOP + HEIGHT + 1;
    for (const run of runs((k) => model.phaseAt(k))) {
      context.fillStyle = theme(`phase-${run.what}`) || theme('grid');
      context.fillRect(LEFT + run.from, y, run.to - run.from, 15);
      context.fillStyle = theme('ink');
      label(run, run.what, y + 8);
    }
    for (const run of runs((k) => model.stepAt(k))) {
      context.fillStyle = theme('line');
      context.fillRect(LEFT + run.from, y + 15, 1, 17);
      context.fillStyle = theme('soft');
      label(run, run.what ? `step ${run.what}` : 'setup', y + 24);
    }
  }

  drawFailures(context) {
    context.fillStyle = theme('bad');
    context.textBaseline = 'top';
    for (const [moment, asked] of this.model.facts.failures) {
      if (moment < this.from || moment >= this.to) continue;
      const x = this.x(moment + 0.5);
      context.fillRect(x - 1, TOP, 2, HEIGHT);
      const left = x > LEFT + this.width / 2;
      context.textAlign = left ? 'right' : 'left';
      context.fillText(`failed: ${bytes(asked)}`, left ? x - 6 : x + 6, TOP + HEIGHT / 2);
    }
  }

  // The lifetime of the block that is chosen below.
  drawBlock(context) {
    if (this.block < 0) return;
    const from = Math.max(LEFT, this.x(this.model.born[this.block]));
    const to = Math.min(LEFT + this.width, this.x(this.model.freed[this.block]));
    if (to <= from) return;
    context.fillStyle = theme('ink');
    context.fillRect(from, TOP + HEIGHT - 5, Math.max(2, to - from), 4);
    context.strokeStyle = theme('paper');
    context.lineWidth = 1;
    context.strokeRect(from - 0.5, TOP + HEIGHT - 5.5, Math.max(2, to - from) + 1, 5);
  }

  drawFlags(context) {
    const { model } = this;
    const flag = (moment, text, strong) => {
      if (moment < this.from || moment >= this.to) return;
      const x = Math.round(this.x(moment + 0.5));
      context.fillStyle = theme('ink');
      if (strong) context.fillRect(x - 1, TOP - 4, 2, HEIGHT + 4);
      else for (let y = TOP - 4; y < TOP + HEIGHT; y += 5) context.fillRect(x, y, 1, 2);
      const wide = context.measureText(text).width + 10;
      const left = Math.min(LEFT + this.width - wide, Math.max(LEFT, x - wide / 2));
      context.fillStyle = theme(strong ? 'ink' : 'paper');
      context.fillRect(left, 1, wide, 17);
      context.strokeStyle = theme('ink');
      context.lineWidth = 1;
      context.strokeRect(left + 0.5, 1.5, wide - 1, 16);
      context.fillStyle = theme(strong ? 'paper' : 'ink');
      context.textAlign = 'left';
      context.textBaseline = 'middle';
      context.fillText(text, left + 5, 10);
    };
    const atPeak = this.selected === model.peak;
    if (!atPeak) flag(model.peak, 'peak', false);
    flag(this.selected, `${atPeak ? 'peak ' : ''}${bytes(model.allocated[this.selected])}`, true);
  }

  view(from, to) {
    const least = Math.min(this.model.moments, 16);
    const span = Math.max(least, Math.min(this.model.moments, Math.round(to - from)));
    this.from = Math.max(0, Math.min(this.model.moments - span, Math.round(from)));
    this.to = this.from + span;
    this.draw();
  }

  zoom(factor) {
    const span = (this.to - this.from) * factor;
    const share = (this.selected - this.from) / (this.to - this.from);
    const inView = share >= 0 && share <= 1 ? share : 0.5;
    const middle = this.from + inView * (this.to - this.from);
    this.view(middle - inView * span, middle + (1 - inView) * span);
  }

  show(moment) {
    this.selected = moment;
    const span = this.to - this.from;
    if (moment < this.from || moment >= this.to) this.view(moment - span / 2, moment + span / 2);
    else this.paint();
  }

  press(event) {
    if (event.button) return;
    const x = event.clientX - this.canvas.getBoundingClientRect().left;
    this.drag = { x, now: x, moved: false };
    this.canvas.setPointerCapture(event.pointerId);
  }

  move(event) {
    if (!this.drag) return this.onHover({ moment: this.momentAt(event), layer: this.layerAt(event), event });
    const x = event.clientX - this.canvas.getBoundingClientRect().left;
    this.drag.now = Math.min(LEFT + this.width, Math.max(LEFT, x));
    if (event.pointerType === 'mouse' && Math.abs(x - this.drag.x) > 4) this.drag.moved = true;
    if (this.drag.moved) this.paint();
    return undefined;
  }

  release(event) {
    const { drag } = this;
    this.drag = null;
    if (!drag) return;
    if (!drag.moved) return void this.onSelect(this.momentAt(event));
    const at = (x) => this.from + ((x - LEFT) / this.width) * (this.to - this.from);
    this.view(at(Math.min(drag.x, drag.now)), at(Math.max(drag.x, drag.now)));
  }

  key(event) {
    const step = event.shiftKey ? Math.max(1, Math.round((this.to - this.from) / 40)) : 1;
    const last = this.model.moments - 1;
    const go = {
      ArrowRight: this.selected + step, ArrowUp: this.selected + step, ArrowLeft: this.selected - step,
      ArrowDown: this.selected - step, Home: 0, End: last, p: this.model.peak, P: this.model.peak,
      PageUp: this.selected + Math.round(last / 20), PageDown: this.selected - Math.round(last / 20),
    }[event.key];
    const zooms = { '+': 0.5, '=': 0.5, '-': 2, 0: Infinity }[event.key];
    if (event.ctrlKey || event.metaKey || event.altKey || (go === undefined && zooms === undefined)) return;
    event.preventDefault();
    if (go !== undefined) this.onSelect(Math.min(last, Math.max(0, go)));
    else if (zooms === Infinity) this.view(0, this.model.moments);
    else this.zoom(zooms);
  }
}
