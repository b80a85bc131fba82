// Files of text, pictures and sound that are attached to a message.

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
const MAX_SOUND_BYTES = 7 << 20; // in base64 a request of the server's default size
const SAMPLE_RATE = 16_000; // that of encoders

const isPicture = (file) => PICTURE.test(file.type);

/** Kind of a file: "image", "audio" or "text". */
export const kindOf = (file) => isPicture(file) ? "image" : file.type.startsWith("audio/") ? "audio" : "text";

/** File as {name} with what its kind is, as a data URI or text. Throws an Error in words. */
export const read = (file) => ({ image: readPicture, audio: readSound, text: readText })[kindOf(file)](file);

/**
 * Picture as {name, image}, a data URI. One of more than 4 MiB is shrunk, and its name says so. Throws an Error in words
 * for what the browser cannot show.
 */
async function readPicture(file) {
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

/**
 * Sound as {name, audio}, a data URI of a WAV file. Other types, and large files, become one of 16 bits at the rate of
 * encoders. Throws an Error in words for what the browser cannot play, and for long sound.
 */
async function readSound(file) {
  let samples;
  try {
    const context = new OfflineAudioContext(1, 1, SAMPLE_RATE);
    samples = mono(await context.decodeAudioData(await file.arrayBuffer()));
  } catch {
    throw new Error(`${file.name} is damaged, or no sound that this browser can play.`);
  }
  if (/wav/.test(file.type) && file.size <= MAX_SOUND_BYTES) return { name: file.name, audio: await dataUri(file) };
  if (samples.length * 2 > MAX_SOUND_BYTES) {
    const minutes = (count) => (count / SAMPLE_RATE / 60).toFixed(1);
    throw new Error(`${file.name} has ${minutes(samples.length)} minutes; up to ${minutes(MAX_SOUND_BYTES / 2)} can be attached.`);
  }
  return { name: file.name, audio: await dataUri(wav(samples)) };
}

function mono(buffer) {
  const channels = Array.from({ length: buffer.numberOfChannels }, (_, i) => buffer.getChannelData(i));
  return channels[0].map((_, i) => channels.reduce((sum, channel) => sum + channel[i], 0) / channels.length);
}

/** WAV file of 16 bits of samples from -1 to 1. */
function wav(samples) {
  const data = new DataView(new ArrayBuffer(44 + samples.length * 2));
  const words = [0x52494646, 36 + samples.length * 2, 0x57415645, 0x666d7420, 16, 0x10001, SAMPLE_RATE, SAMPLE_RATE * 2, 0x100002,
    0x64617461, samples.length * 2];
  const names = new Set([0, 2, 3, 9]); // RIFF, WAVE, "fmt ", data
  words.forEach((word, i) => data.setUint32(4 * i, word, !names.has(i)));
  samples.forEach((sample, i) => data.setInt16(44 + 2 * i, Math.round(Math.max(-1, Math.min(1, sample)) * 32767), true));
  return new Blob([data], { type: "audio/wav" });
}

function dataUri(blob) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Error(`The file cannot be read: ${reader.error.message}`));
    reader.readAsDataURL(blob);
  });
}

/** File as {name, text}. Throws an Error in words for one that is too large or not text. */
async function readText(file) {
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
