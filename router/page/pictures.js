// The pictures of the next message: pasted, dropped or selected.

import { byId, el } from "./dom.js";

const TYPES = ["image/png", "image/jpeg", "image/webp", "image/gif"];

export class Pictures {
  constructor() {
    this.urls = []; // data: URLs
    this.isEnabled = false;
    this.strip = byId("pictures");
    this.button = byId("add-picture");
    const input = byId("picture-files");
    this.button.addEventListener("click", () => input.click());
    input.addEventListener("change", () => {
      this.add(input.files);
      input.value = "";
    });
    byId("message").addEventListener("paste", event => {
      if (this.add(event.clipboardData?.files ?? [])) event.preventDefault();
    });
    const view = byId("chat");
    view.addEventListener("dragover", event => {
      if (this.isEnabled && event.dataTransfer?.types.includes("Files")) event.preventDefault();
    });
    view.addEventListener("drop", event => {
      if (!this.isEnabled || !event.dataTransfer?.files.length) return;
      event.preventDefault();
      this.add(event.dataTransfer.files);
    });
  }

  /** Enable pictures if all selected models accept them. */
  enable(isEnabled) {
    this.isEnabled = isEnabled;
    this.button.hidden = !isEnabled;
    if (!isEnabled) this.put([]);
  }

  /** Read the pictures among `files`. Return whether there are any. */
  add(files) {
    if (!this.isEnabled) return false;
    const taken = [...files].filter(file => TYPES.includes(file.type));
    for (const file of taken) {
      const reader = new FileReader();
      reader.addEventListener("load", () => this.put([...this.urls, reader.result]));
      reader.readAsDataURL(file);
    }
    return taken.length > 0;
  }

  put(urls) {
    this.urls = urls;
    this.strip.hidden = urls.length === 0;
    this.strip.replaceChildren(...urls.map((url, position) => {
      const remove = () => this.put(this.urls.filter((_, other) => other !== position));
      const name = `Remove picture ${position + 1}`;
      return el("button", { type: "button", class: "picture", "aria-label": name, title: name, onclick: remove }, thumbnail(url));
    }));
  }

  /** Return the pictures and clear the list. */
  take() {
    const urls = this.urls;
    this.put([]);
    return urls;
  }
}

export function thumbnail(url) {
  return el("img", { src: url, alt: "", class: "thumbnail" });
}

/** Return the content of a message in OpenAI's format. */
export function content(text, urls) {
  if (urls.length === 0) return text;
  const images = urls.map(url => ({ type: "image_url", image_url: { url } }));
  return text ? [...images, { type: "text", text }] : images;
}
