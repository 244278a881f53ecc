"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const at = (id) => document.getElementById(id);
const roundUp = (size, align) => Math.ceil(size / align) * align;
const powerOfTwo = (count) => 2 ** Math.ceil(Math.log2(count));
const sum = (values) => values.reduce((total, value) => total + value, 0);

/* The arithmetic of dsv4.cache.memory.capacity: payload and allocated bytes of every component. */

function groupTops(entries, topk) {
  const { wholeEntries, narrowEntries, group } = data.constants;
  const most = Math.max(wholeEntries, narrowEntries, group * powerOfTwo(topk));
  let levels = 0;
  for (let count = entries; count > most; levels++) {
    count = Math.ceil(count / group);
  }
  const padded = roundUp(entries, group ** (levels + 1));
  return sum(Array.from({ length: levels }, (_, level) => padded / group ** (level + 1)));
}

function indexScratch(model, choice) {
  const { scratchLimit, minHeads, queryBytes, byteAlign } = data.constants;
  const entries = Math.floor(choice.context / 4);
  if (!choice.layers.csa || entries <= model.topk) return { row: 0, bytes: 0 };
  const heads = Math.max(minHeads, powerOfTwo(model.indexHeads));
  const width = powerOfTwo(model.indexDim), rests = choice.index === "mxfp4" ? width / 32 : 0;
  const row = heads * width * (queryBytes[choice.index] ?? 2) + heads * 4 * (1 + rests)
    + roundUp(entries * 4, byteAlign) + roundUp(groupTops(entries, model.topk) * 4, byteAlign);
  const rows = Math.max(1, Math.min(choice.chunk, Math.floor(scratchLimit / row)));
  return { row, bytes: row * rows };
}

function denseRows(model, choice, blocks) {
  const { denseLimit, denseHeads, denseWorks, byteAlign } = data.constants;
  const { csa, hca } = choice.layers, ratio = csa ? 4 : 128;
  const isMade = model.denseFormats.includes(choice.kv) && model.heads % denseHeads === 0;
  if (!isMade || choice.chunk <= choice.drafts + 1) return 0;
  const entries = csa + hca ? Math.floor(choice.context / ratio) : 0;
  const rows = choice.chunk + model.window - 1 + roundUp(entries, choice.block / ratio);
  const works = Math.floor((choice.chunk * model.heads) / denseHeads);
  if (works < denseWorks) return 0;
  return Math.min(denseLimit, rows * model.headDim * 2
    + roundUp((entries ? blocks : 0) * 4, byteAlign) + roundUp((1 + works) * 4, byteAlign));
}

function blockBytes(model, choice) {
  const { swa, csa, hca } = choice.layers;
  const kv = model.kvRows[choice.kv], key = model.indexRows[choice.index];
  const page = (ratio) => roundUp((choice.block / ratio) * kv, choice.align);
  const keys = (choice.block / 4) * key;
  const parts = {
    csa_entries: [csa * (choice.block / 4) * kv, csa * page(4)],
    index_keys: [csa * keys, csa * roundUp(keys, data.constants.byteAlign)],
    hca_entries: [hca * (choice.block / 128) * kv, hca * page(128)],
  };
  const used = sum(Object.values(parts).map((part) => part[1]));
  return { ...parts, block_padding: [0, roundUp(used, choice.align) - used] };
}

function slotBytes(model, choice) {
  const { swa, csa, hca } = choice.layers;
  const ring = (model.window + choice.drafts) * model.kvRows[choice.kv];
  const tail = (layers, rows, series, dim) => {
    const elements = (rows + choice.drafts) * 2 * series * dim;
    const bytes = layers * roundUp(elements * data.tails[choice.tails], data.constants.byteAlign);
    return [bytes, bytes];
  };
  const hcaTails = () => {
    const closed = Math.ceil((choice.drafts + 1) / 16);
    const sums = roundUp((7 + (closed > 1 ? closed : 0)) * 3 * model.headDim * 4, data.constants.byteAlign);
    return tail(hca, 16, 1, model.headDim).map((bytes) => bytes + hca * sums);
  };
  const layers = swa + csa + hca;
  const parts = {
    window: [layers * ring, layers * roundUp(ring, choice.align)],
    csa_tails: tail(csa, 8, 2, model.headDim),
    index_tails: tail(csa, 8, 2, model.indexDim),
    hca_tails: hcaTails(),
  };
  const used = sum(Object.values(parts).map((part) => part[1]));
  return { ...parts, slot_padding: [0, roundUp(used, choice.align) - used] };
}

