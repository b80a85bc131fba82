// Construction of DOM nodes. Text is always text: no function here parses markup.

const SVG = "http://www.w3.org/2000/svg";

/** Element with properties and children. `on` holds event listeners, `data` and `aria` attributes, null leaves out. */
export function el(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined) continue;
    if (name === "on") for (const [type, listener] of Object.entries(value)) node.addEventListener(type, listener);
    else if (name === "data") Object.assign(node.dataset, value);
    else if (name === "aria") for (const [key, text] of Object.entries(value)) node.setAttribute(`aria-${key}`, text);
    else if (name in node && name !== "role" && name !== "list") node[name] = value;
    else node.setAttribute(name, value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

const PATHS = {
  plus: "M12 5v14M5 12h14",
  menu: "M4 7h16M4 12h16M4 17h16",
  sliders: "M4 8h9M17 8h3M4 16h3M11 16h9M15 6v4M9 14v4",
  send: "M12 19V5M6 11l6-6 6 6",
  stop: "M8 8h8v8H8z",
  copy: "M9 9h10v11H9zM5 15V4h10",
  check: "M5 13l4 4L19 7",
  retry: "M20 11a8 8 0 1 0-2.3 6.3M20 5v6h-6",
  edit: "M4 20h4L19 9l-4-4L4 16zM13 7l4 4",
  trash: "M5 7h14M10 7V4h4v3M7 7l1 13h8l1-13",
  left: "M14 6l-6 6 6 6",
  right: "M10 6l6 6-6 6",
  clip: "M19 11l-7.5 7.5a4.5 4.5 0 0 1-6.4-6.4L13 4.300a3 3 0 0 1 4.200 4.200l-7.700 7.700a1.500 1.500 0 0 1-2.100-2.100L14 7.500",
  close: "M6 6l12 12M18 6L6 18",
  bars: "M5 20v-6M10 20V9M15 20V4M20 20v-9",
  more: "M12 6v.01M12 12v.01M12 18v.01",
  play: "M8 5l11 7-11 7z",
  download: "M12 4v11M7 11l5 5 5-5M5 20h14",
  text: "M6 3h9l4 4v14H6zM9 12h7M9 16h7",
  upload: "M12 16V5M7 9l5-5 5 5M5 20h14",
  sun: "M12 8a4 4 0 1 0 0 8 4 4 0 0 0 0-8M12 2v2M12 20v2M2 12h2M20 12h2M5 5l1.400 1.400M17.600 17.600L19 19M5 19l1.400-1.400M17.600 6.400L19 5",
  tool: "M14 7a4 4 0 0 1 5-3l-2.500 2.500 1 2 2 1L22 7a4 4 0 0 1-5.500 5L9 19.500a2 2 0 0 1-3-3L13.500 9z",
};

/** Icon by name, hidden from screen readers. */
export function icon(name) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", "0 0 24 24");
  svg.setAttribute("class", "icon");
  svg.setAttribute("aria-hidden", "true");
  const path = document.createElementNS(SVG, "path");
  path.setAttribute("d", PATHS[name]);
  svg.append(path);
  return svg;
}

/** Button with an icon; its label is what screen readers and the tooltip say. */
export function iconButton(name, label, click, properties = {}) {
  const { className = "", ...rest } = properties;
  return el(
    "button",
    { type: "button", className: `icon-button ${className}`, title: label, aria: { label }, on: { click }, ...rest },
    icon(name),
  );
}

/** Button with a text, and an icon before it if one is named. */
export function textButton(label, click, properties = {}) {
  const { iconName, ...rest } = properties;
  return el("button", { type: "button", className: "button", on: { click }, ...rest }, iconName && icon(iconName), label);
}

/** Copy text to the clipboard, and show on the button that it is done. */
export async function copyText(text, button) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = el("textarea", { value: text, className: "visually-hidden" }); // plain HTTP has no clipboard API
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  const old = [...button.childNodes];
  button.replaceChildren(icon("check"));
  announce("Copied");
  setTimeout(() => button.replaceChildren(...old), 1500);
}

/** Text that screen readers say at their next pause. */
export function announce(text) {
  document.getElementById("status").textContent = text;
}

/** Number with separators of thousands. */
export const count = (n) => n.toLocaleString("en-US");
