// Every piece of text on the page that can be seen, with the contrast to what is behind it.
const parsed = (colour) => {
  const parts = colour.match(/[\d.]+/g).map(Number);
  return { rgb: parts.slice(0, 3), alpha: parts.length > 3 ? parts[3] : 1 };
};
const luminance = (rgb) => {
  const [r, g, b] = rgb.map((v) => {
    const part = v / 255;
    return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const contrast = (a, b) => {
  const [high, low] = [luminance(a), luminance(b)].sort((x, y) => y - x);
  return (high + 0.05) / (low + 0.05);
};
const behind = (element) => {
  for (let at = element; at; at = at.parentElement) {
    const found = parsed(getComputedStyle(at).backgroundColor);
    if (found.alpha === 1) return found.rgb;
    if (found.alpha > 0) throw new Error(`a background that shows through: ${at.className}`);
  }
  return [255, 255, 255];
};
const found = [];
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
  const text = walker.currentNode.textContent.trim();
  const element = walker.currentNode.parentElement;
  const name = element.tagName.toLowerCase();
  if (!text || ["script", "style", "title", "desc"].includes(name)) continue;
  if (!element.checkVisibility()) continue;
  const style = getComputedStyle(element);
  const colour = element instanceof SVGElement ? style.fill : style.color;
  const size = parseFloat(style.fontSize);
  const isLarge = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
  found.push({ text: text.slice(0, 60), contrast: contrast(parsed(colour).rgb, behind(element)), isLarge });
}
const shapes = [...document.querySelectorAll(".chart .bar, .chart .rug, .chart .axis, .meter .part")].map((shape) => {
  const style = getComputedStyle(shape);
  const colour = style.fill === "none" || shape.tagName === "line" ? style.stroke : style.fill;
  return { shape: shape.getAttribute("class"), contrast: contrast(parsed(colour).rgb, behind(shape.ownerSVGElement)) };
});
return { found, shapes };
