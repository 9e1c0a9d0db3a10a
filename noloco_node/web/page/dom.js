// Elements made without markup: nothing that a peer says is ever read as HTML.

const SVG = "http://www.w3.org/2000/svg";

const fill = (made, attributes, children) => {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== null && value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null));
  return made;
};

export const $ = (selector, within = document) => within.querySelector(selector);
export const element = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
export const drawn = (tag, attributes = {}, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

export const say = (at, text) => {
  if (at.textContent !== text) at.textContent = text; // what has not changed is not read out again
};

// What has not changed stays: somebody may have marked it, to copy it.
export const refill = (at, ...children) => {
  children.forEach((child, number) => {
    const before = at.children[number];
    if (!before) at.append(child);
    else if (!before.isEqualNode(child)) before.replaceWith(child);
  });
  while (at.childElementCount > children.length) at.lastElementChild.remove();
};

export const legend = (at, entries) =>
  at.replaceChildren(...entries.map(([mark, ...words]) => element("li", {}, element("i", { class: mark }), ...words)));
