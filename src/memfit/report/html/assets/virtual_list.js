// Keyboard movement along a list, and boxes that scroll over rows of equal height.

const modified = (event) => event.ctrlKey || event.metaKey || event.altKey; // leave such keys to the browser

// Return the index that a key moves to, given how far each key goes; undefined for other keys.
function moveTo(event, place, count, keys) {
  const far = { Home: -Infinity, End: Infinity, ...keys }[event.key];
  if (!far || !count || modified(event)) return undefined;
  event.preventDefault();
  return clamp(place + far, 0, count - 1);
}

// A subclass sets the number of rows, creates a row, and handles the row that a key selects.
class Rows {
  constructor(box, tall) {
    Object.assign(this, { box, tall, count: 0, chosen: -1 });
    this.space = make('div', { class: 'space', role: 'rowgroup' });
    box.append(this.space);
    on(box, 'scroll', () => this.paint());
    on(box, 'keydown', (event) => {
      if (event.target !== box) return; // keys in a header
      const page = Math.max(1, Math.floor(box.clientHeight / tall) - 2);
      const row = moveTo(event, this.chosen, this.count, { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page });
      if (row !== undefined) this.onRow(row);
    });
  }

  // Create the rows in view, and a few around them.
  paint(first = Math.floor(this.box.scrollTop / this.tall) - 3, count = Math.ceil(this.box.clientHeight / this.tall) + 6) {
    this.first = Math.max(0, first);
    this.last = Math.min(this.count, this.first + count);
    const made = [];
    for (let place = this.first; place < this.last; place++) {
      const row = this.row(place);
      row.id = `${this.box.id}-${place}`;
      row.style.top = `${place * this.tall}px`;
      row.setAttribute('aria-rowindex', place + 2);
      row.setAttribute('aria-selected', place === this.chosen);
      made.push(row);
    }
    this.space.style.height = `${this.count * this.tall}px`;
    this.space.replaceChildren(...made);
    this.box.setAttribute('aria-rowcount', this.count + 1);
    const active = this.space.querySelector('[aria-selected=true]');
    this.box.setAttribute('aria-activedescendant', active ? active.id : '');
  }

  // Select a row and scroll it into view, below the header if there is one.
  reveal(row) {
    this.chosen = row;
    const least = (row + 1) * this.tall + this.space.offsetTop - this.box.clientHeight;
    if (row >= 0) this.box.scrollTop = clamp(this.box.scrollTop, least, row * this.tall);
    this.paint();
  }
}
