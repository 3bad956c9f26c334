// Helpers to build and update elements.

const SVG = "http://www.w3.org/2000/svg";

/** Return an element. `on...` properties are listeners; false and null omit an attribute. */
export function el(tag, properties = {}, ...children) {
  return build(document.createElement(tag), properties, children);
}

export function svg(tag, properties = {}, ...children) {
  return build(document.createElementNS(SVG, tag), properties, children);
}

function build(element, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, value);
  }
  element.append(...children.filter(child => child != null));
  return element;
}

export const byId = id => document.getElementById(id);

/** Set the text of an element only if it differs, to keep a selection in it. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Give `parent` one child per item, in order. A child is kept as long as there is an item with its
 * key; `create(item)` makes a child, `update(child, item)` fills it. */
export function keyed(parent, items, keyOf, create, update) {
  const known = new Map([...parent.children].map(child => [child.dataset.key, child]));
  const used = new Set();
  items.forEach((item, position) => {
    let key = String(keyOf(item));
    while (used.has(key)) key += " ";
    used.add(key);
    let child = known.get(key);
    known.delete(key);
    if (!child) {
      child = create(item);
      child.dataset.key = key;
    }
    if (parent.children[position] !== child) parent.insertBefore(child, parent.children[position] ?? null);
    update(child, item);
  });
  for (const child of known.values()) child.remove();
}

/** Copy a text and show the result on the button. Also works without a secure origin. */
export async function copyText(text, button) {
  const before = button.textContent;
  let copied = true;
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = el("textarea", { class: "visually-hidden" });
    area.value = text;
    document.body.append(area);
    area.select();
    copied = document.execCommand("copy");
    area.remove();
  }
  button.textContent = copied ? "Copied" : "Copy failed";
  setTimeout(() => { button.textContent = before; }, 1500);
}
