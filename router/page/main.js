// Entry point of the page: the views, the keys, the feed.

import { startChat, showChat } from "./chat.js";
import { startDecide } from "./decide.js";
import { byId } from "./dom.js";
import { Feed } from "./feed.js";
import { startKeys } from "./keys.js";
import { StatusView } from "./status.js";

const VIEWS = ["status", "chat", "decide"];

function show(name) {
  for (const view of VIEWS) {
    const isShown = view === name;
    byId(view).hidden = !isShown;
    byId(`tab-${view}`).setAttribute("aria-selected", String(isShown));
    byId(`tab-${view}`).tabIndex = isShown ? 0 : -1;
  }
  document.body.dataset.view = name;
  history.replaceState(null, "", `${location.pathname}${location.search}#${name}`);
  if (name === "chat") showChat();
}

function startTabs() {
  for (const [position, view] of VIEWS.entries()) {
    const tab = byId(`tab-${view}`);
    tab.addEventListener("click", () => show(view));
    tab.addEventListener("keydown", event => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step) return;
      const other = VIEWS[(position + step + VIEWS.length) % VIEWS.length];
      show(other);
      byId(`tab-${other}`).focus();
    });
  }
  const asked = location.hash.slice(1);
  show(VIEWS.includes(asked) ? asked : "status");
}

startKeys();
startChat();
startDecide();
startTabs();
new Feed(new StatusView()).run();
