// Colours, canvases and the tip.

const theme = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

// For a canvas: a layer's colour, or a pattern of stripes over it.
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

// Size a canvas; returns a context that counts in CSS pixels.
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

// Tell beside the pointer what it is over.
function tells(element, said) {
  const tip = byId('tip');
  on(element, 'pointerleave', () => { tip.hidden = true; });
  on(element, 'pointermove', (event) => {
    tip.hidden = false;
    tip.replaceChildren(...said(event));
    const { width, height } = tip.getBoundingClientRect();
    tip.style.left = `${clamp(event.clientX + 16, 4, window.innerWidth - width - 8)}px`;
    tip.style.top = `${clamp(event.clientY + 16, 4, window.innerHeight - height - 8)}px`;
  });
}
