// Pictures beside the prompt: dropped, pasted or chosen. They go with the next message, as data URLs.

import { byId, el } from "./dom.js";

const EDGE = 40; // of what is shown of one, in CSS pixels

export class Pictures {
  #pictures = []; // {url, name, canvas}
  #field = byId("pictures-field");
  #list = byId("picture-list");
  #changed;

  constructor(changed) {
    this.#changed = changed;
    const chosen = byId("picture-files");
    chosen.addEventListener("change", async () => {
      await this.#add(chosen.files);
      chosen.value = "";
    });
    for (const target of [this.#field, byId("prompt")]) {
      target.addEventListener("dragover", (event) => {
        if (!this.#field.hidden && event.dataTransfer.types.includes("Files")) event.preventDefault();
      });
      target.addEventListener("drop", (event) => this.#take(event, event.dataTransfer));
      target.addEventListener("paste", (event) => this.#take(event, event.clipboardData));
    }
    this.#list.addEventListener("click", (event) => {
      const button = event.target.closest("button");
      if (button) this.#remove([...this.#list.children].indexOf(button.parentElement));
    });
  }

  get urls() {
    return this.#field.hidden ? [] : this.#pictures.map(({ url }) => url);
  }

  show(isShown) {
    this.#field.hidden = !isShown;
  }

  clear() {
    this.#pictures = [];
    this.#draw();
  }

  #take(event, data) {
    if (this.#field.hidden || !data.files.length) return;
    event.preventDefault();
    this.#add(data.files);
  }

  async #add(files) {
    const pictures = [...files].filter(({ type }) => type.startsWith("image/"));
    const read = await Promise.all(
      pictures.map(async (file) => ({ url: await dataUrl(file), name: file.name, canvas: await thumbnail(file) })),
    );
    this.#pictures = [...this.#pictures, ...read];
    this.#update();
  }

  #remove(index) {
    this.#pictures = this.#pictures.filter((_, i) => i !== index);
    this.#update();
    (this.#list.querySelector("button") ?? byId("picture-files")).focus();
  }

  #update() {
    this.#draw();
    this.#changed();
  }

  #draw() {
    const chips = this.#pictures.map(({ name, canvas }) =>
      el(
        "li",
        { class: "chip" },
        canvas,
        el("span", { class: "chip-text" }, name),
        el("button", { type: "button", "aria-label": `Remove picture ${name}` }, "×"),
      ),
    );
    this.#list.replaceChildren(...chips);
  }
}

function dataUrl(file) {
  return new Promise((done, fail) => {
    const reader = new FileReader();
    reader.addEventListener("load", () => done(reader.result));
    reader.addEventListener("error", () => fail(reader.error));
    reader.readAsDataURL(file);
  });
}

/** What a picture looks like, drawn: the page shows no images of elsewhere. Of a damaged one it is blank. */
async function thumbnail(file) {
  const canvas = el("canvas", { width: EDGE * devicePixelRatio, height: EDGE * devicePixelRatio, class: "thumbnail" });
  try {
    const bitmap = await createImageBitmap(file);
    const scale = Math.min(canvas.width / bitmap.width, canvas.height / bitmap.height);
    const [width, height] = [bitmap.width * scale, bitmap.height * scale];
    canvas.getContext("2d").drawImage(bitmap, (canvas.width - width) / 2, (canvas.height - height) / 2, width, height);
  } catch {
    // The server will say what is wrong with it.
  }
  return canvas;
}
