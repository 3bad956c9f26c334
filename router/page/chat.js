// The chat view: panes of conversations, and messages sent to all of them.

import { ApiError, request } from "./api.js";
import { byId } from "./dom.js";
import { apiHeaders, askForKeys, onKeys } from "./keys.js";
import { Pane } from "./pane.js";
import { Pictures } from "./pictures.js";
import { requestFields, startSettings } from "./settings.js";

const MAX_PANES = 4;

let models = [];
let panes = [];
let turn = 0;
let pictures;

export function startChat() {
  startSettings();
  pictures = new Pictures();
  const message = byId("message");
  byId("composer").addEventListener("submit", event => {
    event.preventDefault();
    send();
  });
  message.addEventListener("keydown", event => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send();
    }
  });
  message.addEventListener("input", fit);
  byId("stop").addEventListener("click", stopAll);
  byId("chat").addEventListener("keydown", event => {
    if (event.key === "Escape") stopAll();
  });
  byId("clear").addEventListener("click", () => {
    panes.forEach(pane => pane.clear());
    pictures.put([]);
    message.focus();
  });
  byId("add-pane").addEventListener("click", addPane);
  onKeys(loadModels);
  addPane();
}

/** Load what the view shows. Called when it becomes visible. */
export function showChat() {
  loadModels();
  if (matchMedia("(pointer: fine)").matches) byId("message").focus();
}

async function loadModels() {
  try {
    const response = await request("v1/models", { headers: apiHeaders() });
    models = (await response.json()).data;
  } catch (error) {
    if (error instanceof ApiError && error.status === 401 && !byId("chat").hidden) askForKeys(error.message);
    return;
  }
  panes.forEach(pane => pane.setModels(models));
  showCapabilities();
}

function addPane() {
  const taken = panes.map(pane => pane.select.value);
  const model = models.find(each => !taken.includes(each.id))?.id ?? models[0]?.id;
  panes.push(new Pane({ models, model, onChange: showRunning, onModel: showCapabilities, onEdit: edit, onClose: removePane }));
  byId("panes").append(panes.at(-1).element);
  showPanes();
}

function removePane(pane) {
  pane.stop();
  pane.element.remove();
  panes = panes.filter(each => each !== pane);
  showPanes();
}

function showPanes() {
  for (const pane of panes) pane.close.hidden = panes.length === 1;
  byId("add-pane").disabled = panes.length >= MAX_PANES;
  showCapabilities();
  showRunning();
}

function send() {
  const message = byId("message");
  const text = message.value.trim();
  if ((!text && pictures.urls.length === 0) || panes.some(pane => pane.isRunning) || !requestFields()) return;
  message.value = "";
  fit();
  turn += 1;
  const urls = pictures.take();
  for (const pane of panes) pane.ask(turn, text, urls);
}

/** Go back to a question, so that it can be edited. */
function edit(from, text, urls) {
  for (const pane of panes) pane.cutFrom(entry => entry.turn >= from);
  byId("message").value = text;
  pictures.put(urls);
  fit();
  byId("message").focus();
}

/** Show the controls for capabilities that all selected models have. */
function showCapabilities() {
  const takesPictures = pane =>
    models.find(each => each.id === pane.select.value)?.capabilities.includes("vision") ?? false;
  pictures.enable(panes.length > 0 && panes.every(takesPictures));
}

function stopAll() {
  panes.forEach(pane => pane.stop());
}

function showRunning() {
  const isRunning = panes.some(pane => pane.isRunning);
  byId("stop").hidden = !isRunning;
  byId("send").disabled = isRunning;
}

/** Fit the height of the field to its text. */
function fit() {
  const message = byId("message");
  message.style.height = "auto";
  message.style.height = `${message.scrollHeight + 2}px`;
}