function undoBytes(model, choice) {
  const parts = Object.entries(slotBytes(model, choice));
  const chunks = Math.floor(choice.chunk / (choice.drafts + 2));
  const count = Math.min(choice.undo, choice.requests, chunks);
  const payload = sum(parts.map(([name, part]) => (name === "slot_padding" ? 0 : part[1])));
  return { undo_slots: [count * payload, count * sum(parts.map(([, part]) => part[1]))] };
}

function checkpointBytes(model, choice) {
  const { swa, csa, hca } = choice.layers;
  const { window, csa_tails, index_tails } = slotBytes(model, choice);
  const rows = (swa + csa + hca) * model.window * model.kvRows[choice.kv];
  const tails = csa ? csa * Math.floor(((csa_tails[0] + index_tails[0]) / csa) * 4 / (8 + choice.drafts)) : 0;
  return { checkpoints: [rows + tails, window[1] + csa_tails[1] + index_tails[1]] };
}

function sharedBytes(model, choice, blocks) {
  const { headBlock, splitPrograms, byteAlign } = data.constants;
  const { requests, chunk, drafts } = choice;
  const columns = choice.layers.csa + choice.layers.hca ? Math.ceil(choice.context / choice.block) : 0;
  const updates = requests + Math.floor(chunk / choice.block) + 1;
  const captures = Math.min(choice.checkpoints, requests + Math.floor(chunk / choice.block));
  const windows = requests + Math.floor(chunk / 128);
  const partials = Math.max(1, Math.floor(splitPrograms / Math.ceil(model.heads / headBlock)));
  const chunks = Math.min(requests, Math.floor(chunk / (drafts + 2)));
  const rows = chunk <= drafts + 1 ? 0 : chunk + chunks * (model.window - 1);
  const workspace = rows * model.kvRows[choice.kv];
  const plain = {
    block_table: requests * columns * 4,
    plan_buffers: (14 * requests + 5 + 2 * chunk + 3 * (updates + captures)) * 4,
    pooling_scratch: windows * (model.headDim * 4 + 4),
    index_scratch: Math.max(indexScratch(model, choice).bytes, denseRows(model, choice, blocks)),
    attention_partials: partials * model.heads * (model.headDim + 2) * 4,
    rope_rows: 4 * (chunk * model.ropeDim + model.ropeDim / 2) * 4,
    index_global_scale: 4,
  };
  const sizes = Object.fromEntries(Object.entries(plain).map(([name, size]) => [name, [size, size]]));
  return { ...sizes, window_workspace: [workspace, roundUp(workspace, byteAlign)] };
}

function blocksOf(choice) {
  const { csa, hca } = choice.layers;
  if (!csa && !hca) return 0;
  const ratio = csa ? 4 : 128;
  return Math.ceil((choice.context - (choice.context % ratio)) / choice.block);
}

function times(parts, count) {
  return Object.fromEntries(
    Object.entries(parts).map(([name, part]) => [name, part.map((size) => size * count)]),
  );
}

function plan(choice, numBlocks) {
  const whole = data.models[choice.model], model = { ...whole, heads: whole.heads / choice.ranks };
  const blocks = numBlocks ?? choice.requests * blocksOf(choice);
  const memory = {
    ...times(blockBytes(model, choice), blocks),
    ...times(slotBytes(model, choice), choice.requests),
    ...undoBytes(model, choice),
    ...sharedBytes(model, choice, blocks),
    ...times(checkpointBytes(model, choice), choice.checkpoints),
  };
  const cache = sum(Object.values(memory).map((size) => size[1]));
  const weights = Math.ceil(choice.weights / choice.ranks);
  const needed = weights + choice.reserve + cache;
  return { memory, cache, weights, needed, free: choice.gpuBytes - needed };
}

function largest(fits, atMost = Infinity) {
  let good = 0, bad = 1;
  while (bad <= atMost && fits(bad)) [good, bad] = [bad, 2 * bad];
  bad = Math.min(bad, atMost + 1);
  while (bad - good > 1) {
    const middle = Math.floor((good + bad) / 2);
    if (fits(middle)) good = middle;
    else bad = middle;
  }
  return good;
}

