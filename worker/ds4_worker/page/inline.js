// What stands inside a block of Markdown: emphasis, code, links, breaks. Pure.
//
// No markup of the text becomes markup: HTML is text, images become links, and links lead to http,
// https and mailto only. Unlike in CommonMark, a line break is a break.

const MAX_DEPTH = 12; // of links in labels of links
const MAX_LABEL = 1000;
const MAX_URL = 2000;
const MAX_DELIMITERS = 2000; // in one paragraph; more are text

const PLAIN = /[^\\`![<*_~\nh]+/y;
const PUNCTUATION = /[!-/:-@[-`{-~]/;
const AUTOLINK = /<((?:https?:\/\/|mailto:)[^\s<>]{1,2000})>/y;
const BARE_URL = /https?:\/\/[^\s<>"`\\]{1,2000}/y;
const STYLES = { "*": ["em", "strong"], _: ["em", "strong"], "~": [null, "del"] };

/** The inline nodes of a text: strings and {tag, kids}. */
export function inline(text, depth = 0) {
  const parts = []; // strings, nodes, and delimiters {mark, count, opens, closes}
  let plain = "";
  let delimiters = 0;
  const missing = new Set(); // lengths of backtick runs that nothing closes
  const put = (part) => {
    if (plain) parts.push(plain);
    plain = "";
    if (part) parts.push(part);
  };
  let at = 0;
  while (at < text.length) {
    const span = scan(text, at, depth, missing);
    if (span) {
      put(span.node);
      at = span.end;
      continue;
    }
    const character = text[at];
    if (character === "\\" && at + 1 < text.length && PUNCTUATION.test(text[at + 1])) {
      plain += text[at + 1];
      at += 2;
    } else if (character === "`") {
      const end = runEnd(text, at);
      plain += text.slice(at, end);
      at = end;
    } else if (character in STYLES && delimiters < MAX_DELIMITERS) {
      const end = runEnd(text, at);
      put(delimiter(text, at, end));
      delimiters += 1;
      at = end;
    } else {
      PLAIN.lastIndex = at;
      const run = PLAIN.exec(text);
      plain += run ? run[0] : character;
      at += run ? run[0].length : 1;
    }
  }
  put(null);
  return joined(styled(parts));
}

/** What begins at a character and is complete there: a break, code, a link; or null. */
function scan(text, at, depth, missing) {
  switch (text[at]) {
    case "\n":
      return { node: { tag: "br", kids: [] }, end: at + 1 };
    case "\\":
      return text[at + 1] === "\n" ? { node: { tag: "br", kids: [] }, end: at + 2 } : null;
    case "`":
      return codeSpan(text, at, missing);
    case "<":
      return autolink(text, at);
    case "h":
      return bareUrl(text, at);
    case "!":
      return text[at + 1] === "[" ? link(text, at + 1, depth) : null;
    case "[":
      return link(text, at, depth);
    default:
      return null;
  }
}

function runEnd(text, at) {
  let end = at;
  while (text[end] === text[at]) end += 1;
  return end;
}

function codeSpan(text, at, missing) {
  const open = runEnd(text, at);
  const length = open - at;
  if (missing.has(length)) return null;
  for (let from = open; ;) {
    const start = text.indexOf("`", from);
    if (start < 0) break;
    const end = runEnd(text, start);
    if (end - start === length) {
      let code = text.slice(open, start).replaceAll("\n", " ");
      if (/^ .*[^ ].* $/.test(code)) code = code.slice(1, -1);
      return { node: { tag: "code", kids: [code] }, end };
    }
    from = end;
  }
  missing.add(length);
  return null;
}

function autolink(text, at) {
  AUTOLINK.lastIndex = at;
  const match = AUTOLINK.exec(text);
  const href = match && safeUrl(match[1]);
  if (!href) return null;
  return { node: { tag: "a", href, kids: [match[1]] }, end: at + match[0].length };
}

function bareUrl(text, at) {
  if (at > 0 && /[\w/]/.test(text[at - 1])) return null;
  BARE_URL.lastIndex = at;
  const match = BARE_URL.exec(text);
  if (!match) return null;
  let shown = match[0];
  for (;;) {
    const last = shown[shown.length - 1];
    const unbalanced = last === ")" && count(shown, ")") > count(shown, "(");
    if (!unbalanced && !/[.,;:!?'*_~\]}]/.test(last)) break;
    shown = shown.slice(0, -1);
  }
  const href = safeUrl(shown);
  return href ? { node: { tag: "a", href, kids: [shown] }, end: at + shown.length } : null;
}

function count(text, character) {
  return text.split(character).length - 1;
}

/** `[label](url "title")` at the bracket; an unsafe URL leaves the label as text. */
function link(text, at, depth) {
  if (depth >= MAX_DEPTH) return null;
  const close = labelEnd(text, at);
  if (close < 0 || text[close + 1] !== "(") return null;
  const target = linkTarget(text, close + 2);
  if (!target) return null;
  const image = text[at - 1] === "!";
  const label = text.slice(at + 1, close) || (image ? "image" : target.url);
  const kids = inline(label, depth + 1);
  const href = safeUrl(target.url);
  return { node: href ? { tag: "a", href, kids } : { tag: "span", kids }, end: target.end };
}

function labelEnd(text, at) {
  const limit = Math.min(text.length, at + MAX_LABEL);
  for (let i = at + 1, open = 1; i < limit; i += 1) {
    if (text[i] === "\\") i += 1;
    else if (text[i] === "[") open += 1;
    else if (text[i] === "]" && (open -= 1) === 0) return i;
  }
  return -1;
}

function linkTarget(text, at) {
  const limit = Math.min(text.length, at + MAX_URL);
  let end = at;
  for (let open = 0; end < limit && text[end] > " "; end += 1) {
    if (text[end] === "(") open += 1;
    else if (text[end] === ")" && (open -= 1) < 0) break;
  }
  const url = text.slice(at, end).replace(/^<(.*)>$/, "$1");
  const rest = /^[ \t]*(?:"[^"]{0,500}"|'[^']{0,500}')?[ \t]*\)/.exec(text.slice(end, end + 600));
  return rest ? { url, end: end + rest[0].length } : null;
}

/** The URL if a page may link to it, else null. Relative ones would lead into this server. */
export function safeUrl(url) {
  let parsed;
  try {
    parsed = new URL(url.trim());
  } catch {
    return null; // no absolute URL
  }
  return ["http:", "https:", "mailto:"].includes(parsed.protocol) ? parsed.href : null;
}

// --- emphasis: CommonMark's delimiter runs

function delimiter(text, at, end) {
  const mark = text[at];
  const before = at === 0 ? " " : text[at - 1];
  const after = end >= text.length ? " " : text[end];
  const left =
    !isSpace(after) && (!isPunctuation(after) || isSpace(before) || isPunctuation(before));
  const right =
    !isSpace(before) && (!isPunctuation(before) || isSpace(after) || isPunctuation(after));
  const word = mark === "_"; // an underscore inside a word is a letter
  return {
    mark,
    count: end - at,
    opens: left && (!word || !right || isPunctuation(before)),
    closes: right && (!word || !left || isPunctuation(after)),
  };
}

function isSpace(character) {
  return /\s/.test(character);
}

function isPunctuation(character) {
  return /[\p{P}\p{S}]/u.test(character);
}

/** Pairs delimiters; what is left of them becomes text. */
function styled(parts) {
  for (let close = 0; close < parts.length; close += 1) {
    const closer = parts[close];
    if (!closer.mark || !closer.closes) continue;
    const open = openerOf(parts, close);
    if (open < 0) continue;
    const opener = parts[open];
    const used = opener.count >= 2 && closer.count >= 2 ? 2 : 1;
    const kids = joined(parts.slice(open + 1, close));
    opener.count -= used;
    closer.count -= used;
    const kept = [];
    if (opener.count) kept.push(opener);
    kept.push({ tag: STYLES[closer.mark][used - 1], kids });
    parts.splice(open, close - open, ...kept);
    close = open + kept.length - 1; // at the closer next, which may close more
    if (!closer.count) parts.splice(close + 1, 1);
  }
  return parts;
}

function openerOf(parts, close) {
  const closer = parts[close];
  for (let open = close - 1; open >= 0; open -= 1) {
    const opener = parts[open];
    if (opener.mark !== closer.mark || !opener.opens) continue;
    if (closer.mark === "~" && (opener.count !== 2 || closer.count !== 2)) continue;
    const both = opener.closes || closer.opens;
    const sum = opener.count + closer.count;
    if (both && sum % 3 === 0 && opener.count % 3 !== 0) continue;
    return open;
  }
  return -1;
}

/** Unpaired delimiters as text, neighbouring texts as one. */
function joined(parts) {
  const kids = [];
  for (const part of parts) {
    const kid = part.mark ? part.mark.repeat(part.count) : part;
    if (typeof kid === "string" && typeof kids[kids.length - 1] === "string") {
      kids[kids.length - 1] += kid;
    } else {
      kids.push(kid);
    }
  }
  return kids;
}
