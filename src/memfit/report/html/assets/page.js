// One moment and one block are selected at a time; a change updates all views.

// Mark at most one button of a group as pressed.
function press(group, pressed) {
  for (const button of group.children) button.setAttribute('aria-pressed', button === pressed);
}

class Page {
  constructor() {
    this.timeline = new Timeline(this);
    this.icicle = new Icicle();
    this.map = new SegmentMap(this);
    this.table = new TensorTable(this);
    for (const button of byId('moments').children) on(button, 'click', () => this.select(Number(button.dataset.moment)));
    on(byId('whole'), 'click', () => this.timeline.zoom(1e9));
    for (const button of byId('by').children) {
      on(button, 'click', () => {
        press(byId('by'), button);
        this.icicle.group({ by: button.dataset.by });
      });
    }
    on(byId('fold'), 'change', (event) => this.icicle.group({ fold: event.target.checked }));
    on(byId('search'), 'input', (event) => this.table.search(event.target.value));
    on(window, 'resize', () => requestAnimationFrame(() => this.redraw()));
  }

  select(moment) {
    this.moment = moment;
    if (!model.alive(this.block, moment)) this.block = undefined;
    for (const view of [panel, this.timeline, this.icicle, this.map, this.table]) view.show(moment);
    byId('timeline').setAttribute('aria-valuenow', moment);
    const failed = model.failures.filter(({ at }) => at === moment).map(failureText);
    const text = [`${bytes(model.allocated[moment])} allocated`, placeText(model.placeAt(moment)), ...failed].join(', ');
    byId('timeline').setAttribute('aria-valuetext', text);
    press(byId('moments'), byId('moments').querySelector(`[data-moment="${moment}"]`));
  }

  choose(block) {
    this.block = block;
    this.timeline.lay();
    this.map.mark(block);
    this.table.mark(block);
  }

  redraw() {
    this.timeline.draw();
    this.icicle.show(this.moment);
    this.map.paint();
    this.table.paint();
  }
}

// Light or dark as the system is set, until the reader switches; always light in print.
function themes(redraw) {
  const root = document.documentElement;
  const dark = window.matchMedia('(prefers-color-scheme: dark)');
  const button = byId('theme');
  button.hidden = false;
  const set = (name) => {
    root.dataset.theme = name;
    button.textContent = name === 'dark' ? 'Light theme' : 'Dark theme';
    redraw();
  };
  const system = () => set(dark.matches ? 'dark' : 'light');
  on(dark, 'change', system);
  on(button, 'click', () => set(root.dataset.theme === 'dark' ? 'light' : 'dark'));
  let screen = '';
  on(window, 'beforeprint', () => {
    screen = root.dataset.theme;
    set('light');
  });
  on(window, 'afterprint', () => set(screen));
  system();
}

async function open() {
  let page = null;
  themes(() => page && page.redraw());
  try {
    model = new Model(await read(byId('data').textContent));
    if (!model.moments) throw new Error('No allocation was recorded: there is nothing to draw.');
    byId('main').hidden = false;
    page = new Page();
    page.select(model.peak);
    page.timeline.draw();
    on(window, 'beforeprint', () => page.table.paint(0, 40));
  } catch (error) {
    byId('main').hidden = true;
    byId('problem').textContent = error.message;
    byId('problem').hidden = false;
  }
  document.documentElement.dataset.ready = Math.round(performance.now());
}

open();
