// Format numbers and texts. No script here parses text as HTML: it creates text nodes only.

const UNITS = [['TiB', 2 ** 40], ['GiB', 2 ** 30], ['MiB', 2 ** 20], ['KiB', 2 ** 10]];
const CUT = 160; // characters of a name in a row; the details show all of it

function bytes(amount) {
  const [name, unit] = UNITS.find(([, size]) => Math.abs(amount) >= size) || [];
  return unit ? `${(amount / unit).toFixed(2)} ${name}` : `${amount} B`;
}

const whole = (number) => number.toLocaleString('en-US');
const counted = (number, name) => `${whole(number)} ${name}${number === 1 ? '' : 's'}`;
const exactly = (amount) => `${whole(amount)} B`;
const cut = (text) => (text.length > CUT ? `${text.slice(0, CUT)}…` : text);
const fileOnly = (line) => line.slice(line.lastIndexOf('/') + 1);
const dotted = (...parts) => parts.filter(Boolean).join(' · ');
const total = (amounts) => amounts.reduce((sum, amount) => sum + amount, 0);
const clamp = (number, least, most) => Math.min(most, Math.max(least, number));

function placeText({ step, phase, module = '', op = '', line = '' }) {
  return dotted(step && `step ${step}`, phase, cut(module), cut(op), cut(fileOnly(line)));
}

const failureText = ({ needed, available }) => `out of memory: needs ${bytes(needed)}, ${bytes(available)} available`;

const on = (element, type, act) => element.addEventListener(type, act);

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

const byId = (id) => document.getElementById(id);
