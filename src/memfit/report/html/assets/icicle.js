// What is allocated at the moment as nested boxes: the whole above, its parts below, their kinds at the end.

const ROW = 23;
const NARROWEST = 3; // pixels; what is narrower is left to the eye's imagination, and to the table

class Icicle {
  constructor(model, element) {
    Object.assign(this, { model, element, by: 'module', fold: true, zoomed: [], focused: 0 });
    this.paths = new Map();
    this.foldPath = foldedPaths([...new Set(model.columns['block.module'])].map((word) => model.words[word]));
    element.addEventListener('keydown', (event) => this.key(event));
    this.measure();
  }

  measure() {
    this.wide = Math.max(1, this.element.clientWidth);
  }

  group(by, fold) {
    if (by !== this.by || fold !== this.fold) this.zoomed = [];
    Object.assign(this, { by, fold });
    this.paths = new Map();
    this.show(this.moment);
  }

  // Where a block hangs in the tree; blocks of the same words hang in the same place.
  pathOf(i) {
    const { model, by } = this;
    const phase = model.facts.phases[model.columns['block.phase'][i]];
    const word = model.word(`block.${by}`, i);
    const key = by === 'op' ? `${phase} ${word}` : word;
    if (!this.paths.has(key)) this.paths.set(key, this.pathOfWord(word, phase));
    return this.paths.get(key);
  }

  pathOfWord(word, phase) {
    if (this.by === 'op') return [phase, word || 'op not told'];
    if (!word) return [this.by === 'module' ? 'outside modules' : 'no line of Python'];
    if (this.by === 'line') {
      const colon = word.lastIndexOf(':');
      return colon > 0 ? [word.slice(0, colon), `line ${word.slice(colon + 1)}`] : [word];
    }
    return this.fold ? this.foldPath(word) : word.split('.');
  }

  tree(moment) {
    const { model } = this;
    const node = (name) => ({ name, bytes: 0, count: 0, layer: -1, parts: new Map() });
    const root = node('allocated');
    const add = (path, layer, amount, count) => {
      if (!amount && !count) return;
      let at = root;
      at.bytes += amount;
      at.count += count;
      for (const name of [...path, model.layers[layer]]) {
        if (!at.parts.has(name)) at.parts.set(name, node(name));
        at = at.parts.get(name);
        at.bytes += amount;
        at.count += count;
      }
      at.layer = layer;
    };
    let beyond = 0;
    for (const i of model.liveAt(moment)) {
      add(this.pathOf(i), model.layer[i], model.requested[i], 1);
      beyond += model.beyond[i];
    }
    const { rest, restCount, restBeyond } = model.sumsAt(moment);
    rest.forEach((amount, layer) => add(['drawn together'], layer, amount, restCount[layer]));
    add([], model.rounding, beyond + restBeyond, 0);
    return root;
  }

  show(moment) {
    this.moment = moment;
    const root = this.tree(moment);
    let at = root;
    const above = [root];
    for (const name of this.zoomed) {
      at = at.parts.get(name);
      if (!at) break; // not there at this moment: show the whole
      above.push(at);
    }
    if (!at) above.length = 1;
    const boxes = above.map((node, depth) => this.box(node, depth, 0, 1, above.slice(1, depth + 1)));
    const limit = NARROWEST / this.wide;
    let depth = above.length - 1;
    const spread = (node, level, left, width, path) => {
      depth = Math.max(depth, level);
      const parts = [...node.parts.values()].sort((a, b) => (a.layer >= 0) - (b.layer >= 0) || b.bytes - a.bytes);
      for (const part of parts) {
        const share = (width * part.bytes) / (node.bytes || 1);
        if (share >= limit) {
          boxes.push(this.box(part, level + 1, left, share, [...path, part]));
          spread(part, level + 1, left, share, [...path, part]);
        }
        left += share;
      }
    };
    const last = above[above.length - 1];
    spread(last, above.length - 1, 0, 1, above.slice(1));
    this.element.style.height = `${(depth + 1) * ROW}px`;
    this.element.replaceChildren(...boxes);
    this.focused = Math.min(this.focused, boxes.length - 1);
    boxes[this.focused].tabIndex = 0;
  }

  box(node, depth, left, width, path) {
    const { element } = this;
    const box = make('button', { type: 'button', role: 'treeitem', tabindex: '-1', 'aria-level': depth + 1, 'data-bytes': node.bytes });
    box.style.left = `${100 * left}%`;
    box.style.width = `${100 * width}%`;
    box.style.top = `${depth * ROW}px`;
    const wide = width * this.wide;
    if (wide < 34) box.style.padding = 0; // so that it is no wider than its bytes
    if (node.layer >= 0) {
      box.className = 'kind';
      paint(box, this.model.layers[node.layer]);
      if (PAINTS[this.model.layers[node.layer]][1]) box.classList.add('hatched');
    }
    if (wide > 34) box.append(make('bdi', {}, cut(node.name)));
    if (wide > 150) box.append(make('span', {}, bytes(node.bytes)));
    const names = path.map((part) => part.name);
    const blocks = node.count ? `, ${counted(node.count, 'block')}` : '';
    const said = `${cut(names.join(' · ')) || 'allocated'}: ${bytes(node.bytes)} (${exactly(node.bytes)})${blocks}`;
    box.title = said;
    box.setAttribute('aria-label', said);
    box.addEventListener('click', () => {
      this.zoomed = node.layer >= 0 ? names.slice(0, -1) : names;
      this.focused = names.length;
      this.show(this.moment);
      element.children[Math.min(this.focused, element.children.length - 1)].focus();
    });
    return box;
  }

  // Left and right within a row, up and down between rows, to the box that is nearest.
  key(event) {
    const boxes = [...this.element.children];
    const at = boxes.indexOf(document.activeElement);
    if (at < 0 || !event.key.startsWith('Arrow')) return;
    event.preventDefault();
    const own = boxes[at].getBoundingClientRect();
    const down = { ArrowDown: 1, ArrowUp: -1 }[event.key] || 0;
    const right = { ArrowRight: 1, ArrowLeft: -1 }[event.key] || 0;
    let best = -1;
    let least = Infinity;
    boxes.forEach((box, index) => {
      const there = box.getBoundingClientRect();
      if (Math.round((there.top - own.top) / ROW) !== down || index === at) return;
      const way = there.left - own.left;
      if (right && way * right <= 0) return;
      const apart = down ? Math.max(there.left - own.left, own.left - there.right, 0) : Math.abs(way);
      if (apart < least) [best, least] = [index, apart];
    });
    if (best < 0) return;
    boxes[at].tabIndex = -1;
    this.focused = best;
    boxes[best].tabIndex = 0;
    boxes[best].focus();
  }
}
