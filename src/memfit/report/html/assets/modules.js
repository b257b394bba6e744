// Paths of modules, with repetition folded: blocks.0.mlp and blocks.11.mlp are both [blocks.0-11, mlp].

const NUMBER = /^\d+$/;

// Fold all paths at once, so that a layer is in the same fold at every moment.
function foldedPaths(names) {
  const root = new Map();
  for (const name of names) {
    let node = root;
    for (const part of name.split('.')) {
      if (!node.has(part)) node.set(part, new Map());
      node = node.get(part);
    }
  }
  // Layers of one fold share what is found below them.
  const known = new Map();
  const below = ({ path, nodes }, part) => {
    const siblings = nodes.flatMap((node) => [...node]);
    const group = foldOf(part, siblings);
    const found = siblings.filter(([other]) => (group ? group.has(other) : other === part)).map(([, node]) => node);
    if (!group) return { path: [...path, part], nodes: found };
    const folded = [path[path.length - 1], spans(group)].filter(Boolean).join('.');
    return { path: [...path.slice(0, -1), folded], nodes: found };
  };
  return (name) => {
    let at = { path: [], nodes: [root] };
    for (const part of name.split('.')) {
      const key = JSON.stringify([...at.path, part]);
      if (!known.has(key)) known.set(key, below(at, part));
      at = known.get(key);
    }
    return at.path;
  };
}

// The numbered siblings that have parts of the same names; none for a layer without parts, of which a
// sequence may hold any kind.
function foldOf(part, siblings) {
  if (!NUMBER.test(part)) return null;
  const parts = new Set(siblings.filter(([name]) => name === part).flatMap(([, node]) => [...node.keys()]));
  const alike = siblings.filter(([name, node]) => NUMBER.test(name) && [...node.keys()].some((key) => parts.has(key)));
  const group = new Set(alike.map(([name]) => name));
  return group.size > 1 ? group : null;
}

// 0 1 2 5 -> "0-2, 5"
function spans(names) {
  const numbers = [...names].map(Number).sort((a, b) => a - b);
  const found = [];
  for (const number of numbers) {
    const last = found[found.length - 1];
    if (last && last[1] === number - 1) last[1] = number;
    else found.push([number, number]);
  }
  return found.map(([from, to]) => (from === to ? `${from}` : `${from}-${to}`)).join(', ');
}
