// Allocated memory at the moment as nested boxes: the total on top, parts below, categories at the bottom.

const ROW = 23;
const NARROWEST = 3; // pixels; narrower boxes are not drawn, and the table has them

class Icicle {
  constructor() {
    Object.assign(this, { element: byId('icicle'), by: 'module', fold: true, zoomed: [], focused: 0 });
    on(this.element, 'keydown', (event) => this.key(event));
  }

  group(how) {
    Object.assign(this, how, { zoomed: [] });
    this.show(this.moment);
  }

  // Path of a block in the tree.
  pathOf(i) {
    const { by } = this;
    const word = model.text(by === 'module' && this.fold ? 'folded' : by, i);
    if (by === 'op') return [model.phases[model.block.phase[i]], word || 'unknown op'];
    if (by === 'line') return word ? word.split(/:(?=\d+$)/) : ['no Python line'];
    return word ? word.split(/\.(?!\d+[-,])/) : ['outside modules']; // blocks.0-11 is one part
  }

  // Group blocks by their path, then by category.
  tree(moment) {
    const root = { key: 'allocated', bytes: 0, parts: new Map() };
    const add = (path, layer, amount) => {
      let at = root;
      at.bytes += amount;
      for (const key of [...path, model.layers[layer]]) {
        if (!at.parts.has(key)) at.parts.set(key, { key, bytes: 0, parts: new Map() });
        at = at.parts.get(key);
        at.bytes += amount;
      }
    };
    const { layer, requested, beyond } = model.block;
    const sums = model.restAt(moment);
    for (const i of model.liveAt(moment)) {
      add(this.pathOf(i), layer[i], requested[i]);
      sums[model.rounding] += beyond[i];
    }
    sums.forEach((amount, at) => amount && add(at === model.rounding ? [] : ['drawn together'], at, amount));
    return root;
  }

  show(moment) {
    this.moment = moment;
    this.wide = this.element.clientWidth;
    const boxes = [];
    // A part that is zoomed into takes the full width of its parent, if it exists at this moment.
    const spread = (part, path, left, width, [next, ...zoomed]) => {
      boxes.push(this.box(part, path, left, width));
      const alone = part.parts.get(next);
      const kind = ({ key }) => Boolean(key.name);
      const parts = alone ? [alone] : [...part.parts.values()].sort((a, b) => kind(a) - kind(b) || b.bytes - a.bytes);
      for (const one of parts) {
        const share = alone ? width : (width * one.bytes) / (part.bytes || 1);
        if (share * this.wide >= NARROWEST) spread(one, [...path, one.key], left, share, alone ? zoomed : []);
        left += share;
      }
    };
    spread(this.tree(moment), [], 0, 1, this.zoomed);
    this.element.replaceChildren(...boxes);
    this.element.style.height = `${Math.max(...this.levels()) * ROW}px`;
    this.focused = Math.min(this.focused, boxes.length - 1);
    boxes[this.focused].tabIndex = 0;
  }

  box(part, path, left, width) {
    const names = path.map((key) => key.name || key);
    const label = `${cut(dotted(...names)) || 'allocated'}: ${bytes(part.bytes)} (${exactly(part.bytes)})`;
    const box = make('button', {
      type: 'button', role: 'treeitem', tabindex: -1, title: label, 'aria-level': path.length + 1, 'data-bytes': part.bytes,
    });
    box.style.left = `${100 * left}%`;
    box.style.width = `${100 * width}%`;
    box.style.top = `${path.length * ROW}px`;
    const wide = width * this.wide;
    if (wide < 34) box.style.padding = 0; // so that it is no wider than its bytes
    const { key } = part;
    if (key.name) box.dataset.layer = key.name;
    if (wide > 34) box.append(make('bdi', {}, cut(key.name || key)));
    if (wide > 150) box.append(make('span', {}, bytes(part.bytes)));
    on(box, 'click', () => {
      this.zoomed = key.name ? path.slice(0, -1) : path;
      this.show(this.moment);
      this.focus(path.length);
    });
    return box;
  }

  levels() {
    return Array.from(this.element.children, (box) => Number(box.getAttribute('aria-level')));
  }

  focus(index) {
    const boxes = this.element.children;
    boxes[this.focused].tabIndex = -1;
    this.focused = Math.min(index, boxes.length - 1);
    boxes[this.focused].tabIndex = 0;
    boxes[this.focused].focus();
  }

  // Arrow keys: right and left go along a row, down to the first part, up to the parent.
  key(event) {
    const [step, deeper] = { ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowDown: [1, 1], ArrowUp: [-1, -1] }[event.key] || [];
    if (!step || modified(event)) return;
    event.preventDefault();
    const levels = this.levels();
    let to = this.focused;
    do to += step; while (to in levels && levels[to] !== levels[this.focused] + deeper);
    if (to in levels) this.focus(to);
  }
}
