// Makes elements. Text goes in as text, never as markup: what requests hold must not become part of the page.

/**
 * An element with attributes and children.
 * An attribute that is a function listens to the event of its name (`onclick`), one that is false, null or undefined is
 * left out, and `true` stands for an empty one. Children are elements or text; null and undefined are left out.
 */
export function el(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, value);
  }
  element.append(...children.flat().filter((child) => child != null));
  return element;
}

/** Sets an element's text where it differs: a live region that is set to the same again would be read out again. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}
