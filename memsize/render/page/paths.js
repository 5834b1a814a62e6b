// The tree that qualified names make: `encoder.layer.0` is inside `encoder.layer`, which is inside `encoder`.

/**
 * The tree of `items`, each with a `path`, or the `names` that lead to it: nodes have `path`, `name` (what the path adds to its parent's), `items` (those
 * of just this path), `parent` and `children`. A node with one child and no item of its own is one with that child: no
 * level says nothing.
 */
function pathTree(items) {
  const separator = items[0]?.names ? CALLS : ".";
  const root = newNode("", "", null);
  for (const item of items) {
    let node = root;
    for (const part of item.names ?? (item.path ? item.path.split(".") : [])) {
      const path = node.path ? `${node.path}${separator}${part}` : part;
      if (!node.children.has(part)) node.children.set(part, newNode(path, part, node));
      node = node.children.get(part);
    }
    node.items.push(item);
  }
  return joined(root, separator);
}

/** Stands between calls, outermost first. */
const CALLS = " › ";

function newNode(path, name, parent) {
  return { path, name, items: [], parent, children: new Map() };
}

function joined(node, separator) {
  const children = [...node.children.values()].map((child) => joined(child, separator));
  if (node.parent && !node.items.length && children.length === 1) {
    const only = children[0];
    return Object.assign(only, { name: `${node.name}${separator}${only.name}`, parent: node.parent });
  }
  node.children = children;
  for (const child of children) child.parent = node;
  return node;
}

/** Calls `visit` with `node` and all below it, parents first. */
function walk(node, visit) {
  visit(node);
  for (const child of node.children) walk(child, visit);
}

function isInside(path, outer) {
  return !outer || path === outer || path.startsWith(`${outer}.`);
}
