// Server-sent events of a fetch response.

/** Data of each event of a stream of byte chunks, as text. Comments and other fields are skipped. */
export async function* events(chunks) {
  const decoder = new TextDecoder();
  let rest = "";
  let data = [];
  for await (const chunk of chunks) {
    const lines = (rest + decoder.decode(chunk, { stream: true })).split("\n");
    rest = lines.pop();
    for (const raw of lines) {
      const line = raw.endsWith("\r") ? raw.slice(0, -1) : raw;
      if (line === "") {
        if (data.length) yield data.join("\n");
        data = [];
      } else if (line.startsWith("data:")) data.push(line.slice(line[5] === " " ? 6 : 5));
    }
  }
}

/** Chunks of a ReadableStream; it is cancelled when the loop ends early. */
export async function* chunksOf(stream) {
  const reader = stream.getReader();
  try {
    for (let part = await reader.read(); !part.done; part = await reader.read()) yield part.value;
  } finally {
    reader.cancel().catch(() => {});
  }
}
