// Colours, canvases and the tooltip.

const theme = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

// A layer's fill on a canvas: its colour, or stripes of it.
function fillOf(layer) {
  layer.fill ||= layer.hatched ? stripes(layer.colour, 'rgba(255, 255, 255, 0.62)') : layer.colour;
  return layer.fill;
}

function stripes(colour, stripe) {
  const tile = make('canvas', { width: 6, height: 6 });
  const brush = tile.getContext('2d');
  brush.fillStyle = colour;
  brush.fillRect(0, 0, 6, 6);
  brush.strokeStyle = stripe;
  brush.lineWidth = 1.6;
  brush.stroke(new Path2D('M-6 6 L0 0 M0 6 L6 0 M6 6 L12 0'));
  return brush.createPattern(tile, 'repeat');
}

const swatch = ({ name }) => make('i', { class: 'swatch', 'data-layer': name, 'aria-hidden': 'true' });

// Size a canvas; return a context whose unit is the CSS pixel.
function fitted(canvas, width, height) {
  const ratio = window.devicePixelRatio;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext('2d');
  context.scale(ratio, ratio);
  return context;
}

// Show a tooltip beside the pointer; describe(event) returns its content.
function addTooltip(element, describe) {
  const tip = byId('tip');
  on(element, 'pointerleave', () => { tip.hidden = true; });
  on(element, 'pointermove', (event) => {
    tip.hidden = false;
    tip.replaceChildren(...describe(event));
    const { width, height } = tip.getBoundingClientRect();
    tip.style.left = `${clamp(event.clientX + 16, 4, window.innerWidth - width - 8)}px`;
    tip.style.top = `${clamp(event.clientY + 16, 4, window.innerHeight - height - 8)}px`;
  });
}