function maxContext(choice) {
  const model = data.models[choice.model], step = choice.block;
  const fits = (context) => plan({ ...choice, context }).free >= 0;
  if (fits(model.maxPosition)) return model.maxPosition;
  const limit = Math.floor(model.maxPosition / step);
  const found = largest((number) => fits(number * step), limit);
  const { row } = indexScratch(model, { ...choice, context: model.maxPosition });
  const grown = choice.requests * sum(Object.values(blockBytes(model, choice)).map((part) => part[1]));
  const last = row ? Math.min(limit, found + Math.floor(row / grown) + 1) : found;
  for (let number = last; number > found; number--) if (fits(number * step)) return number * step;
  return found * step;
}

/* What people write: 1M, 128k; 141GB, 80GiB. */

const TOKEN_UNITS = { "": 1, k: 2 ** 10, m: 2 ** 20 };
const BYTE_UNITS = {
  b: 1, kb: 1e3, mb: 1e6, gb: 1e9, tb: 1e12, kib: 2 ** 10, mib: 2 ** 20, gib: 2 ** 30, tib: 2 ** 40,
};

function parseSize(text, units) {
  const match = /^\s*([0-9]+(?:[_,][0-9]{3})*)(?:\.([0-9]+))?\s*([a-z]*)\s*$/i.exec(text);
  const unit = match && units[match[3].toLowerCase()];
  if (!unit) return null;
  const digits = match[2] ?? "";
  const scale = 10n ** BigInt(digits.length);
  const value = BigInt(match[1].replace(/[_,]/g, "") + digits) * BigInt(unit);
  return value % scale ? null : Number(value / scale);
}

const LIMITED = {
  requests: "requests", chunk: "tokens of one forward", drafts: "drafts", checkpoints: "checkpoints",
  undo: "undo slots", ranks: "ranks",
};

const parseTokens = (text) => parseSize(text, TOKEN_UNITS) || null;
const parseBytes = (text) => (text.trim() === "0" ? 0 : parseSize(text, BYTE_UNITS));
const parseWhole = (least) => (text) => (/^[0-9]+$/.test(text) && +text >= least ? +text : null);

const FIELDS = {
  context: [parseTokens, "a number of tokens such as 4096, 128k or 1M"],
  requests: [parseWhole(1), "a whole number of requests above 0"],
  size: [(text) => parseBytes(text) || null, "a GPU's memory such as 80GiB or 141GB"],
  weights: [parseBytes, "a size of the weights such as 160GB"],
  ranks: [parseWhole(1), "a whole number of ranks above 0"],
  reserve: [parseBytes, "a reserved size such as 4GiB"],
  drafts: [parseWhole(0), "a whole number of drafts"],
  chunk: [parseTokens, "a number of tokens of one forward such as 8k"],
  checkpoints: [parseWhole(0), "a whole number of checkpoints"],
  undo: [parseWhole(0), "a whole number of undo slots"],
};

function readChoice() {
  const choice = {};
  for (const id of ["model", "kv", "index", "tails", "gpu"]) choice[id] = at(id).value;
  for (const id of ["block", "align"]) choice[id] = Number(at(id).value);
  const problems = [];
  for (const [id, [parse, expected]] of Object.entries(FIELDS)) {
    if (id === "size" && choice.gpu !== "other") continue;
    choice[id] = parse(at(id).value);
    const isBad = choice[id] === null || choice[id] > Number.MAX_SAFE_INTEGER;
    at(id).setAttribute("aria-invalid", isBad);
    if (isBad) problems.push(`expected ${expected}`);
  }
  const model = data.models[choice.model];
  if (choice.context > model.maxPosition) {
    at("context").setAttribute("aria-invalid", true);
    problems.push(`expected at most ${whole(model.maxPosition)} tokens, the model's limit`);
  }
  if (choice.ranks && model.heads % choice.ranks) {
    at("ranks").setAttribute("aria-invalid", true);
    problems.push(`expected ranks that divide ${model.heads} query heads`);
  }
  const layers = at("mtp").checked ? model.withMtp : model.withoutMtp;
  if (layers.hca && choice.block % 128) {
    problems.push("expected blocks of a multiple of 128 tokens for this model");
  }
  for (const [id, most] of Object.entries(data.limits)) {
    if (choice[id] > most) {
      at(id).setAttribute("aria-invalid", true);
      problems.push(`expected at most ${whole(most)} ${LIMITED[id]}`);
    }
  }
  choice.gpuBytes = choice.gpu === "other" ? choice.size : data.gpus[choice.gpu];
  choice.layers = layers;
  return { choice, problems };
}

