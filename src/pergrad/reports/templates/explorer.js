(() => {
  "use strict";
  const data = JSON.parse(document.getElementById("samples").textContent);
  const by = (id) => document.getElementById(id);
  const body = by("explorer-rows");
  const chosen = new Set();
  const PAGE = 50;
  let limit = PAGE;
  let visible = [];
  let current = -1;

  const make = (tag, attributes = {}, text = null) => {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    if (text !== null) made.textContent = text;  // never HTML: it comes from the data
    return made;
  };
  // Isolated, so that a name in another direction leaves the words around it alone; whole where it is cut.
  const named = (tag, text, kind = "name") => make(tag, { class: kind, dir: "auto", title: text }, text);
  const percent = (value) => (value === null ? "" : ` ${value >= 0.995 ? ">99" : value < 0.005 ? "<1" : Math.round(100 * value)}%`);
  const digits = (value) => (value === null ? "–" : Number(value).toPrecision(3));
  const option = (select, value, text) => select.append(make("option", { value }, text));

  const names = (column) => [...new Set(data[column].filter((name) => name !== null))].sort((a, b) =>
    a.localeCompare(b, undefined, { numeric: true }));
  for (const name of names("label")) option(by("by-class"), name, name);
  for (const name of names("suggested")) option(by("by-suggested"), name, name);
  for (const [column, filter] of [["label", "by-class"], ["suggested", "by-suggested"], ["predicted", ""]]) {
    if (data[column].some((value) => value !== null)) continue;
    body.parentElement.classList.add(`no-${column}`);
    if (filter) by(filter).parentElement.style.display = "none";
  }

  const matches = (n) => {
    const kind = by("by-kind").value;
    const words = by("search").value.trim().toLowerCase();
    const least = Number(by("least").value || NaN);
    if (kind && !data.kinds[n].includes(kind)) return false;
    if (by("by-class").value && data.label[n] !== by("by-class").value) return false;
    if (by("by-suggested").value && data.suggested[n] !== by("by-suggested").value) return false;
    if (by("by-group").value && data.group[n] !== Number(by("by-group").value)) return false;
    if (!Number.isNaN(least) && !(data[score()][n] >= least)) return false;
    if (!words) return true;
    const preview = data.previews[data.index[n]];
    const text = [`#${data.index[n]}`, data.index[n], data.label[n], data.suggested[n], preview?.text];
    return text.some((part) => part !== null && part !== undefined && String(part).toLowerCase().includes(words));
  };
  const score = () => (["doubt", "loss", "outlier", "norm"].includes(by("sort").value) ? by("sort").value
    : data.judged ? "doubt" : "loss");

  const order = () => {
    const key = by("sort").value;
    const value = (n) => data[key][n];
    const numbers = data.index.map((_, n) => n).filter(matches);
    const last = (v) => v === null || v === undefined;
    numbers.sort((a, b) => {
      if (key === "rank" || key === "index") return value(a) - value(b);
      if (last(value(a)) || last(value(b))) return last(value(a)) - last(value(b));
      return value(b) - value(a);
    });
    return numbers;
  };

  const preview = (n) => {
    const found = data.previews[data.index[n]];
    const cell = make("td", { class: "preview" });
    if (found?.uri) {
      cell.append(make("img", { src: found.uri, alt: `Sample ${data.index[n]}`, class: found.pixels ? "pixels" : "" }));
    } else if (found?.text) cell.append(make("span", { class: "quote", dir: "auto" }, found.text));
    return cell;
  };

  const details = (n) => {
    const row = make("tr", { class: "details", id: `why-${data.index[n]}` });
    const cell = make("td", { colspan: "9" });
    const list = make("ul", { class: "why" });
    const reasons = data.why[n] ?? [];
    for (const words of reasons) list.append(make("li", {}, words));
    if (!reasons.length) list.append(make("li", {}, "Nothing about it stands out by itself."));
    cell.append(list);
    if (by(`sample-${data.index[n]}`)) {
      cell.append(make("a", { href: `#sample-${data.index[n]}` }, "Which samples push it"));
    }
    row.append(cell);
    return row;
  };

  const line = (n) => {
    const index = data.index[n];
    const row = make("tr", { "data-n": n, tabindex: "-1" });
    const pick = make("td");
    const box = make("input", { type: "checkbox", "aria-label": `Select sample ${index}` });
    box.checked = chosen.has(index);
    box.addEventListener("change", () => { toggle(n, box.checked); });
    pick.append(box);
    const name = make("th", { scope: "row", class: "n" });
    name.append(make("button", { class: "plain", "aria-expanded": "false" }, `#${index}`));
    const label = make("td");
    if (data.label[n] !== null) label.append(named("span", data.label[n], "label"));
    const says = make("td");
    if (data.suggested[n] !== null) {
      const other = data.suggested[n] !== data.label[n];
      says.append(named(other ? "strong" : "span", data.suggested[n]), percent(data.confidence[n]));
    }
    const model = make("td");
    if (data.predicted[n] !== null) {
      model.append(named("span", data.predicted[n]), percent(data.predicted_probability[n]));
    }
    row.append(pick, preview(n), name, label, says, model);
    for (const column of [data.judged ? "doubt" : "norm", "loss"]) {
      row.append(make("td", { class: "n" }, digits(data[column][n])));
    }
    row.append(make("td", { class: "n" }, data.group[n] > 0 ? String(data.group[n]) : ""));
    name.firstChild.addEventListener("click", () => { explain(row); });
    return row;
  };

  const explain = (row) => {
    const n = Number(row.dataset.n);
    const open = row.nextSibling?.classList?.contains("details");
    if (open) row.nextSibling.remove(); else row.after(details(n));
    row.querySelector("th button").setAttribute("aria-expanded", String(!open));
  };

  const toggle = (n, on) => {
    if (on) chosen.add(data.index[n]); else chosen.delete(data.index[n]);
    exported();
  };

  const draw = () => {
    visible = order();
    current = -1;
    body.replaceChildren(...visible.slice(0, limit).map(line));
    const written = (count) => count.toLocaleString("en");
    const part = data.index.length < data.total ? ` of the first ${written(data.index.length)}` : "";
    const all = part ? ` (${written(data.total)} in all)` : "";
    by("explorer-count").textContent = `${written(visible.length)}${part} samples${all}`;
    by("explorer-more").hidden = visible.length <= limit;
    exported();
  };

  const csv = (value) => (value === null || value === undefined ? "" : `"${String(value).replaceAll('"', '""')}"`);
  // A string of Python; characters that would show its code in another order than it runs are escaped.
  const quoted = (value) => (value === null ? "None" : JSON.stringify(value).replace(
    /[\u007f-\u009f\u061c\u200b-\u200f\u2028-\u202e\u2066-\u2069\ufeff]/g,
    (c) => `\\u${c.charCodeAt(0).toString(16).padStart(4, "0")}`));
  const picked = () => {
    const place = new Map(data.index.map((index, n) => [index, n]));
    return [...chosen].sort((a, b) => data.rank[place.get(a)] - data.rank[place.get(b)]).map((index) => place.get(index));
  };
  const texts = {
    indices: () => picked().map((n) => data.index[n]).join(", "),
    csv: () => ["index,label,suggested,confidence,loss", ...picked().map((n) =>
      [data.index[n], csv(data.label[n]), csv(data.suggested[n]), data.confidence[n] ?? "", data.loss[n] ?? ""].join(","))].join("\n"),
    subset: () => [
      "from torch.utils.data import Subset", "",
      `left_out = {${texts.indices()}}`,
      "kept = Subset(dataset, [n for n in range(len(dataset)) if n not in left_out])"].join("\n"),
    relabel: () => ["# index: new label, as the other samples suggest it; check each before you use it",
      "new_labels = {", ...picked().filter((n) => data.suggested[n] !== null).map((n) =>
        `    ${data.index[n]}: ${quoted(data.suggested[n])},  # was ${quoted(data.label[n])}`),
      "}", "", "import torch", "", "LABELS = (\"labels\", \"label\", \"target\", \"targets\", \"y\")", "", "",
      "class Relabelled(torch.utils.data.Dataset):",
      "    def __init__(self, dataset, classes=None):  # classes: their names, if labels are names",
      "        self.dataset, self.classes = dataset, classes", "",
      "    def __len__(self):", "        return len(self.dataset)", "",
      "    def __getitem__(self, index):",
      "        item = self.dataset[index]",
      "        if index not in new_labels:",
      "            return item",
      "        if isinstance(item, dict):",
      "            key = next(name for name in LABELS if name in item)",
      "            return {**item, key: self.changed(item[key], new_labels[index])}",
      "        *inputs, label = item",
      "        return (*inputs, self.changed(label, new_labels[index]))", "",
      "    def changed(self, label, name):",
      "        if isinstance(label, str):",
      "            return name",
      "        new = int(name) if self.classes is None else list(self.classes).index(name)",
      "        return torch.full_like(label, new) if isinstance(label, torch.Tensor) else new"].join("\n"),
  };
  const files = { indices: "indices.txt", csv: "samples.csv", subset: "subset.py", relabel: "relabel.py" };
  const exported = () => {
    by("export").value = chosen.size ? texts[by("export-as").value]() : "";
    by("export").parentElement.classList.toggle("has-some", chosen.size > 0);
    by("chosen").textContent = `${chosen.size.toLocaleString("en")} selected`;
    for (const id of ["copy", "download", "clear"]) by(id).disabled = !chosen.size;
  };

  by("copy").addEventListener("click", async () => {
    by("export").select();
    try { await navigator.clipboard.writeText(by("export").value); } catch { document.execCommand("copy"); }
    by("copy").textContent = "Copied";
    setTimeout(() => { by("copy").textContent = "Copy"; }, 1500);
  });
  by("download").addEventListener("click", () => {
    const link = make("a", { download: files[by("export-as").value] });
    link.href = URL.createObjectURL(new Blob([by("export").value], { type: "text/plain" }));
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  });
  by("clear").addEventListener("click", () => { chosen.clear(); draw(); });
  by("select-all").addEventListener("click", () => {
    for (const n of visible.slice(0, limit)) chosen.add(data.index[n]);
    draw();
  });
  by("explorer-more").addEventListener("click", () => { limit += 4 * PAGE; draw(); });
  by("export-as").addEventListener("change", exported);
  for (const id of ["by-kind", "by-class", "by-suggested", "by-group", "sort", "search", "least"]) {
    by(id).addEventListener("input", () => { limit = PAGE; draw(); });
  }
  const filter = (values) => {
    for (const id of ["by-kind", "by-class", "by-suggested", "by-group", "search", "least"]) by(id).value = "";
    for (const [id, value] of Object.entries(values)) by(id).value = value;
    limit = PAGE;
    draw();
    by("explorer").scrollIntoView();
  };
  for (const button of document.querySelectorAll("button[data-class]")) {
    button.addEventListener("click", () => filter({ "by-class": button.dataset.class, "by-kind": "label" }));
  }
  for (const button of document.querySelectorAll("button[data-group]")) {
    button.addEventListener("click", () => filter({ "by-group": button.dataset.group }));
  }
  for (const button of document.querySelectorAll("button[data-kind]")) {
    button.addEventListener("click", () => filter({ "by-kind": button.dataset.kind }));
  }

  const focus = (step) => {
    const rows = [...body.querySelectorAll("tr[data-n]")];
    if (!rows.length) return;
    current = Math.min(rows.length - 1, Math.max(0, current + step));
    rows[current].focus();
  };
  document.addEventListener("keydown", (event) => {
    const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(document.activeElement?.tagName ?? "")
      && document.activeElement.type !== "checkbox";
    if (event.ctrlKey || event.metaKey || event.altKey || typing) return;
    const row = document.activeElement?.closest?.("tr[data-n]");
    if (event.key === "/") { event.preventDefault(); by("search").focus(); }
    else if (event.key === "j") focus(1);
    else if (event.key === "k") focus(-1);
    else if (event.key === "x" && row) {
      const box = row.querySelector("input");
      box.checked = !box.checked;
      toggle(Number(row.dataset.n), box.checked);
    } else if (event.key === "Enter" && row === document.activeElement) explain(row);
  });
  by("explorer").hidden = false;
  draw();
})();
