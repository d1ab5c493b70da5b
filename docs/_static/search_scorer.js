// Sphinx's scores, but a search of several words that are in an error message shows these first.
var Scorer = {
  score: ([page, , , , score]) => {
    const query = new URLSearchParams(location.search).get("q") || "";
    const is_message = page === "api/error_messages" && query.trim().split(/\s+/).length > 2;
    return is_message ? score + 100 : score;
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
