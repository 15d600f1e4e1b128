// What happened in a run, and how it is put into words. `pack` in timeline.py describes what the model
// has. Times are nanoseconds since the first rank began.

const KINDS = { send: 0, recv: 1, collective: 2 };
const NEVER = -2; // in place of a message's other side; -1: it is not known
const SHORTEST = 200; // nanoseconds that can fill the width

function read(model) {
  const lanes = model.get("lanes"), calls = model.get("calls"), notes = model.get("notes");
  const count = lanes.reduce((sum, lane) => sum + lane.events, 0);
  const given = model.get("rows");
  const buffer = given.buffer.slice(given.byteOffset, given.byteOffset + given.byteLength); // aligned
  let at = 0;
  const take = Type => {
    const column = new Type(buffer, at, count);
    at += column.byteLength;
    return column;
  };
  const start = take(Float64Array), waited = take(Float32Array), end = take(Float32Array);
  const partner = take(Int32Array), call = take(Uint32Array);
  const kind = Uint8Array.from(call, number => KINDS[calls[number].kind]);
  // A bar is a wait, from `from` to `to`; an event that nobody waited for is an instant. What a call
  // has started goes on in the background until `flight`, when it is known to be complete.
  const from = new Float64Array(count), to = new Float64Array(count), flight = new Float64Array(count);
  const rank = new Uint32Array(count), first = [];
  const collectives = []; // by number: when the last rank called it, and its first and last lane
  let i = 0;
  lanes.forEach((lane, number) => {
    first.push(i);
    for (const stop = i + lane.events; i < stop; i++) {
      rank[i] = number;
      const waits = !Number.isNaN(waited[i]), ends = !Number.isNaN(end[i]);
      from[i] = start[i] + (waits ? waited[i] : 0);
      to[i] = waits ? (ends ? start[i] + end[i] : Math.max(lane.end, from[i])) : start[i];
      flight[i] = waited[i] === 0 ? start[i] : waits ? to[i] : start[i] + (ends ? end[i] : 0);
      if (kind[i] === 2) {
        const found = collectives[partner[i]] ??= { last: -Infinity, low: number };
        found.last = Math.max(found.last, start[i]);
        found.high = number;
      }
    }
  });
  first.push(count);
  for (i = 0; i < count; i++) { // a sender may learn late, or never, that its message has arrived
    if (kind[i] !== 0 || waited[i] === 0 || partner[i] < 0) continue;
    const arrived = start[partner[i]] + end[partner[i]];
    if (arrived < flight[i] || (Number.isNaN(end[i]) && arrived >= 0)) flight[i] = Math.max(start[i], arrived);
  }
  const whole = Math.max(SHORTEST, ...lanes.map(lane => lane.end));
  return { lanes, calls, notes, count, start, waited, end, partner, call, kind, from, to, flight, rank,
    first, collectives, whole };
}

function members(data, i) { // the rows of a message or a collective; row i is one of them
  const partner = data.partner[i];
  if (data.kind[i] !== 2) return partner >= 0 ? [i, partner] : [i];
  const found = [];
  for (let j = 0; j < data.count; j++) if (data.kind[j] === 2 && data.partner[j] === partner) found.push(j);
  return found;
}

function describe(data, i) { // an event in lines: [text, tag] each
  const call = data.calls[data.call[i]], partner = data.partner[i];
  const lines = [[`${call.name} on rank ${data.rank[i]}`, "b"], [call.line, "div"], [call.source, "code"]];
  lines.push([call.data, "div"]);
  if (call.kind === "collective") {
    const others = members(data, i).filter(j => j !== i).map(j => data.rank[j]);
    lines.push([others.length ? `with ${nameRanks(others)}` : "", "div"]);
  } else {
    const [way, never] = call.kind === "send" ? ["to", ": never received"] : ["from", ": never sent"];
    const other = partner >= 0 ? data.rank[partner] : call.peer;
    const who = other === null ? "any rank" : `rank ${other}`;
    lines.push([`${way} ${who}${partner === NEVER ? never : ""}`, "div"]);
  }
  const waits = !Number.isNaN(data.waited[i]), ends = !Number.isNaN(data.end[i]);
  let times = `called at ${time(data.start[i])}`;
  if (waits) times += ends ? `, waited ${time(data.end[i] - data.waited[i])}` : ", still waiting when the run ended";
  else times += ends ? `, done ${time(data.end[i])} later, without a wait` : ", nobody waited for it";
  if (waits && data.waited[i] > 1e5) times += `, from ${time(data.waited[i])} after the call`;
  return [...lines, [times, "div"]].filter(([text]) => text);
}

function explain(data, marked) { // a message or a collective: [what it is, who came last, the row of that]
  const [one] = marked, call = data.calls[data.call[one]], on = i => `rank ${data.rank[i]}`;
  const note = call.kind === "collective" ? data.notes[data.partner[one]] ?? "" : "";
  const title = `${marked.length > 1 ? call.op : call.name} on ${nameRanks(marked.map(i => data.rank[i]))}:`;
  if (marked.length === 1) {
    const never = call.kind === "send" ? "it was never received." : "it has no matching send.";
    if (data.partner[one] === NEVER) return [title, never, null];
    const alone = call.kind === "collective" ? "no other rank is in it." : "its partner is unknown.";
    return [title, note || alone, null];
  }
  const came = i => call.kind !== "collective" && data.kind[i] === 1 ? data.from[i] : data.start[i];
  const order = [...marked].sort((a, b) => came(a) - came(b)), early = order[0], late = order.at(-1);
  const wrong = data.lanes[data.rank[early]].clock + data.lanes[data.rank[late]].clock;
  const clocks = wrong ? ` (the clocks of the hosts may differ by ${time(wrong)})` : "";
  const after = time(came(late) - came(early));
  if (call.kind !== "collective") {
    const [send, recv] = data.kind[one] === 0 ? marked : [marked[1], one];
    const text = late === send
      ? `${on(send)} sent it ${after} after ${on(recv)} had begun to wait`
      : `${on(recv)} began to wait ${after} after ${on(send)} had sent it`;
    return [`Message from ${on(send)} to ${on(recv)}:`, `${text}${clocks}.`, late];
  }
  const length = i => data.to[i] - data.from[i];
  const longest = marked.reduce((a, b) => length(b) > length(a) ? b : a);
  const waited = length(longest) > 0 ? `; ${on(longest)} waited longest, ${time(length(longest))}` : "";
  return [title, `${on(late)} called it last, ${after} after ${on(early)}${clocks}${waited}. ${note}`, late];
}

function nameRanks(ranks) {
  const own = [...ranks].sort((a, b) => a - b), last = own.at(-1);
  if (own.length === 1) return `rank ${last}`;
  if (own.length > 3 && last - own[0] === own.length - 1) return `ranks ${own[0]} to ${last}`;
  return own.length > 8 ? `${own.length} ranks` : `ranks ${own.slice(0, -1).join(", ")} and ${last}`;
}

const UNITS = [["s", 1e9], ["ms", 1e6], ["µs", 1e3], ["ns", 1]];

function time(ns) {
  const [unit, size] = UNITS.find(([, size]) => Math.abs(ns) >= size) ?? ["ns", 1];
  return `${Number((ns / size).toPrecision(4))} ${unit}`;
}
