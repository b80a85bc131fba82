// Files of text and pictures that are attached to a message.

const MAX_BYTES = 2 << 20;
const DOCUMENTS = {
  pdf: ["a PDF file", "pdftotext"],
  docx: ["a Word document", "pandoc -t plain"],
  odt: ["an OpenDocument text", "pandoc -t plain"],
  pptx: ["a presentation", "its program's export as text"],
  xlsx: ["a spreadsheet", "its program's export as CSV"],
  ods: ["a spreadsheet", "its program's export as CSV"],
};
const PICTURE = /^image\/(?:png|jpeg|webp|gif|bmp|avif|tiff)$/;
const MAX_PICTURE_BYTES = 4 << 20;
const MAX_PIXELS = 2048 * 2048; // no encoder reads more

export const isPicture = (file) => PICTURE.test(file.type);

/**
 * Picture as {name, image}, a data URI. One of more than 4 MiB is shrunk, and its name says so. Throws an Error in words
 * for what the browser cannot show.
 */
export async function readPicture(file) {
  let bitmap;
  try {
    bitmap = await createImageBitmap(file);
  } catch {
    throw new Error(`${file.name} is damaged, or not a picture that this browser can show.`);
  }
  try {
    if (file.size <= MAX_PICTURE_BYTES) return { name: file.name, image: await dataUri(file) };
    const scale = Math.min(1, Math.sqrt(MAX_PIXELS / (bitmap.width * bitmap.height)));
    const canvas = document.createElement("canvas");
    canvas.width = Math.max(1, Math.floor(bitmap.width * scale));
    canvas.height = Math.max(1, Math.floor(bitmap.height * scale));
    const context = canvas.getContext("2d");
    context.fillStyle = "white"; // of what is transparent, as in the server
    context.fillRect(0, 0, canvas.width, canvas.height);
    context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
    const blob = await new Promise((resolve) => canvas.toBlob(resolve, "image/jpeg", 0.92));
    return { name: `${file.name} (made smaller: ${canvas.width} × ${canvas.height})`, image: await dataUri(blob) };
  } finally {
    bitmap.close();
  }
}

function dataUri(blob) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Error(`The picture cannot be read: ${reader.error.message}`));
    reader.readAsDataURL(blob);
  });
}

/** File as {name, text}. Throws an Error in words for one that is too large or not text. */
export async function readText(file) {
  if (file.size > MAX_BYTES) {
    throw new Error(`${file.name} has ${(file.size / (1 << 20)).toFixed(1)} MiB; files up to 2 MiB can be attached.`);
  }
  const [kind, way] = DOCUMENTS[file.name.toLowerCase().split(".").at(-1)] ?? [];
  if (kind) throw new Error(`${file.name} is ${kind}, and the page reads text only: make text of it by ${way}, and attach that.`);
  let text;
  try {
    text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
  } catch {
    text = "\0";
  }
  if (text.includes("\0")) throw new Error(`${file.name} is not a text file in UTF-8.`);
  return { name: file.name, text };
}

/** Offer a text for download. */
export function download(name, text, type = "application/json") {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}
