(() => {
  "use strict";
  const root = document.documentElement;
  const button = document.getElementById("theme");
  const system = window.matchMedia("(prefers-color-scheme: dark)");
  const remembered = () => {
    try { return window.localStorage.getItem("pergrad-theme"); } catch { return null; }
  };
  const remember = (theme) => {
    try { window.localStorage.setItem("pergrad-theme", theme); } catch { /* not kept: a file may not */ }
  };
  const isDark = () => (root.dataset.theme ?? (system.matches ? "dark" : "light")) === "dark";
  const name = () => { button.textContent = isDark() ? "Light" : "Dark"; };
  const before = remembered();
  if (before === "dark" || before === "light") root.dataset.theme = before;
  button.hidden = false;
  name();
  system.addEventListener("change", name);
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    remember(root.dataset.theme);
    name();
  });
  // What a link leads to may be folded. In the frame of a notebook, links within the page would leave it: they
  // are relative to the notebook.
  document.addEventListener("click", (event) => {
    const link = event.target.closest?.('a[href^="#"]');
    const target = link && document.getElementById(link.getAttribute("href").slice(1));
    if (!target) return;
    for (let part = target.closest("details"); part; part = part.parentElement.closest("details")) part.open = true;
    if (window.location.protocol !== "about:") return;
    event.preventDefault();
    target.scrollIntoView();
    target.focus({ preventScroll: true });
  });
})();
