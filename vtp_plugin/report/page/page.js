"use strict";
// What the page does by itself: names what is pointed at, zooms into a step, copies commands. It loads nothing.
(() => {
  const hint = document.getElementById("hint");

  function tell(text, x, y) {
    hint.textContent = text;
    hint.hidden = !text;
    if (!text) return;
    const box = hint.getBoundingClientRect();
    hint.style.left = `${Math.max(4, Math.min(x + 12, innerWidth - box.width - 4))}px`;
    hint.style.top = `${y + 18 + box.height > innerHeight ? y - box.height - 8 : y + 18}px`;
  }

  // The browser shows a title only after a while, and on a phone never. So titles of marks become hints of the page.
  function takeTitles(svg) {
    for (const title of [...svg.querySelectorAll("* > title")]) {
      if (title.parentNode === svg) continue;
      title.parentNode.dataset.title = title.textContent;
      title.remove();
    }
  }

  document.addEventListener("pointermove", (event) => {
    const mark = event.target.closest?.("[data-title]");
    tell(mark ? mark.dataset.title : "", event.clientX, event.clientY);
  });
  document.addEventListener("pointerleave", () => tell(""));

  async function copy(button) {
    const code = button.parentNode.querySelector("code");
    try {
      await navigator.clipboard.writeText(code.textContent);
    } catch {
      // Without the right to write there, the reader copies what is selected.
      getSelection().selectAllChildren(code);
      document.execCommand("copy");
    }
    button.textContent = "copied";
    setTimeout(() => { button.textContent = "copy"; }, 1500);
  }
  for (const button of document.querySelectorAll(".copy")) button.addEventListener("click", () => copy(button));

  const SVG = "http://www.w3.org/2000/svg";
  function make(tag, attributes, parent) {
    const one = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(attributes)) one.setAttribute(name, value);
    return parent.appendChild(one);
  }
  const number = (one, name) => Number(one.getAttribute(name));

  // The smallest of 1, 2, 5, 10 .. that gives few enough ticks.
  function tickStep(length, most) {
    const decade = 10 ** Math.floor(Math.log10(length / most));
    return [1, 2, 5, 10, 20].map((factor) => decade * factor).find((step) => length / step <= most);
  }

  // The time axis of a picture: what lies over a row is stretched along it, the rest stays as it is.
  function zoomable(region, svg) {
    const row = svg.querySelector('rect[class="row"]');
    if (!row) return;
    const left = number(row, "x"), width = number(row, "width");
    const ticks = [...svg.querySelectorAll("text.tick")], lines = [...svg.querySelectorAll("line.tick")];
    const latest = ticks[ticks.length - 1], unit = (latest.textContent.match(/[a-z]+$/) || [""])[0];
    const perUnit = (number(latest, "x") - left) / parseFloat(latest.textContent), base = number(latest, "y");
    if (!(perUnit > 0)) return;  // a step that takes no time
    // The pieces of each line of the axis.
    const pieces = [...new Set(lines.map((one) => `${one.getAttribute("y1")} ${one.getAttribute("y2")}`))]
      .map((piece) => piece.split(" "));
    for (const one of [...ticks, ...lines, ...svg.querySelectorAll("text.number")]) one.remove();
    const clip = make("clipPath", { id: "axis" }, svg);
    make("rect", { x: left, y: 0, width, height: svg.viewBox.baseVal.height }, clip);
    const axis = make("g", {}, svg), marks = make("g", { "clip-path": "url(#axis)" }, svg);
    const messages = [...svg.querySelectorAll("line.message")].map((one) => (
      { one: marks.appendChild(one), from: number(one, "x1") - left, to: number(one, "x2") - left }));
    // The title has more digits than the length on the paper: `forward 3: 1.25 to 2.5`; the number is the microbatch.
    const boxes = [...svg.querySelectorAll("rect[data-title]")].map((one) => {
      const [, word, begin, end] = one.dataset.title.match(/(\d*): (\S+) to (\S+)$/);
      return {
        one: marks.appendChild(one), from: begin * perUnit, length: (end - begin) * perUnit, word, label: null,
        middle: number(one, "y") + number(one, "height") / 2 + 4,
      };
    });
    let zoom = 1, start = 0, named = -1, isAsked = false;  // `start`: pixels of the whole step left of the window
    const most = Math.max(1, ...boxes.filter((box) => box.word).map((box) => 40 / Math.max(box.length, 0.02)));

    function draw() {
      isAsked = false;
      const end = start + width / zoom;
      for (const { one, from, to } of messages) {
        one.style.display = to < start || from > end ? "none" : "";
        one.setAttribute("x1", (left + (from - start) * zoom).toFixed(2));
        one.setAttribute("x2", (left + (to - start) * zoom).toFixed(2));
      }
      for (const box of boxes) {
        const isSeen = box.from + box.length >= start && box.from <= end;
        const x = left + (box.from - start) * zoom, long = box.length * zoom;
        const size = Math.max(0.3, long - Math.min(1, long / 10));  // the gap keeps neighbours apart
        box.one.style.display = isSeen ? "" : "none";
        if (isSeen) { box.one.setAttribute("x", x.toFixed(2)); box.one.setAttribute("width", size.toFixed(2)); }
        const first = Math.max(x, left), last = Math.min(x + size, left + width);
        const hasRoom = isSeen && box.word && last - first >= 6 * box.word.length + 2;
        if (hasRoom && !box.label) {
          box.label = make("text", { class: "number", y: box.middle, "pointer-events": "none" }, marks);
          box.label.textContent = box.word;
        }
        if (box.label) {
          box.label.style.display = hasRoom ? "" : "none";
          box.label.setAttribute("x", ((first + last) / 2).toFixed(2));
        }
      }
      axis.replaceChildren();
      const from = start / perUnit, to = end / perUnit, step = tickStep(to - from, 12);
      const last = Math.floor(to / step + 1e-9);
      for (let tick = Math.ceil(from / step - 1e-9); tick <= last; tick += 1) {
        const x = (left + (tick * step - from) * perUnit * zoom).toFixed(2);
        for (const [y1, y2] of pieces) make("line", { class: "tick", x1: x, x2: x, y1, y2 }, axis);
        const text = String(Number((tick * step).toPrecision(10)));
        make("text", { class: "tick", x, y: base }, axis).textContent = tick === last ? `${text} ${unit}` : text;
      }
      const shown = zoom > 1 ? `${from.toPrecision(4)} to ${to.toPrecision(4)} ${unit}` : "";
      region.parentNode.querySelector(".window").textContent = shown;
      region.dataset.zoom = zoom.toFixed(3);
    }

    function move(newZoom, newStart) {
      zoom = Math.min(Math.max(1, newZoom), most);
      start = Math.min(Math.max(0, newStart), width - width / zoom);
      if (!isAsked) requestAnimationFrame(draw);
      isAsked = true;
    }
    // `at`: pixels of the axis that stay where they are.
    function scale(factor, at = width / 2) {
      const fixed = start + at / zoom, next = Math.min(Math.max(1, zoom * factor), most);
      move(next, fixed - at / next);
    }
    const actions = {
      in: () => scale(1.5), out: () => scale(1 / 1.5), all: () => move(1, 0),
      left: () => move(zoom, start - width / zoom / 4), right: () => move(zoom, start + width / zoom / 4),
    };
    function name(index) {
      if (!boxes.length) return;
      boxes[named]?.one.classList.remove("named");
      named = (index + boxes.length) % boxes.length;
      const box = boxes[named];
      box.one.classList.add("named");
      if (box.from < start || box.from + box.length > start + width / zoom) move(zoom, box.from - width / zoom / 4);
      requestAnimationFrame(() => {
        const place = box.one.getBoundingClientRect();
        tell(box.one.dataset.title, place.left, place.bottom - 12);
      });
    }
    const keys = {
      "+": actions.in, "=": actions.in, "-": actions.out, 0: actions.all, ArrowLeft: actions.left, ArrowRight: actions.right,
      n: () => name(named + 1), p: () => name(named - 1), Escape: () => tell(""),
    };
    region.addEventListener("keydown", (event) => {
      const isPlain = !event.ctrlKey && !event.metaKey && !event.altKey;
      // At its full length the picture may still be wider than the screen: then arrows scroll it.
      if (!isPlain || !(event.key in keys) || (zoom === 1 && event.key.startsWith("Arrow"))) return;
      event.preventDefault();
      keys[event.key]();
    });
    for (const button of region.parentNode.querySelectorAll("[data-zoom]"))
      button.addEventListener("click", () => actions[button.dataset.zoom]());

    // Pixels of the picture at a place of the screen.
    const along = (event) => {
      const place = svg.getBoundingClientRect();
      return (event.clientX - place.left) * svg.viewBox.baseVal.width / place.width - left;
    };
    svg.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey) return;  // else nobody could scroll past the picture
      event.preventDefault();
      scale(1.2 ** (-event.deltaY / 50), along(event));
    }, { passive: false });
    let held = null;
    svg.addEventListener("pointerdown", (event) => {
      if (event.button || zoom === 1) return;
      held = along(event);
      svg.setPointerCapture(event.pointerId);
      svg.classList.add("dragged");
    });
    svg.addEventListener("pointermove", (event) => {
      if (held === null) return;
      const now = along(event);
      move(zoom, start - (now - held) / zoom);
      held = now;
    });
    for (const end of ["pointerup", "pointercancel"])
      svg.addEventListener(end, () => { held = null; svg.classList.remove("dragged"); });
    draw();
  }

  async function unpack(packed) {
    const bytes = Uint8Array.from(atob(packed.content.textContent), (letter) => letter.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    const holder = document.createElement("div");
    holder.innerHTML = await new Response(stream).text();
    packed.replaceWith(...holder.childNodes);
  }

  async function prepare(region) {
    const packed = region.querySelector("template.packed");
    if (packed) await unpack(packed);
    const svg = region.querySelector("svg");
    takeTitles(svg);
    if (region.classList.contains("steps")) zoomable(region, svg);
    region.dataset.ready = "yes";
  }
  for (const region of document.querySelectorAll(".picture")) prepare(region);
})();
