// What the search puts first: the guide and the reference, before lessons that have the same words.
var Scorer = {
  score: ([page, , , , score]) =>
    score + (/^docs\/(guide|api)\//.test(page) ? 12 : 0) + (/troubleshooting$/.test(page) ? 1 : 0),
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
