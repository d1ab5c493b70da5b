// Sphinx's scores, but a search of several words that are in an error message shows these first.
const words = (new URLSearchParams(location.search).get("q") || "").trim().split(/\s+/);
const Scorer = {
  score: ([page, , , , score]) =>
    page === "api/error_messages" && words.length > 2 ? score + 100 : score,
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
