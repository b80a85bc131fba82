// Files of text that are attached to a message.

const MAX_BYTES = 2 << 20;
const DOCUMENTS = {
  pdf: ["a PDF file", "pdftotext"],
  docx: ["a Word document", "pandoc -t plain"],
  odt: ["an OpenDocument text", "pandoc -t plain"],
  pptx: ["a presentation", "its program's export as text"],
  xlsx: ["a spreadsheet", "its program's export as CSV"],
  ods: ["a spreadsheet", "its program's export as CSV"],
};

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
