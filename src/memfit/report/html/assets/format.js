// Numbers and texts as they are shown. Nothing here or elsewhere makes HTML of text: only text nodes.

const UNITS = [['TiB', 2 ** 40], ['GiB', 2 ** 30], ['MiB', 2 ** 20], ['KiB', 2 ** 10]];
const CUT = 160; // characters of a name in a row; the whole of it is in the details

function bytes(amount) {
  for (const [name, unit] of UNITS) if (Math.abs(amount) >= unit) return `${(amount / unit).toFixed(2)} ${name}`;
  return `${amount} B`;
}

const whole = (number) => number.toLocaleString('en-US');
const counted = (number, name) => `${whole(number)} ${name}${number === 1 ? '' : 's'}`;
const exactly = (amount) => `${whole(amount)} B`;
const cut = (text) => (text.length > CUT ? `${text.slice(0, CUT)}…` : text);
const fileOnly = (line) => line.slice(line.lastIndexOf('/') + 1);
const percent = (part, all) => (all ? `${Math.round((100 * part) / all)} %` : '');

function placeText({ step, phase, module, op, line }) {
  return [step ? `step ${step}` : '', phase, cut(module), cut(op), cut(fileOnly(line))].filter(Boolean).join(' · ');
}

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === 'class') element.className = value;
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

const byId = (id) => document.getElementById(id);
