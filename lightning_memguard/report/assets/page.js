(() => {
  const shown = JSON.parse(document.getElementById("timeline-data").textContent);
  const area = document.querySelector("#timeline .area"), cursor = area.querySelector(".cursor");
  const readout = document.querySelector("#timeline .readout"), columns = shown.events.length;
  const bytes = (n) => {
    const units = ["B", "KiB", "MiB", "GiB", "TiB"]; let u = 0;
    while (n >= 1024 && u < 4) { n /= 1024; u += 1; }
    return `${u ? n.toFixed(1) : n} ${units[u]}`;
  };
  let at = 0;
  const show = (column) => {
    at = Math.max(0, Math.min(columns - 1, column));
    const parts = Object.entries(shown.parts).map(([name, values]) => [name, values[at]]).filter(([, n]) => n);
    const total = parts.reduce((sum, [, n]) => sum + n, 0);
    const list = parts.sort((a, b) => b[1] - a[1]).map(([name, n]) => `${name} ${bytes(n)}`).join(", ");
    const held = shown.reserved.length ? `, ${bytes(shown.reserved[at])} reserved` : "";
    const place = shown.place_names[shown.places[at]];
    readout.textContent = `Event ${shown.events[at] + 1} of ${shown.count} (${shown.phase_names[shown.phases[at]]}` +
      `${place ? ": " + place : ""}): ${bytes(total)} alive${held}. ${list}.`;
    cursor.style.left = `${(100 * (at + 0.5)) / columns}%`;
    cursor.hidden = false;
  };
  area.addEventListener("pointermove", (event) => {
    const box = area.getBoundingClientRect();
    show(Math.floor((columns * (event.clientX - box.left)) / box.width));
  });
  area.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20 }[event.key];
    if (by) { show(at + by); event.preventDefault(); }
  });
})();