/* Numbers for reading. */

const whole = (value) => value.toLocaleString("en-US");
const exact = (value) =>
  value.toLocaleString("en-US", { minimumFractionDigits: 2, maximumFractionDigits: 12 });

function bytes(value) {
  for (const [name, unit] of [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]]) {
    if (Math.abs(value) < unit) continue;
    const digits = { minimumFractionDigits: 3, maximumFractionDigits: 3 };
    return `${(value / unit).toLocaleString("en-US", digits)} ${name}`;
  }
  return `${value} B`;
}

function tokensLabel(tokens) {
  if (tokens && tokens % 2 ** 20 === 0) return `${tokens / 2 ** 20}M`;
  return tokens >= 2 ** 10 ? `${+(tokens / 2 ** 10).toFixed(1)}k` : String(Math.round(tokens));
}

function element(name, text = "", attributes = {}, space = null) {
  const made = space ? document.createElementNS(space, name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.textContent = text;
  return made;
}

/* The stack: what one GPU holds, by what it is for. */

function stack(result, choice) {
  const sizes = { ...result.memory, weights: [0, result.weights], reserved: [0, choice.reserve] };
  return data.groups.map((group) => ({
    ...group, bytes: sum(group.components.map((name) => sizes[name][1])),
  }));
}

function drawBar(groups, result, choice) {
  const full = Math.max(choice.gpuBytes, result.needed);
  const spans = groups.map((group) => {
    const width = `width:${(100 * group.bytes) / full}%;background:${group.color}`;
    return element("span", "", { style: width, title: `${group.name}: ${bytes(group.bytes)}` });
  });
  if (result.free < 0) {
    const left = `left:calc(${(100 * choice.gpuBytes) / full}% - 1px)`;
    spans.push(element("i", "", { style: left, title: `the GPU's ${bytes(choice.gpuBytes)}` }));
  }
  at("bar").replaceChildren(...spans);
  const items = groups.filter((group) => group.bytes).map((group) => {
    const item = element("li");
    const swatch = element("b", "", { style: `background:${group.color}` });
    item.append(swatch, `${group.name} ${bytes(group.bytes)}`);
    return item;
  });
  at("legend").replaceChildren(...items);
}

function chartContexts(choice) {
  const limit = data.models[choice.model].maxPosition;
  const last = Math.min(limit, Math.max(2 * choice.context, 64 * choice.block));
  const inner = Array.from({ length: 64 }, (_, point) => {
    return Math.floor((last * (point + 1)) / 64 / choice.block) * choice.block;
  });
  return [...new Set([1, ...inner.filter((tokens) => tokens > 0), last])].sort((a, b) => a - b);
}

function drawChart(choice) {
  const space = "http://www.w3.org/2000/svg";
  const width = at("chart").clientWidth, height = width < 480 ? 230 : 300;
  const [left, right, top, bottom] = [44, 12, 14, 28];
  const contexts = chartContexts(choice), last = contexts[contexts.length - 1];
  const columns = contexts.map((context) => {
    const there = { ...choice, context };
    return stack(plan(there), there);
  });
  const heights = columns.map((groups) => sum(groups.map((group) => group.bytes)));
  const highest = Math.max(choice.gpuBytes, ...heights) * 1.06;
  const x = (tokens) => left + (tokens / last) * (width - left - right);
  const y = (size) => height - bottom - (size / highest) * (height - top - bottom);
  const svg = element("svg", "", { viewBox: `0 0 ${width} ${height}`, height, role: "img",
    "aria-label": "memory over the length of the requests" }, space);
  const add = (name, attributes, text = "") => svg.append(element(name, text, attributes, space));

  const step = niceStep(highest / 2 ** 30 / 5);
  for (let tick = 0; tick * 2 ** 30 <= highest; tick += step) {
    const level = y(tick * 2 ** 30);
    add("line", { class: "grid", x1: left, x2: width - right, y1: level, y2: level });
    add("text", { x: left - 6, y: level + 4, "text-anchor": "end" }, whole(+tick.toFixed(6)));
  }
  const base = columns.map(() => 0);
  data.groups.forEach((group, number) => {
    const lower = contexts.map((context, i) => `${x(context)},${y(base[i])}`);
    columns.forEach((groups, i) => { base[i] += groups[number].bytes; });
    const upper = contexts.map((context, i) => `${x(context)},${y(base[i])}`);
    add("polygon", { points: [...upper, ...lower.reverse()].join(" "), fill: group.color });
  });
  const parts = width < 480 ? 4 : 8;
  for (let part = 0; part <= parts; part++) {
    const tokens = (last * part) / parts;
    const anchor = part === 0 ? "start" : part === parts ? "end" : "middle";
    add("text", { x: x(tokens), y: height - 8, "text-anchor": anchor }, tokensLabel(tokens));
  }
  const limit = y(choice.gpuBytes);
  add("line", { class: "limit", "stroke-width": 1.5, x1: left, x2: width - right, y1: limit, y2: limit });
  add("text", { class: "strong", x: left + 6, y: Math.max(12, limit - 5) },
    `the GPU: ${bytes(choice.gpuBytes)}`);
  const planned = x(choice.context);
  add("line", { class: "plan", x1: planned, x2: planned, y1: top, y2: height - bottom });
  at("chart").replaceChildren(svg);
}

function niceStep(rough) {
  const power = 10 ** Math.floor(Math.log10(rough));
  return power * [1, 2, 5, 10].find((factor) => factor * power >= rough);
}

/* The tables. */

function row(kind, id, cells) {
  const made = element("tr", "", { class: kind, "data-name": id });
  cells.forEach((cell, number) => made.append(element("td", cell, number === 1 ? { class: "wide" } : {})));
  return made;
}

function section(title, names, of, memory, show) {
  const rows = names.map((name) => {
    return row("component", name, [
      data.labels[name], show(of(name)[0]), show(of(name)[1]), whole(memory[name][1]),
    ]);
  });
  const total = (column) => sum(names.map((name) => of(name)[column]));
  const all = sum(names.map((name) => memory[name][1]));
  return [row("part", title, [title, show(total(0)), show(total(1)), whole(all)]), ...rows];
}

function drawTables(result, choice) {
  const model = data.models[choice.model], { memory } = result;
  const ofBlock = blockBytes(model, choice);
  const ofSlot = { ...slotBytes(model, choice), block_table: sharedBytes(model, { ...choice, requests: 1 }, 0).block_table };
  const owned = [...Object.keys(ofBlock), ...Object.keys(ofSlot)];
  const shared = Object.keys(data.labels).filter((name) => !owned.includes(name));
  at("components").tBodies[0].replaceChildren(
    ...section("per token", Object.keys(ofBlock), (name) => ofBlock[name].map((size) => size / choice.block), memory, exact),
    ...section("per request", Object.keys(ofSlot), (name) => ofSlot[name], memory, whole),
    ...section("shared", shared, (name) => memory[name], memory, whole),
  );
  const totals = [["gpu", "memory of the GPU", choice.gpuBytes], ["weights", "weights of a rank", result.weights],
    ["reserved", "reserved", choice.reserve], ["cache", "cache", result.cache],
    ["free", result.free < 0 ? "missing" : "free", Math.abs(result.free)]];
  at("totals").tBodies[0].replaceChildren(
    ...totals.map(([id, label, size]) => {
      const made = element("tr", "", { "data-name": id });
      made.append(...[label, whole(size), bytes(size)].map((cell) => element("td", cell)));
      return made;
    }),
  );
}

function drawAnswer(result, choice) {
  const counted = `${whole(choice.requests)} request${choice.requests === 1 ? "" : "s"}`;
  const asked = `${counted} of ${whole(choice.context)} tokens`;
  const isFit = result.free >= 0;
  at("verdict").textContent = isFit
    ? `${asked}: it fits, ${bytes(result.free)} free.`
    : `${asked}: it does not fit, ${bytes(-result.free)} missing.`;
  at("verdict").className = isFit ? "fits" : "misses";
  const budget = choice.gpuBytes - result.weights - choice.reserve;
  const maxRequests = largest((requests) => plan({ ...choice, requests }).free >= 0, data.limits.requests);
  at("max-requests").textContent = whole(maxRequests);
  at("max-context").textContent = whole(maxContext(choice));
  const hasBlocks = choice.layers.csa + choice.layers.hca > 0;
  const maxBlocks = hasBlocks ? largest((blocks) => plan(choice, blocks).cache <= budget) : null;
  at("max-tokens").textContent = hasBlocks ? whole(maxBlocks * choice.block) : "any";
  const one = plan({ ...choice, requests: 1 }).memory;
  const stored = [...Object.keys(blockBytes(data.models[choice.model], choice)),
    ...Object.keys(slotBytes(data.models[choice.model], choice))];
  const payload = sum(stored.map((name) => one[name][0]));
  at("one-request").textContent = bytes(payload);
  at("one-request").title = `${whole(payload)} bytes`;
}

function drawNotes(choice) {
  const notes = [];
  if (choice.gpu !== "other") {
    notes.push("GPUs are counted as marketed, in GB of 10^9 bytes; a driver may report more.");
  }
  if (!choice.weights) notes.push("Weights are not counted: give their size.");
  if (!choice.reserve) notes.push("Activations and the CUDA context are not counted: reserve memory for them.");
  if (choice.ranks > 1) notes.push("Ranks divide weights and query heads, not rows: K = V is one head, which all query heads share.");
  at("notes").textContent = notes.join(" ");
}

function update() {
  at("size-row").hidden = at("gpu").value !== "other";
  at("size-row").style.display = at("size-row").hidden ? "none" : "";
  const { choice, problems } = readChoice();
  at("problem").textContent = problems.join("; ");
  at("answer").style.opacity = problems.length ? 0.35 : 1;
  if (problems.length) return;
  at("context-slider").value = Math.log2(choice.context);
  at("requests-slider").value = Math.log2(choice.requests);
  const result = plan(choice);
  drawAnswer(result, choice);
  drawBar(stack(result, choice), result, choice);
  drawChart(choice);
  drawTables(result, choice);
  drawNotes(choice);
}

function fill(id, names, chosen) {
  const all = names.includes(chosen) ? names : [...names, chosen];
  at(id).replaceChildren(...all.map((name) => element("option", name, { value: name })));
  at(id).value = chosen;
}

function showFormats() {
  const model = data.models[at("model").value];
  for (const [id, rows] of [["kv", model.kvRows], ["index", model.indexRows]]) {
    const names = Object.keys(rows);
    fill(id, names, names.includes(at(id).value) ? at(id).value : names[0]);
  }
  at("mtp").disabled = !model.hasMtp;
  if (!model.hasMtp) at("mtp").checked = false;
  at("context-slider").min = 8;
  at("context-slider").max = Math.log2(model.maxPosition);
}

function start() {
  const { choice } = data;
  fill("model", Object.keys(data.models), choice.model);
  fill("kv", [], choice.kv);
  fill("index", [], choice.index);
  fill("tails", Object.keys(data.tails), choice.tails);
  fill("gpu", [...Object.keys(data.gpus), "other"], choice.gpu);
  fill("block", ["128", "256", "512", "1024"], String(choice.block));
  fill("align", ["16", "576"], String(choice.align));
  for (const id of Object.keys(FIELDS)) {
    at(id).value = choice[id];
  }
  at("mtp").checked = choice.mtp;
  showFormats();
  at("model").addEventListener("input", () => {
    at("mtp").checked = data.models[at("model").value].hasMtp;
    showFormats();
  });
  at("context-slider").addEventListener("input", () => {
    const model = data.models[at("model").value];
    const tokens = Math.max(1, Math.round(2 ** at("context-slider").value / 256)) * 256;
    const nearest = Math.min(tokens, model.maxPosition);
    at("context").value = nearest % 1024 ? String(nearest) : tokensLabel(nearest);
  });
  at("requests-slider").addEventListener("input", () => {
    at("requests").value = Math.round(2 ** at("requests-slider").value);
  });
  at("choices").addEventListener("input", update);
  at("choices").addEventListener("submit", (event) => event.preventDefault());
  window.addEventListener("resize", update);
  update();
}

start();
