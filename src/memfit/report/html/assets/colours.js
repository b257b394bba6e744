// Okabe and Ito's colours; kinds that share one differ by hatching. The rest follows light and dark.

const PAINTS = {
  parameters: ['#0072b2', false],
  buffers: ['#0072b2', true],
  'optimizer state': ['#56b4e9', false],
  gradients: ['#cc79a7', false],
  inputs: ['#009e73', true],
  activations: ['#009e73', false],
  outputs: ['#d55e00', false],
  workspaces: ['#f0e442', false],
  temporaries: ['#e69f00', false],
  unknown: ['#8c8c8c', false],
  'before the history': ['#4d4d4d', true],
  rounding: ['#8c8c8c', true],
};
const HATCH = 'rgba(255, 255, 255, 0.62)';

const theme = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

// For a 2D context: a colour, or a pattern of stripes over it.
function fillOf(context, layer) {
  const [colour, hatched] = PAINTS[layer];
  return hatched ? stripes(context, colour, HATCH) : colour;
}

function stripes(context, colour, stripe) {
  const tile = document.createElement('canvas');
  tile.width = tile.height = 6;
  const brush = tile.getContext('2d');
  brush.fillStyle = colour;
  brush.fillRect(0, 0, 6, 6);
  brush.strokeStyle = stripe;
  brush.lineWidth = 1.6;
  for (const shift of [-6, 0, 6]) {
    brush.beginPath();
    brush.moveTo(shift, 6);
    brush.lineTo(shift + 6, 0);
    brush.stroke();
  }
  return context.createPattern(tile, 'repeat');
}

function paint(element, layer) {
  const [colour, hatched] = PAINTS[layer];
  element.style.backgroundColor = colour;
  element.style.backgroundImage = hatched
    ? `repeating-linear-gradient(135deg, transparent 0 2.6px, ${HATCH} 2.6px 4.2px)` : 'none';
  element.style.color = ['parameters', 'buffers'].includes(layer) ? '#fff' : '#111';
  if (hatched) element.style.color = '#111';
}

// Fit a canvas to its place on the page; returns a context that counts in CSS pixels.
function fitted(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  canvas.width = Math.max(1, Math.round(width * ratio));
  canvas.height = Math.max(1, Math.round(height * ratio));
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext('2d');
  context.scale(ratio, ratio);
  return context;
}
