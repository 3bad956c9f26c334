// Markdown as elements: the syntax that models use most. Text becomes text nodes, never HTML.

import { copyText, el } from "./dom.js";

const FENCE = /^ {0,3}(```+|~~~+)\s*([\w+#.-]*)/;
const ITEM = /^\s{0,3}(?:[-*+]|(\d{1,9})[.)])\s+(.*)$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const INLINE = /(`+)([^`]|[^`][\s\S]*?[^`])\1(?!`)|\*\*([^\s*][^*]*)\*\*|\*([^\s*][^*]*)\*|\[([^\]\n]+)\]\((https?:\/\/[^\s)]+)\)/;

/** Show `text` in `parent`. Unchanged blocks keep their elements. */
export function showMarkdown(parent, text) {
  const blocks = splitBlocks(text);
  blocks.forEach((block, position) => {
    const shown = parent.children[position];
    if (shown?.source === block) return;
    const element = render(block);
    element.source = block;
    if (shown) shown.replaceWith(element);
    else parent.append(element);
  });
  while (parent.children.length > blocks.length) parent.lastChild.remove();
}

/** Split a text into blocks: at empty lines, and around fences and headings. */
function splitBlocks(text) {
  const blocks = [];
  let lines = [];
  let fence = null;
  const end = () => {
    if (lines.length) blocks.push(lines.join("\n"));
    lines = [];
  };
  for (const line of text.split("\n")) {
    const mark = FENCE.exec(line)?.[1];
    if (fence) {
      lines.push(line);
      if (mark?.startsWith(fence) && line.trim() === mark) {
        fence = null;
        end();
      }
    } else if (mark) {
      end();
      fence = mark;
      lines.push(line);
    } else if (/^#{1,6}\s/.test(line)) {
      end();
      lines.push(line);
      end();
    } else if (!line.trim()) {
      end();
    } else {
      if (lines.length && ITEM.test(line) !== ITEM.test(lines[0]) && !/^\s/.test(line)) end();
      lines.push(line);
    }
  }
  end();
  return blocks;
}

function render(block) {
  const lines = block.split("\n");
  const fence = FENCE.exec(block);
  if (fence) return renderCode(lines, fence);
  const heading = /^(#{1,6})\s+(.*)/.exec(block);
  if (heading) return el(`h${Math.min(5, heading[1].length + 2)}`, {}, ...inline(heading[2]));
  if (RULE.test(block)) return el("hr");
  if (ITEM.test(lines[0])) return renderList(lines);
  if (lines.every(line => line.startsWith(">"))) {
    return el("blockquote", {}, ...inline(lines.map(line => line.replace(/^>\s?/, "")).join("\n")));
  }
  if (lines.length > 1 && lines[0].includes("|") && /^[\s|:-]+$/.test(lines[1])) return renderTable(lines);
  return el("p", { class: "plain" }, ...inline(block));
}

function renderCode(lines, [, mark, language]) {
  const isClosed = lines.length > 1 && lines.at(-1).trim().startsWith(mark);
  const code = lines.slice(1, isClosed ? -1 : undefined).join("\n");
  const copy = el("button", { type: "button", class: "quiet", onclick: event => copyText(code, event.target) }, "Copy");
  return el(
    "div", { class: "code-block" },
    el("header", {}, el("span", {}, language || "text"), copy),
    el("pre", { tabindex: "0", role: "region", "aria-label": `Code, ${language || "text"}` }, el("code", {}, code)),
  );
}

function renderList(lines) {
  const first = ITEM.exec(lines[0])[1];
  const items = [];
  for (const line of lines) {
    const found = ITEM.exec(line);
    if (found) items.push(found[2]);
    else items[items.length - 1] += `\n${line.trim()}`;
  }
  const shown = items.map(item => el("li", { class: "plain" }, ...inline(item)));
  return first ? el("ol", { start: first }, ...shown) : el("ul", {}, ...shown);
}

function renderTable(lines) {
  const cells = line => line.trim().replace(/^\||\|$/g, "").split("|").map(cell => cell.trim());
  const row = (line, tag) => el("tr", {}, ...cells(line).map(cell => el(tag, {}, ...inline(cell))));
  return el(
    "table", {}, el("thead", {}, row(lines[0], "th")), el("tbody", {}, ...lines.slice(2).map(line => row(line, "td"))),
  );
}

function inline(text) {
  const parts = [];
  let found;
  while ((found = INLINE.exec(text))) {
    const [all, ticks, code, bold, italic, label, address] = found;
    if (found.index) parts.push(text.slice(0, found.index));
    if (ticks) parts.push(el("code", {}, code));
    else if (bold) parts.push(el("strong", {}, ...inline(bold)));
    else if (italic) parts.push(el("em", {}, ...inline(italic)));
    else parts.push(el("a", { href: address, target: "_blank", rel: "noopener noreferrer" }, label));
    text = text.slice(found.index + all.length);
  }
  if (text) parts.push(text);
  return parts;
}
