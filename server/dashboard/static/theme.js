// The colours of style.css for what is drawn on canvases, and word of when they change. Knows no page.

/** A variable of style.css, such as "--line". */
export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

/** Whether the dark scheme is on. */
export function isDark() {
  return matchMedia("(prefers-color-scheme: dark)").matches;
}

/** Calls `redraw` when the scheme changes. */
export function onThemeChange(redraw) {
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
}

/** A colour as [red, green, blue], each 0 to 255. */
export function rgb(text) {
  const canvas = document.createElement("canvas");
  canvas.width = canvas.height = 1;
  const context = canvas.getContext("2d");
  context.fillStyle = text;
  context.fillRect(0, 0, 1, 1);
  return [...context.getImageData(0, 0, 1, 1).data.slice(0, 3)];
}

/** The same of an hsl() colour: a hue in degrees, the rest parts of one. (CSS Color 4, section 7.1) */
export function hslToRgb(hue, saturation, lightness) {
  const reach = saturation * Math.min(lightness, 1 - lightness);
  return [0, 8, 4].map((n) => {
    const k = (n + hue / 30) % 12;
    return Math.round(255 * (lightness - reach * Math.max(-1, Math.min(k - 3, 9 - k, 1))));
  });
}

/** Makes a canvas as many device pixels as it is large on the screen; returns its context, scaled to CSS pixels. */
export function fitCanvas(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  const [columns, rows] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== columns || canvas.height !== rows) {
    canvas.width = columns;
    canvas.height = rows;
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  return context;
}
