// One moment and one block are chosen at a time; whoever changes them tells all views.

const tip = byId('tip');

function showTip(event, ...lines) {
  tip.replaceChildren(...lines);
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const left = event.clientX + 16 + box.width > window.innerWidth ? event.clientX - box.width - 12 : event.clientX + 16;
  const top = Math.min(event.clientY + 16, window.innerHeight - box.height - 8);
  tip.style.left = `${Math.max(4, left)}px`;
  tip.style.top = `${Math.max(4, top)}px`;
}

function hideTip() {
  tip.hidden = true;
}

class Page {
  constructor(model) {
    this.model = model;
    this.panel = new MomentPanel(model);
    this.timeline = new Timeline(model, byId('timeline'), {
      onSelect: (moment) => this.select(moment),
      onHover: (at) => (at ? showTip(at.event, ...this.panel.tip(at.moment, at.layer)) : hideTip()),
    });
    this.icicle = new Icicle(model, byId('icicle'));
    this.map = new SegmentMap(model, { onBlock: (block) => this.choose(block) });
    this.table = new TensorTable(model, { onBlock: (block) => this.choose(block) });
    this.block = -1;
    byId('s-segments').hidden = !model.facts.segments;
    document.body.classList.toggle('no-source', !model.facts.source);
    this.thinned();
    this.shortcuts();
    this.controls();
  }

  select(moment) {
    this.moment = moment;
    const { model } = this;
    if (this.block >= 0 && !(model.born[this.block] <= moment && moment < model.freed[this.block])) this.choose(-1);
    this.timeline.show(moment);
    this.panel.show(moment);
    this.icicle.show(moment);
    if (model.facts.segments) this.map.show(moment);
    this.table.show(moment);
    const slider = byId('timeline');
    slider.setAttribute('aria-valuemin', 0);
    slider.setAttribute('aria-valuemax', model.moments - 1);
    slider.setAttribute('aria-valuenow', moment);
    slider.setAttribute('aria-valuetext', `${bytes(model.allocated[moment])} allocated, ${placeText(model.placeAt(moment))}`);
    for (const button of byId('moments').children) button.setAttribute('aria-pressed', Number(button.dataset.moment) === moment);
  }

  choose(block) {
    this.block = block;
    this.timeline.block = block;
    this.timeline.paint();
    if (this.model.facts.segments && this.map.segments) this.map.mark(block);
    this.table.mark(block);
  }

  thinned() {
    const { facts, blocks } = this.model;
    if (!facts.together) return;
    byId('thinned').textContent = `Small and short-lived blocks are drawn together: ${whole(facts.together)} of `
      + `${whole(facts.together + blocks)}. All totals are exact at the ${whole(this.model.moments)} moments that are drawn.`;
    byId('thinned').hidden = false;
    byId('hole').textContent = 'hole, or small blocks drawn together';
  }

  // Buttons for the moments that people ask about: the peak, and the most in each phase.
  shortcuts() {
    const { model } = this;
    const most = new Map([['peak', model.peak]]);
    for (let k = 0; k < model.moments; k++) {
      const phase = model.phaseAt(k);
      if (!['forward', 'backward', 'optimizer'].includes(phase)) continue;
      if (!most.has(phase) || model.allocated[k] > model.allocated[most.get(phase)]) most.set(phase, k);
    }
    most.set('end', model.moments - 1);
    for (const [name, moment] of most) {
      const title = name === 'end' || name === 'peak' ? name : `the most allocated in a ${name} phase`;
      const button = make('button', { type: 'button', 'data-moment': moment, title }, name);
      button.addEventListener('click', () => this.select(moment));
      byId('moments').append(button);
    }
  }

  controls() {
    const { timeline, icicle, table } = this;
    byId('in').addEventListener('click', () => timeline.zoom(0.5));
    byId('out').addEventListener('click', () => timeline.zoom(2));
    byId('whole').addEventListener('click', () => timeline.view(0, this.model.moments));
    byId('scale').hidden = !this.model.facts.room;
    byId('scale').addEventListener('click', () => {
      timeline.toDevice = !timeline.toDevice;
      byId('scale').setAttribute('aria-pressed', timeline.toDevice);
      timeline.draw();
    });
    const by = [...byId('by').children];
    const group = () => icicle.group(by.find((one) => one.getAttribute('aria-pressed') === 'true').dataset.by, byId('fold').checked);
    for (const button of by) {
      button.addEventListener('click', () => {
        by.forEach((one) => one.setAttribute('aria-pressed', one === button));
        group();
      });
    }
    byId('fold').addEventListener('change', group);
    byId('search').addEventListener('input', () => {
      table.query = byId('search').value;
      table.scroll(0);
      table.show(this.moment);
    });
    byId('search').addEventListener('keydown', (event) => {
      if (event.key === 'ArrowDown') table.element.focus();
    });
    let resized = 0;
    window.addEventListener('resize', () => {
      cancelAnimationFrame(resized);
      resized = requestAnimationFrame(() => this.redraw());
    });
    for (const event of ['focus', 'blur']) byId('segments').addEventListener(event, () => this.map.paint());
    window.addEventListener('beforeprint', () => this.beforePrint());
    window.addEventListener('afterprint', () => this.afterPrint());
  }

  redraw() {
    this.timeline.draw();
    this.icicle.measure();
    this.icicle.show(this.moment);
    this.map.measure();
    if (this.model.facts.segments) this.map.paint();
    this.table.measure();
    this.table.paint();
  }

  // On paper: light, and the first rows of the table as they are sorted.
  beforePrint() {
    this.screenTheme = document.documentElement.dataset.theme || '';
    document.documentElement.dataset.theme = 'light';
    this.redraw();
    this.table.paint(0, 40);
  }

  afterPrint() {
    if (this.screenTheme) document.documentElement.dataset.theme = this.screenTheme;
    else delete document.documentElement.dataset.theme;
    this.redraw();
  }
}

// Dark or light as the system has it, or as the reader says.
function switchTheme(redraw) {
  const root = document.documentElement;
  const next = { auto: 'light', light: 'dark', dark: 'auto' };
  byId('theme').addEventListener('click', () => {
    const chosen = next[root.dataset.theme || 'auto'];
    if (chosen === 'auto') delete root.dataset.theme;
    else root.dataset.theme = chosen;
    byId('theme').textContent = `colours: ${chosen}`;
    byId('theme').setAttribute('aria-label', chosen === 'auto' ? 'Colours: as the system has them' : `Colours: ${chosen}`);
    redraw();
  });
  window.matchMedia('(prefers-color-scheme: dark)').addEventListener('change', redraw);
}

async function open() {
  let page = null;
  switchTheme(() => page && page.redraw());
  try {
    const model = new Model(await read(byId('data').textContent));
    if (!model.moments) throw new Error('No allocation was recorded: there is nothing to draw.');
    byId('main').hidden = false;
    page = new Page(model);
    page.timeline.draw();
    page.select(model.peak);
  } catch (error) {
    byId('main').hidden = true;
    byId('problem').textContent = error.message;
    byId('problem').hidden = false;
  }
  document.documentElement.dataset.ready = Math.round(performance.now());
}

open();
