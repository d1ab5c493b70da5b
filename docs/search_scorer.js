// Sphinx's scores, but the index of errors is first if the query is text of a message, else last.
// A title that contains the whole query comes before titles with some of its words.
// MESSAGES are the messages in lower case; … stands for a name, a number or a path.
const isMessage = (query) => {
  const text = query.replace(/\s+/g, " ");
  const isPhrase = (part) => part.trim().split(" ").length > 2;
  return MESSAGES.some(
    (message) =>
      (isPhrase(text) && message.includes(text)) ||
      message.split("…").some((part) => isPhrase(part) && text.includes(part.trim())),
  );
};
var Scorer = {
  score: ([page, title, , description, score]) => {
    const query = (new URLSearchParams(location.search).get("q") || "").trim().toLowerCase();
    if (page === "api/error_messages") return isMessage(query) ? score + 100 : score - 100;
    if (query && title.toLowerCase().includes(query)) score += 10;
    return description?.startsWith("Python method") ? score - 1 : score; // functions first
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
